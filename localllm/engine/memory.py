"""Memory from the operating system: addresses that cost nothing until they are used."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np

from localllm.errors import MemoryLimitError
from localllm.kernels.system import system_number

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: do not count it against the commit limit
FIXED = 0x10  # MAP_FIXED: at this address, in the place of what is there

CONTROL_GROUP = "/sys/fs/cgroup/memory"


def available_memory() -> int:
    """Bytes that can be had, by the system and the control group's limit; sys.maxsize if nobody tells."""
    if sys.platform == "darwin":  # the level is the percentage that is not in use
        return system_number("hw.memsize") * system_number("kern.memorystatus_level") // 100 or sys.maxsize
    system = number_after("MemAvailable:", "/proc/meminfo")
    limit, used = number_after("", f"{CONTROL_GROUP}.max"), number_after("anon", f"{CONTROL_GROUP}.stat")
    group = sys.maxsize if limit is None or used is None else max(0, limit - used)
    return min(sys.maxsize if system is None else 1024 * system, group)


def number_after(name: str, path: str) -> int | None:
    """What a small system file says behind a name at the beginning of a line, None if it does not."""
    try:
        found = re.search(rf"^{name} *(\d+)", Path(path).read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


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
