"""Memory from the operating system: addresses that cost nothing until they are used."""

import ctypes
import mmap
import sys

import numpy as np

from localllm.errors import MemoryLimitError

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: do not count it against the commit limit
FIXED = 0x10  # MAP_FIXED: at this address, in the place of what is there


class Reserved:
    """`size` zero bytes that cost memory only where they are touched.

    Attributes:
        bytes: uint8 [size].  address: of the first, at a page of the system.
    """

    def __init__(self, size: int):
        """Raises MemoryLimitError."""
        try:
            self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except (OSError, OverflowError, ValueError):
            raise MemoryLimitError(f"cannot reserve {size / 1e9:.1f} GB of memory; use a smaller context") from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page is 2 MB for the first token of every head
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data

    def give_back(self, start: int, end: int) -> None:
        """Bytes `start` to `end` are not needed: the system gets the whole pages among them, they read as zero then."""
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        elif start < end:
            renew(self.address + start, end - start)


def renew(address: int, size: int) -> None:
    """Zero pages in the place of others. On other systems than Linux, advice may leave what pages hold.

    Raises MemoryLimitError.
    """
    system = ctypes.CDLL(None)
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED | NO_RESERVE
    if system.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise MemoryLimitError(f"the system takes no {size} bytes of memory back")
