"""Files of which only the header is there, and behind it a hole: as good as whole ones for whoever reads no weights.

A model on a server can be looked at so: its header has some megabytes, the weights many gigabytes.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import BinaryIO, NoReturn

from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf.file import GGUFFile, joined, open_part
from localllm.files.gguf.header import HeaderReader
from localllm.system.files import file_with_path

FIRST = 4 << 20  # bytes; the vocabulary of most models fits, others need two or three times as many
MOST = 1 << 28  # bytes that a header may have; the largest known have 20 MB


class IncompleteHeaderError(Exception):
    """The header goes on behind what is there."""


class BeginningReader(HeaderReader):
    """Reads the header of a file of which the first `there` bytes are known."""

    there = 0

    def take(self, count: int) -> int:
        start = super().take(count)
        self.require_there()
        return start

    def fail(self, problem: str) -> NoReturn:
        self.require_there()
        super().fail(problem)

    def require_there(self) -> None:
        if self.position > self.there:
            raise IncompleteHeaderError


def is_there(data: mmap.mmap, path: str, known: int) -> bool:
    """Whether the first `known` bytes of a file have all of its header. Raises ModelError if they are no header."""
    reader = BeginningReader(data, path)
    reader.there = known
    try:
        reader.read()
        reader.require_there()
        return True
    except IncompleteHeaderError:
        return False
    except ModelError as error:
        problem = type(error)(str(error))
    raise problem  # without the frames of the other one, in which arrays keep the map open


def write_header(file: BinaryIO, path: str, size: int, fetch: Callable[[int, int], bytes]) -> int:
    """Make an empty file one of `size` bytes that has its header, which fetch(start, end) gives; how many were fetched.

    path: for messages. Raises ModelError if there is no header, LocalllmError if the disk refuses, and what `fetch`
    raises.
    """
    known = 0
    try:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE) as data:
            while known < min(size, MOST):
                end = min(size, max(FIRST, 2 * known))
                data[known:end] = fetch(known, end)
                known = end
                if is_there(data, path, known):
                    return known
    except (OSError, ValueError) as error:
        raise LocalllmError(f"{path}: no room for its header: {error}") from None
    raise ModelError(f"{path}: a header of more than {known} bytes is not believable")


@contextmanager
def hollow_model(files: Mapping[str, int], fetch: Callable[[str, int, int], bytes]) -> Iterator[tuple[GGUFFile, int]]:
    """A model that has headers only, for as long as the block lasts, and how many bytes were fetched for it.

    files: sizes in bytes by name, in order, of a model's one or several files; fetch(name, start, end): bytes of them.
    What it is kept in has no name, so that nothing is left behind. Raises as write_header and GGUFFile.open.
    """
    with ExitStack() as stack:
        parts, fetched = [], 0
        for name, size in files.items():
            file, path = stack.enter_context(file_with_path())
            fetched += write_header(file, name, size, partial(fetch, name))
            try:
                parts.append(open_part(path, needed=())._replace(path=name))
            except ModelError as error:
                raise type(error)(str(error).replace(path, name)) from None
        whole = joined(parts) if len(parts) > 1 else parts[0]
        with GGUFFile(whole, {part.path: list(part.tensors) for part in parts}) as model:
            yield model, fetched
