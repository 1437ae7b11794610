"""Locks of files and names, released when the process that holds them ends."""

import ctypes
import os
import sys
from collections.abc import Callable

from localllm.system.files import get_user_folder, load_kernel32, open_without_links

# Windows: LockFileEx's flags and the offset's high half (beyond the end of all files), and error codes.
LOCK_NOW, LOCK_ALONE, LOCK_PLACE = 1, 2, 0x7FFFFFFF
IS_LOCKED, ALREADY_EXISTS = 33, 183


def lock_file(descriptor: int) -> bool:
    """Lock a file while this process has it open; return False if another process holds the lock.

    Returns True without locking if the file system does not support locks.
    """
    if sys.platform == "win32":
        return lock_windows_file(descriptor)
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class Overlapped(ctypes.Structure):
    """Windows' OVERLAPPED structure; a lock needs its offset."""

    _fields_ = (
        ("internal", ctypes.c_size_t * 2),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


def lock_windows_file(descriptor: int) -> bool:
    """Lock a byte beyond the end of all files, since Windows keeps others from reading and writing locked bytes."""
    import msvcrt

    ask = load_kernel32().LockFileEx
    ask.argtypes = [ctypes.c_void_p, *[ctypes.c_uint32] * 4, ctypes.c_void_p]
    handle = msvcrt.get_osfhandle(descriptor)  # type: ignore[attr-defined]
    if ask(handle, LOCK_NOW | LOCK_ALONE, 0, 1, 0, ctypes.byref(Overlapped(high=LOCK_PLACE))):
        return True
    result: bool = ctypes.get_last_error() != IS_LOCKED  # type: ignore[attr-defined]
    return result


class NameLock:
    """A name that only one process on this computer holds, until it is closed or the process ends.

    Implemented as an abstract socket on Linux and a mutex on Windows, which leave nothing on the disk, and a locked
    file on macOS.
    """

    def __init__(self, name: str):
        """Claim a name. Raises FileExistsError if this or another process holds it."""
        self._close: Callable[[], object] | None = None
        if sys.platform == "linux":
            import errno
            import socket

            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._close = holder.close
            try:
                holder.bind(f"\0{name}")
            except OSError as error:
                self.close()
                if error.errno == errno.EADDRINUSE:
                    raise FileExistsError(name) from None
        elif sys.platform == "win32":
            system = load_kernel32()
            system.CreateMutexW.restype = ctypes.c_void_p
            handle = system.CreateMutexW(None, 0, f"Local\\{name}")
            problem = ctypes.get_last_error()
            self._close = lambda: system.CloseHandle(ctypes.c_void_p(handle))
            if problem == ALREADY_EXISTS:
                self.close()
                raise FileExistsError(name)
        else:
            place = get_user_folder("cache") / "locks"
            try:
                place.mkdir(0o700, parents=True, exist_ok=True)
                descriptor = open_without_links(place / name, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:  # the folder is not writable: continue without a lock
                return
            self._close = lambda: os.close(descriptor)
            if not lock_file(descriptor):
                self.close()
                raise FileExistsError(name)

    def close(self) -> None:
        """Release the name."""
        if self._close:
            self._close()
            self._close = None
