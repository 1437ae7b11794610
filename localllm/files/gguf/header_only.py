"""Open remote GGUF files after downloading only their headers: megabytes instead of gigabytes.

The local file is sparse beyond the header, which is enough for everything that reads no weights.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import BinaryIO, NoReturn

from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf.file import GGUFFile, map_split, merge_parts
from localllm.files.gguf.header import HeaderReader
from localllm.system.files import open_temporary_file

FIRST_BYTES = (
    4 << 20
)  # bytes of the first download; most models' vocabularies fit, others need two or three times as many
MAX_BYTES = 1 << 28  # maximum size of a header in bytes; the largest known has 20 MB


class IncompleteHeaderError(Exception):
    """The downloaded bytes end before the header does."""


class PartialHeaderReader(HeaderReader):
    """A header reader for a file of which only the first `there` bytes are downloaded."""

    there = 0

    def take(self, count: int) -> int:
        start = super().take(count)
        self.require_available()
        return start

    def fail(self, problem: str) -> NoReturn:
        self.require_available()
        super().fail(problem)

    def require_available(self) -> None:
        if self.position > self.there:
            raise IncompleteHeaderError


def is_header_complete(data: mmap.mmap, path: str, available: int) -> bool:
    """Return whether the first `available` bytes of a file contain its whole header.

    Raises ModelError if they are not a GGUF header.
    """
    reader = PartialHeaderReader(data, path)
    reader.there = available
    try:
        reader.read()
        reader.require_available()
        return True
    except IncompleteHeaderError:
        return False
    except ModelError as error:
        problem = type(error)(str(error))
    raise problem  # a new exception: the frames of the caught one refer to arrays that keep the map open


def write_header(file: BinaryIO, path: str, size: int, fetch: Callable[[int, int], bytes]) -> int:
    """Download a model's header into an empty file, extend it to `size` bytes, and return the number of bytes fetched.

    fetch(start, end) returns bytes of the model. path: for messages. Raises ModelError for an invalid header,
    LocalllmError if the disk is full or a write fails, and the exceptions of `fetch`.
    """
    available = 0
    try:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE) as data:
            while available < min(size, MAX_BYTES):
                end = min(size, max(FIRST_BYTES, 2 * available))
                data[available:end] = fetch(available, end)
                available = end
                if is_header_complete(data, path, available):
                    return available
    except (OSError, ValueError) as error:
        raise LocalllmError(f"{path}: cannot write its header to the temporary folder: {error}") from None
    raise ModelError(f"{path}: the header must have at most {available} bytes")


@contextmanager
def open_header_only(
    files: Mapping[str, int], fetch: Callable[[str, int, int], bytes]
) -> Iterator[tuple[GGUFFile, int]]:
    """Open a model by its headers only, in a `with` block; yield it and the number of bytes fetched.

    files: sizes in bytes of the model's files, by name, in order. fetch(name, start, end) returns bytes of a file. The
    temporary files have no name, so nothing is left behind. Raises the errors of write_header and GGUFFile.open.
    """
    with ExitStack() as stack:
        parts, fetched = [], 0
        for name, size in files.items():
            file, path = stack.enter_context(open_temporary_file())
            fetched += write_header(file, name, size, partial(fetch, name))
            try:
                parts.append(map_split(path, needed=())._replace(path=name))
            except ModelError as error:
                raise type(error)(str(error).replace(path, name)) from None
        merged = merge_parts(parts) if len(parts) > 1 else parts[0]
        with GGUFFile(merged, {part.path: list(part.tensors) for part in parts}) as model:
            yield model, fetched
