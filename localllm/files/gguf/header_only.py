"""Opens remote GGUF files after downloading only their headers.

The rest of the local file is a hole, which is enough for everything that reads no weights. A header has some megabytes,
the weights many gigabytes.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import BinaryIO, NoReturn

from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf.file import GGUFFile, merge_parts, open_part
from localllm.files.gguf.header import HeaderReader
from localllm.system.files import open_temporary_file

FIRST_BYTES = (
    4 << 20
)  # bytes of the first download; most models' vocabularies fit, others need two or three times as many
MAX_BYTES = 1 << 28  # maximum size of a header in bytes; the largest known has 20 MB


class IncompleteHeaderError(Exception):
    """The header does not end within the downloaded bytes."""


class PartialHeaderReader(HeaderReader):
    """A header reader for a file whose first `there` bytes are downloaded."""

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
    """Return whether the first `available` bytes of a file hold its whole header.

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
    """Fill an empty file with a model's header and extend it to `size` bytes; return the bytes fetched.

    fetch(start, end) returns bytes of the model. path: for messages. Raises ModelError if there is no valid header,
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
        raise LocalllmError(f"{path}: no disk space for its header: {error}") from None
    raise ModelError(f"{path}: the header must have at most {available} bytes")


@contextmanager
def open_header_only(
    files: Mapping[str, int], fetch: Callable[[str, int, int], bytes]
) -> Iterator[tuple[GGUFFile, int]]:
    """Open a model by its headers only, in a `with` block; yield it and the number of bytes fetched.

    files: the model's file or files in order, sizes in bytes by name. fetch(name, start, end) returns bytes of a file.
    The temporary files have no name, so nothing is left behind. Raises the errors of write_header and GGUFFile.open.
    """
    with ExitStack() as stack:
        parts, fetched = [], 0
        for name, size in files.items():
            file, path = stack.enter_context(open_temporary_file())
            fetched += write_header(file, name, size, partial(fetch, name))
            try:
                parts.append(open_part(path, needed=())._replace(path=name))
            except ModelError as error:
                raise type(error)(str(error).replace(path, name)) from None
        merged = merge_parts(parts) if len(parts) > 1 else parts[0]
        with GGUFFile(merged, {part.path: list(part.tensors) for part in parts}) as model:
            yield model, fetched
