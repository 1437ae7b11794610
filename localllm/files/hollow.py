"""Files of which only the header is there, and behind it a hole: as good as whole ones for whoever reads no weights.

A model on a server can be looked at so: its header has some megabytes, the weights many gigabytes.
"""

import mmap
import os
from collections.abc import Callable
from typing import NoReturn

from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf_header import HeaderReader

FIRST = 4 << 20  # bytes; the vocabulary of most models fits, others need two or three times as many
MOST = 1 << 28  # bytes that a header may have; the largest known have 20 MB


class NotThereError(Exception):
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
            raise NotThereError


def is_there(path: str, known: int) -> bool:
    """Whether the first `known` bytes of the file have all of the header. Raises ModelError if they are no header."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = BeginningReader(data, path)
    reader.there = known
    try:
        reader.read()
        reader.require_there()
    except NotThereError:
        return False
    return True


def write_hollow(path: str, size: int, fetch: Callable[[int, int], bytes]) -> int:
    """Make a file of `size` bytes with a GGUF header, which comes from fetch(start, end); how many bytes were fetched.

    Raises ModelError if there is no header, LocalllmError if the file cannot be written, and what `fetch` raises.
    """
    try:
        with open(path, "wb", buffering=0) as file:
            os.truncate(file.fileno(), size)
            known = 0
            while known < min(size, MOST):
                end = min(size, max(FIRST, 2 * known))
                file.write(fetch(known, end))
                known = end
                if is_there(path, known):
                    return known
    except OSError as error:
        raise LocalllmError(f"{path}: cannot be written: {error.strerror or error}") from None
    raise ModelError(f"{path}: a header of more than {known} bytes is not believable")
