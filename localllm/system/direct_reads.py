"""Read files without the operating system's cache, into memory of the caller.

Offsets, sizes and addresses must be multiples of BLOCK. Where the operating system or the file system does not support
this (tmpfs), the cache is used.
"""

import ctypes
import os
import sys

from localllm.system.files import OPEN_EXISTING, READ, create_handle, load_kernel32, raise_last_error

BLOCK = 4096  # bytes
NO_BUFFERING = 0x20000000  # Windows: FILE_FLAG_NO_BUFFERING
END_OF_FILE = 38  # Windows: ERROR_HANDLE_EOF


class DirectFile:
    """A file that several threads may read at the same time; call close at the end."""

    def __init__(self, path: str):
        """Open a file. Raises OSError."""
        self._handle = (
            create_handle(path, READ, OPEN_EXISTING, NO_BUFFERING) if sys.platform == "win32" else open_direct(path)
        )

    def read_into(self, target: memoryview, offset: int) -> int:
        """Read until the target is full or the file ends; return the number of bytes. Raises OSError."""
        read, done = (read_windows_handle if sys.platform == "win32" else read_descriptor), 0
        while done < len(target):
            count = read(self._handle, target[done:], offset + done)
            done += count
            if not count or done % BLOCK:  # the end of the file
                break
        return done

    def close(self) -> None:
        if sys.platform == "win32":
            load_kernel32().CloseHandle(ctypes.c_void_p(self._handle))
        else:
            os.close(self._handle)


def open_direct(path: str) -> int:
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without it, such as tmpfs
            pass
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    return descriptor


def read_descriptor(descriptor: int, target: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [target], offset)


class Overlapped(ctypes.Structure):
    """Windows' OVERLAPPED, which has the offset of a read."""

    _fields_ = (
        ("internal", ctypes.c_void_p * 2),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


def read_windows_handle(handle: int, target: memoryview, offset: int) -> int:
    read, count = load_kernel32().ReadFile, ctypes.c_uint32()
    read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    where = Overlapped(offset=offset & 0xFFFFFFFF, offset_high=offset >> 32)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    if not read(handle, address, len(target), ctypes.byref(count), ctypes.byref(where)):
        if ctypes.get_last_error() == END_OF_FILE:  # type: ignore[attr-defined]
            return 0
        raise_last_error()
    return count.value
