"""Write files atomically: a file appears under its name complete, or not at all.

The bytes go to a temporary file in the target's folder, which replaces the target once everything is on disk. On Linux
the temporary file has no name until then, so that even a killed process leaves nothing behind.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from localllm.errors import LocalllmError, UsageError
from localllm.system.files import (
    create_temporary_file,
    find_name_problem,
    link_nameless_file,
    open_nameless_file,
    open_without_links,
    replace_file,
    sync_file,
    sync_folder,
)
from localllm.system.locks import NameLock, lock_file

if TYPE_CHECKING:
    import numpy as np


TEMPORARY = re.compile(r"\.localllm-[0-9]+-.*\.tmp")


def resolve_target(path: str | os.PathLike[str], inputs: tuple[str, ...] = ()) -> str:
    """Return the real path of a file to be written, with all links resolved.

    inputs: files that the output must not replace. Raises UsageError if the path cannot be written or is an input.
    """
    path = os.fsdecode(path)
    if not path or "\0" in path:
        raise UsageError("the output needs a file name" if not path else f"{path!r} is not a valid file name")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if problem := find_name_problem(os.path.basename(target)):
        raise UsageError(f"{path if len(path) < 100 else path[:100] + '…'}: {problem}")
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: the folder {folder} does not exist; create it first")
    if os.path.lexists(target):
        if not os.path.isfile(target):
            raise UsageError(f"{path}: the output must be a regular file")
        if any(os.path.samefile(target, name) for name in inputs if os.path.exists(name)):
            raise UsageError(f"{path}: the output is also an input; choose another name")
        if not os.access(target, os.W_OK):
            raise UsageError(f"{path}: this file exists and is write-protected; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: no permission to write in {folder}; choose another folder")
    return target


class SafeFile:
    """A new file, open for writing in a `with` block, which replaces `path` unless the block raises.

    Its methods raise LocalllmError with the reason if the disk is full or a write fails.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.realpath(path)
        self.folder = os.path.dirname(self.path)
        self.temporary = ""  # the temporary file's path, while it has one
        self.position = 0
        self.finished = False

    def __enter__(self) -> Self:
        remove_abandoned(self.folder)
        try:
            self._descriptor = open_nameless_file(self.folder)
        except OSError:  # this system or file system has no nameless files
            self._descriptor = -1
        try:
            if self._descriptor < 0:
                self._descriptor, self.temporary = create_temporary_file(self.folder, get_temporary_prefix())
            lock_file(self._descriptor)
        except OSError as error:
            raise self.make_error(error) from None
        return self

    def write(self, data: "bytes | memoryview | np.ndarray") -> None:
        """Append all bytes of a buffer or a contiguous array."""
        remaining = memoryview(data if isinstance(data, bytes | memoryview) else data.data).cast("B")
        try:
            while remaining.nbytes:
                count = os.write(self._descriptor, remaining)
                self.position += count
                remaining = remaining[count:]
        except OSError as error:
            raise self.make_error(error) from None

    def sync(self) -> None:
        """Wait until all written bytes are on disk."""
        try:
            sync_file(self._descriptor)
        except OSError as error:
            raise self.make_error(error) from None

    def finish(self) -> None:
        """Replace the target now, not at the end of the block."""
        self.sync()
        try:
            if not self.temporary:
                self._link()
            replace_file(self.temporary, self.path)
            self.temporary, self.finished = "", True
            sync_folder(self.folder)
        except OSError as error:
            raise self.make_error(error) from None

    def _link(self) -> None:
        """Give the nameless file a temporary name, because a link cannot replace an existing file."""
        self.temporary = os.path.join(self.folder, f"{get_temporary_prefix()}{id(self):x}.tmp")
        link_nameless_file(self._descriptor, self.temporary)

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and not self.finished:
                self.finish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file, and remove it unless it has replaced the target."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.temporary:
            with suppress(FileNotFoundError):
                os.unlink(self.temporary)
            self.temporary = ""

    def make_error(self, error: OSError) -> LocalllmError:
        """Build the error for a failed write."""
        return LocalllmError(f"{self.path}: cannot be written: {error.strerror or error}; nothing was changed")


def get_temporary_prefix() -> str:
    return f".localllm-{os.getpid()}-"


def remove_abandoned(folder: str) -> None:
    """Remove the temporary files of killed processes, which hold no locks any more."""
    with suppress(OSError):
        for name in filter(TEMPORARY.fullmatch, os.listdir(folder)):
            remove_unlocked(os.path.join(folder, name))


def remove_unlocked(path: str | os.PathLike[str]) -> None:
    """Remove a file unless a process has locked it."""
    with suppress(OSError):
        descriptor = open_without_links(path, os.O_RDWR)
        try:
            if lock_file(descriptor):
                os.unlink(path)
        finally:
            os.close(descriptor)


class WriteLock:
    """A lock for the duration of a `with` block: no other localllm on this computer can write `path`.

    Raises UsageError if another one is writing it.
    """

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        import hashlib

        name = hashlib.sha256(os.fsencode(os.path.realpath(self._path))).hexdigest()
        try:
            self._claim = NameLock(f"localllm-writes-{name}")
        except FileExistsError:
            raise UsageError(
                f"{self._path}: another localllm is writing this file; wait until it has finished"
            ) from None

    def __exit__(self, *error: object) -> None:
        self._claim.close()


def create_private_folder(folder: Path) -> Path:
    """Create a folder that only this user can read, and return its path. Raises LocalllmError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalllmError(f"{folder}: cannot be created: {error.strerror}") from None
    return folder
