"""Detect that a source's files changed while they were read."""

import os
from collections.abc import Sequence

from localllm.errors import ModelError


class SourceGuard:
    """The sizes and times of files when reading began.

    Attributes:
        identity: for each file (path, bytes, time of the last change in ns), None for a missing file.
    """

    def __init__(self, files: Sequence[str]):
        self._files = [*files]
        self.identity = self._read()

    def _read(self) -> list[tuple[str, int, int] | None]:
        return [identity_of(path) for path in self._files]

    def check(self) -> None:
        """Raise ModelError if a file has changed."""
        for path, old, new in zip(self._files, self.identity, self._read(), strict=True):
            if old != new:
                raise ModelError(f"{path}: this file changed while it was read; nothing was written")


def identity_of(path: str) -> tuple[str, int, int] | None:
    """Return a file's identity, which changes with its content; None if the file is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return os.path.abspath(path), status.st_size, status.st_mtime_ns
