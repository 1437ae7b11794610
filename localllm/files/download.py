"""Resume downloads, and give a file its name only once its SHA-256 is verified.

Received bytes go to NAME.CHECKSUM.partial next to the target; after a crash the next process appends to it. Its last
bytes may be wrong then (zeros after a system crash), which the final check detects.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.models_folder import PARTIAL
from localllm.files.safe_file import remove_unlocked
from localllm.system.files import open_without_links, read_at, replace_file, sync_file, sync_folder, write_at
from localllm.system.locks import lock_file

CHUNK = 1 << 22  # bytes read at once


class Download:
    """A partly downloaded file, open for writing in a `with` block and locked against other processes.

    Attributes:
        path: path of the partial file.  position: its size in bytes.
    """

    def __init__(self, target: Path, size: int, sha256: str, on_read: Callable[[int], None] = lambda done: None):
        """Prepare a download without opening the file.

        size: of the complete file, in bytes. sha256: its hash, in hexadecimal. on_read: called with the number of bytes
        hashed so far, while a partial file of an earlier process is checked.
        """
        self.target, self.size, self.sha256 = target, size, sha256
        self.path = target.with_name(f"{target.name}.{sha256[:16]}{PARTIAL}")
        self._on_read = on_read

    def __enter__(self) -> Self:
        """Open the partial file and hash the bytes that it has.

        Raises UsageError if another process has it open, LocalllmError if the folder cannot be written to.
        """
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open_locked()
            self._remove_other_versions()
            if os.fstat(self._descriptor).st_size > self.size:
                os.ftruncate(self._descriptor, 0)
            self._read()
        except OSError as error:
            raise self._make_error(error) from None
        return self

    def _open_locked(self) -> int:
        """Open and lock the partial file, again if another process has renamed or replaced it meanwhile."""
        while True:
            descriptor = open_without_links(self.path, os.O_RDWR | os.O_CREAT)
            if not lock_file(descriptor):
                os.close(descriptor)
                raise UsageError(f"{self.target}: another localllm is pulling this file; wait until it has finished")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                    return descriptor
            os.close(descriptor)

    def _remove_other_versions(self) -> None:
        """Remove partial files of the target with other checksums."""
        for path in find_partials(self.target):
            if path != self.path:
                remove_unlocked(path)

    def _read(self) -> None:
        """Hash the existing bytes, so that `write` continues after them."""
        self._hash, self.position = hashlib.sha256(), 0
        while data := read_at(self._descriptor, CHUNK, self.position):
            self._hash.update(data)
            self.position += len(data)
            self._on_read(self.position)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises LocalllmError if the disk is full or a write fails."""
        remaining = memoryview(data)
        try:
            while remaining:
                count = write_at(self._descriptor, remaining, self.position)
                self._hash.update(remaining[:count])
                self.position += count
                remaining = remaining[count:]
        except OSError as error:
            raise self._make_error(error) from None

    @property
    def is_verified(self) -> bool:
        """Return whether size and checksum are those of the complete file."""
        return self.position == self.size and self._hash.hexdigest() == self.sha256

    def restart(self) -> None:
        """Discard all bytes and start again."""
        os.ftruncate(self._descriptor, 0)
        self._read()

    def finish(self, check: Callable[[str], object]) -> None:
        """Rename the file to its target if `check` accepts its path; otherwise remove it.

        Raises ModelError for a wrong checksum, any error of `check`, and LocalllmError.
        """
        if problem := self._find_problem(check):
            self.restart()  # __exit__ removes an empty file
            raise problem
        try:
            sync_file(self._descriptor)
            replace_file(self.path, self.target)
            sync_folder(str(self.target.parent))
        except OSError as error:
            raise self._make_error(error) from None

    def _find_problem(self, check: Callable[[str], object]) -> ModelError | None:
        """Return the reason to reject the file, or None.

        The exception is a new one without references to arrays that `check` mapped: Windows cannot truncate a mapped
        file.
        """
        try:
            if not self.is_verified:
                raise ModelError(f"{self.target}: the download is corrupt (wrong size or SHA-256); pull it again")
            check(str(self.path))
        except ModelError as error:
            return type(error)(str(error).replace(str(self.path), str(self.target)))
        return None

    def __exit__(self, *error: object) -> None:
        """Close the file; remove it if it is empty."""
        if self.position == 0:
            with suppress(OSError):
                os.unlink(self.path)
        os.close(self._descriptor)

    def _make_error(self, error: OSError) -> LocalllmError:
        return LocalllmError(f"{self.target}: cannot be written: {error.strerror or error}")


def find_partials(target: Path) -> list[Path]:
    """List the partial files of a target, of any version."""
    with suppress(OSError):
        return [
            path
            for path in target.parent.iterdir()
            if path.name.startswith(f"{target.name}.") and path.name.endswith(PARTIAL)
        ]
    return []


def compute_sha256(path: Path, on_read: Callable[[int], None]) -> str:
    """Compute a file's SHA-256 as hexadecimal digits.

    on_read: called with the number of bytes read so far.
    """
    digest, count = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK):
            digest.update(data)
            count += len(data)
            on_read(count)
    return digest.hexdigest()
