"""Files that appear whole, under their name, or not at all.

The bytes go to a file beside the target, which replaces it when everything is on the disk. On Linux that file has no
name until then, so that even a process that is killed leaves nothing behind.
"""

import errno
import os
import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from localllm.errors import LocalllmError, UsageError

NAME_BYTES = 255  # of a file, on almost all systems
TEMPORARY = re.compile(r"\.localllm-[0-9]+-.*\.tmp")


def checked_target(path: str | os.PathLike[str], inputs: tuple[str, ...] = ()) -> str:
    """Where writing to `path` ends up: links are followed. Raises UsageError if that cannot be a new regular file.

    inputs: files that must not be replaced, by whatever link or name `path` leads to one.
    """
    path = os.fsdecode(path)
    if not path or "\0" in path:
        raise UsageError("the output has no name" if not path else f"{path!r}: no name for a file")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if len(os.fsencode(os.path.basename(target))) > NAME_BYTES:
        raise UsageError(f"{path[:100]}…: a name for a file has at most {NAME_BYTES} bytes")
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: there is no folder {folder}")
    if os.path.lexists(target):
        if not os.path.isfile(target):
            raise UsageError(f"{path}: not a regular file")
        if any(os.path.samefile(target, name) for name in inputs if os.path.exists(name)):
            raise UsageError(f"{path}: the output is an input; give it another name")
        if not os.access(target, os.W_OK):
            raise UsageError(f"{path}: this file exists and is write-protected")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: no permission to write in {folder}")
    return target


class SafeFile:
    """A new file for `path`, open for writing in a `with` block; at its end it is there, if the block raised nothing.

    Raises LocalllmError, with the reason, if the disk is full or refuses.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.realpath(path)
        self.folder = os.path.dirname(self.path)
        self.temporary = ""  # the name beside the target, while there is one
        self.position = 0
        self.finished = False

    def __enter__(self) -> Self:
        remove_abandoned(self.folder)
        try:
            self._descriptor = self._nameless()
        except OSError:  # another system, or a file system without such files
            self._descriptor = -1
        try:
            if self._descriptor < 0:
                import tempfile  # seldom needed, and slow to import

                self._descriptor, self.temporary = tempfile.mkstemp(".tmp", temporary_prefix(), self.folder)
                os.chmod(self.temporary, 0o666 & ~umask())
            lock(self._descriptor)
        except OSError as error:
            raise self.failure(error) from None
        return self

    def _nameless(self) -> int:
        if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):  # where it gets its name from
            raise OSError
        return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)

    def write(self, data: Any) -> None:
        """All bytes of a buffer (bytes, or a contiguous array), at the end."""
        rest = memoryview(data).cast("B")
        try:
            while rest.nbytes:
                written = os.write(self._descriptor, rest)
                self.position += written
                rest = rest[written:]
        except OSError as error:
            raise self.failure(error) from None

    def sync(self) -> None:
        """Wait until what was written so far is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self.failure(error) from None

    def finish(self) -> None:
        """Give the file its name now, not at the end of the block."""
        self.sync()
        try:
            if not self.temporary:
                self._link()
            os.replace(self.temporary, self.path)
            self.temporary, self.finished = "", True
            sync_folder(self.folder)
        except OSError as error:
            raise self.failure(error) from None

    def _link(self) -> None:
        """Name the nameless file. A link cannot replace a file, so it gets a name of its own first."""
        temporary = os.path.join(self.folder, f"{temporary_prefix()}{id(self):x}.tmp")
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            self.temporary = temporary
            os.link(f"/proc/self/fd/{self._descriptor}", temporary, src_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.finished:
                self.finish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file; if it has not replaced the target, it is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.temporary:
            with suppress(FileNotFoundError):
                os.unlink(self.temporary)
            self.temporary = ""

    def failure(self, error: OSError) -> LocalllmError:
        """What went wrong, for people."""
        return LocalllmError(f"{self.path}: cannot be written: {error.strerror or error}; nothing was changed")


def temporary_prefix() -> str:
    return f".localllm-{os.getpid()}-"


def lock(descriptor: int) -> bool:
    """Lock a file as long as this process has it open, where the system can; False if another one has locked it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def remove_abandoned(folder: str) -> None:
    """What processes that were killed have left: temporary files that nobody has locked any more."""
    with suppress(OSError):
        for name in filter(TEMPORARY.fullmatch, os.listdir(folder)):
            remove_unlocked(os.path.join(folder, name))


def remove_unlocked(path: str | os.PathLike[str]) -> None:
    """Remove a file unless a process has it open and locked."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            if lock(descriptor):
                os.unlink(path)
        finally:
            os.close(descriptor)


class OnlyWriter:
    """In a `with` block, no other localllm on this computer writes to `path`: UsageError if one does already.

    A name among Linux's abstract sockets, which goes when the process goes and leaves nothing on the disk.
    """

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        import hashlib
        import socket

        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = hashlib.sha256(os.fsencode(os.path.realpath(self._path))).hexdigest()
            try:
                self._socket.bind(f"\0localllm-writes-{name}")
            except OSError as error:
                self._socket.close()
                if error.errno == errno.EADDRINUSE:
                    raise UsageError(f"{self._path}: another localllm is writing this file") from None

    def __exit__(self, *error: object) -> None:
        if self._socket:
            self._socket.close()


def umask() -> int:
    """The permissions that new files do not get. The system tells them only by changing them."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(folder: str) -> None:
    """Make a new name last through a power failure, where the system can."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
