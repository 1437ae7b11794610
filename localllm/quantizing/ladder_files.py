"""The unfinished files of a ladder, and the record of their progress."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from localllm.errors import LocalllmError
from localllm.files.safe_file import SafeFile
from localllm.quantizing.plan import TensorJob
from localllm.system.files import open_own, replace, sync

if TYPE_CHECKING:
    import numpy as np

PART, STATE = ".part", ".ladder"  # suffixes of unfinished files and of the record


class Written(NamedTuple):
    """A finished file."""

    path: str
    nbytes: int
    sha256: str


class PartFile:
    """A file that is written under another name, and renamed when it is complete."""

    def __init__(self, target: str, header: bytes, tensors: Sequence[TensorJob], alignment: int):
        self.target, self.path, self._header, self._alignment = target, target + PART, header, alignment
        self._sizes = {job.tensor.name: job.output.nbytes for job in tensors}
        self.nbytes = len(header) + sum(map(self._padded, self._sizes.values()))
        self._digest, self._descriptor, self._position, self.is_named = hashlib.sha256(), -1, 0, False

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def length(self, names: Sequence[str]) -> int:
        """Return the length of the file after the header and these tensors."""
        return len(self._header) + sum(self._padded(self._sizes[name]) for name in names if name in self._sizes)

    def open(self, kept_bytes: int) -> None:
        """Open the file with the first `kept_bytes` bytes of an earlier run, 0 to begin. Raises LocalllmError."""
        self.is_named = kept_bytes == self.nbytes and not os.path.lexists(self.path)  # an earlier run had renamed it
        try:
            path, flags = (self.target, os.O_RDONLY) if self.is_named else (self.path, os.O_RDWR | os.O_CREAT)
            self._descriptor = open_own(path, flags)
            if not self.is_named:
                os.ftruncate(self._descriptor, kept_bytes)
            while self._position < kept_bytes:
                data = os.read(self._descriptor, min(kept_bytes - self._position, 1 << 24))
                self._digest.update(data)
                self._position += len(data)
        except OSError as error:
            raise self._failure(error) from None
        if not kept_bytes:
            self.write(self._header)

    def has(self, kept_bytes: int) -> bool:
        """Return whether an earlier run has written that many bytes."""
        if kept_bytes == self.nbytes and not os.path.lexists(self.path):
            return os.path.isfile(self.target) and os.path.getsize(self.target) == kept_bytes
        try:
            return os.stat(self.path, follow_symlinks=False).st_size >= kept_bytes
        except OSError:
            return False

    def write(self, data: "bytes | np.ndarray") -> None:
        """Append the bytes of a buffer. Raises LocalllmError."""
        remaining = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        self._digest.update(remaining)
        try:
            while remaining.nbytes:
                count = os.write(self._descriptor, remaining)
                self._position += count
                remaining = remaining[count:]
        except OSError as error:
            raise self._failure(error) from None

    def pad(self) -> None:
        """Add the padding after a tensor."""
        self.write(bytes(self._padded(self._position) - self._position))

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        if self.is_named:
            return
        try:
            sync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from None

    def finish(self) -> Written:
        """Rename the complete file."""
        try:
            if not self.is_named:
                replace(self.path, self.target)
        except OSError as error:
            raise self._failure(error) from None
        return Written(self.target, self.nbytes, self._digest.hexdigest())

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _failure(self, error: OSError) -> LocalllmError:
        return LocalllmError(f"{self.target}: cannot be written: {error.strerror or error}")


class State:
    """A record on the disk of how many tensors all files have."""

    def __init__(self, path: str, key: str):
        self.path, self._key = path, key
        self.done, self.seconds = 0, dict[str, float]()
        try:
            with open(path, "rb") as file:
                state = json.loads(file.read(1 << 20))
            if state["key"] == key:
                self.done, self.seconds = int(state["done"]), {name: float(n) for name, n in state["seconds"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass

    def save(self) -> None:
        """Store it. Raises LocalllmError."""
        with SafeFile(self.path) as file:
            file.write(json.dumps({"key": self._key, "done": self.done, "seconds": self.seconds}).encode())

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
