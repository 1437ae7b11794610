"""Memory: lazily committed regions, file mappings, free memory, and executable memory."""

import contextlib
import ctypes
import mmap
import os
import re
import sys
import weakref
from pathlib import Path

from localllm.system.control_groups import read_memory_left
from localllm.system.cpu import read_sysctl
from localllm.system.files import load_kernel32

PAGE = mmap.PAGESIZE
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: do not count it against the commit limit
FIXED = 0x10  # MAP_FIXED: replace the pages at this address
MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, since 5.14
SAMPLES = 64  # bytes of a file to probe whether the operating system has cached it
# Windows: flags of VirtualAlloc, VirtualFree and VirtualProtect.
COMMIT, RESERVE, DECOMMIT, RELEASE, READ_WRITE, EXECUTE_READ = 0x1000, 0x2000, 0x4000, 0x8000, 0x04, 0x20


class MemoryRegion:
    """`size` zero bytes that take memory only once they are touched.

    On Windows, unless `whole`, call `use` before touching any. With `huge`, they are in huge pages where the system has
    them, and count against its commit limit at once.

    Attributes:
        buffer: the bytes; they are freed with it.  address: of the first byte, aligned to a page of the system.
        is_whole: whether all of them may be touched without calling `use`.
    """

    def __init__(self, size: int, whole: bool = True, huge: bool = False):
        """Reserve the addresses.

        whole: on Windows, also commit all memory.  huge: prefer huge pages.  Raises OSError if the system refuses, and
        OverflowError or ValueError for an impossible size.
        """
        self.buffer: mmap.mmap | ctypes.Array[ctypes.c_uint8]
        self.is_whole = whole or sys.platform != "win32"
        if sys.platform == "win32":
            self.address = allocate_virtual(0, size, RESERVE | (COMMIT if whole else 0))
            self.buffer = (ctypes.c_uint8 * size).from_address(self.address)
            weakref.finalize(self.buffer, free_virtual, self.address, 0, RELEASE).atexit = False
            return
        self.buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if huge else NO_RESERVE))
        # Without MADV_NOHUGEPAGE each head's first token would take 2 MB.
        if (advice := getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)) is not None:
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                self.buffer.madvise(advice)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def use(self, start: int, end: int) -> None:
        """Commit bytes [start, end); bytes in use keep their values. Raises OSError."""
        if not self.is_whole and start < end:
            allocate_virtual(self.address + start, end - start, COMMIT)

    def give_back(self, start: int, end: int) -> None:
        """Release the whole pages within bytes [start, end), which then read as zero. Raises OSError.

        On Windows, call `use` again before touching them if the region is not whole.
        """
        start, end = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        if start >= end:
            return
        if sys.platform == "win32":
            free_virtual(self.address + start, end - start, DECOMMIT)
            if self.is_whole:
                allocate_virtual(self.address + start, end - start, COMMIT)
        elif sys.platform == "linux":
            assert isinstance(self.buffer, mmap.mmap)
            self.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)
        else:
            replace_pages(self.address + start, end - start)


def replace_pages(address: int, size: int) -> None:
    """Replace pages by zero pages, since macOS' MADV_DONTNEED may keep their content. Raises OSError."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    system.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED | NO_RESERVE
    if system.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def allocate_virtual(address: int, size: int, kind: int) -> int:
    """Reserve or commit memory on Windows, readable and writable. Raises OSError."""
    allocate = load_kernel32().VirtualAlloc
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32]
    allocated = allocate(address or None, size, kind, READ_WRITE)
    if not allocated:
        raise ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined]
    return int(allocated)


def free_virtual(address: int, size: int, kind: int) -> None:
    """Decommit or release memory on Windows."""
    free = load_kernel32().VirtualFree
    free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32]
    free(address, size, kind)


def lower_mmap_threshold(size: int) -> None:
    """Make glibc return freed blocks of `size` bytes or more to the operating system at once.

    By default glibc keeps blocks of up to 32 MB for reuse. Other C libraries are not changed.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(MMAP_THRESHOLD, size)


def return_free_memory() -> None:
    """Return the free memory that glibc keeps to the operating system; do nothing with other C libraries."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


# ---- machine code


def allocate_code(size: int) -> mmap.mmap | ctypes.Array[ctypes.c_uint8]:
    """Allocate a writable buffer of zero bytes for machine code. Raises OSError."""
    if sys.platform == "win32":
        return MemoryRegion(size).buffer
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def make_executable(address: int, size: int) -> None:
    """Make memory executable and read-only. Raises OSError."""
    if sys.platform == "win32":
        change, old_protection = load_kernel32().VirtualProtect, ctypes.c_uint32()
        change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p]
        if not change(address, size, EXECUTE_READ, ctypes.byref(old_protection)):
            raise ctypes.WinError(ctypes.get_last_error())
        load_kernel32().FlushInstructionCache(ctypes.c_void_p(-1), ctypes.c_void_p(address), ctypes.c_size_t(size))
        return
    system = ctypes.CDLL(None, use_errno=True).mprotect
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if system(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- file mappings


def prefer_huge_pages(data: mmap.mmap) -> None:
    """Ask Linux to read the file in pages of 2 MB if its file system can.

    TLB misses with pages of 4 KB limit decode: one core then reads weights at 16.6 GB/s instead of 22.3. And 0.8 GB are
    read from the disk in 0.5 s instead of 1.3. Pages of 4 KB that another program has already read stay small.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            data.madvise(mmap.MADV_HUGEPAGE)


def request_pages(data: mmap.mmap, start: int, size: int) -> None:
    """Ask the system to read bytes of a mapped file, without waiting; start: a multiple of PAGE."""
    if hasattr(mmap, "MADV_WILLNEED"):
        with contextlib.suppress(OSError):  # only a request
            data.madvise(mmap.MADV_WILLNEED, start, size)


def release_pages(data: mmap.mmap, start: int, end: int) -> None:
    """Release a mapping's whole pages within bytes [start, end); the system may keep them cached."""
    start, end = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if start < end and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, start, end - start)


class AddressRange(ctypes.Structure):
    """Windows' WIN32_MEMORY_RANGE_ENTRY."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def can_prefault() -> bool:
    """Return whether `prefault` has an effect on this platform."""
    return sys.platform in ("linux", "win32")


def prefault(path: str, address: int, size: int, at_once: int) -> None:
    """Map the cached pages of a file; at_once: bytes per call, during which other threads get no memory.

    A file that is not completely cached is skipped: the system would read all of it from the disk, although some
    experts may never be needed. Windows does not report what is cached: there the whole file is requested, and read in
    the background.
    """
    if sys.platform == "win32":
        prefetch = getattr(load_kernel32(), "PrefetchVirtualMemory", None)  # since Windows 8
        span = AddressRange(address, size)
        if prefetch:
            prefetch(ctypes.c_void_p(-1), ctypes.c_size_t(1), ctypes.byref(span), 0)
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first in range(0, size if is_cached(path, size) else 0, at_once):
        if advise(address + first, min(at_once, size - first), POPULATE_READ):
            return  # an older Linux, or the file was truncated


def is_cached(path: str, size: int) -> bool:
    """Return whether Linux has cached the file, judged by SAMPLES of its bytes."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        for number in range(SAMPLES):
            os.preadv(file, [bytearray(1)], number * size // SAMPLES, os.RWF_NOWAIT)
        return True
    except OSError:  # reading would wait for the disk, or the state is unknown
        return False
    finally:
        os.close(file)


# ---- available memory


def get_available_memory(mapped: int = 0) -> int:
    """Return the bytes available to this process, within its limits; sys.maxsize if unknown.

    mapped: bytes of mapped files among them, which `ulimit -d` does not count.
    """
    system = get_system_memory()
    if sys.platform in ("darwin", "win32"):
        return system
    return max(0, min(system, read_memory_left(), get_address_room(), get_data_room() + mapped))


def get_private_memory() -> int | None:
    """Return the bytes of memory that this process alone uses, without files; None where the system does not tell."""
    return 1024 * size if (size := read_integer_after("RssAnon:\t", "/proc/self/status")) is not None else None


def get_system_memory() -> int:
    """Return the bytes available to all programs together; sys.maxsize if unknown."""
    if sys.platform == "darwin":  # the level is the percentage of free memory
        return read_sysctl("hw.memsize") * read_sysctl("kern.memorystatus_level") // 100 or sys.maxsize
    if sys.platform == "win32":
        status = get_windows_status()
        return min(status.available, status.available_commit)
    available = read_integer_after("MemAvailable:", "/proc/meminfo")
    return sys.maxsize if available is None else 1024 * available


class MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX; all fields but the first two are in bytes."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "commit", "available_commit")),
        *((name, ctypes.c_uint64) for name in ("addresses", "available_addresses", "extended")),
    )


def get_windows_status() -> MemoryStatus:
    """Return Windows' memory status."""
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    load_kernel32().GlobalMemoryStatusEx(ctypes.byref(status))
    return status


def read_integer_after(name: str, path: str) -> int | None:
    """Return the integer of the line that begins with `name` in a system file; None without such a line."""
    try:
        match = re.search(rf"^{name} *(\d+)", Path(path).read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def get_address_limit() -> int:
    """Return the address space limit of this process in bytes (`ulimit -v`); sys.maxsize without one."""
    return get_resource_limit("RLIMIT_AS")


def get_resource_limit(name: str) -> int:
    """Return a limit of this process; sys.maxsize without one."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    limit = resource.getrlimit(getattr(resource, name))[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def get_address_room() -> int:
    """Return the bytes left below the address space limit; sys.maxsize without one."""
    return get_room_below(get_address_limit(), "VmSize")


def get_data_room() -> int:
    """Return the bytes left below the data limit (`ulimit -d`); sys.maxsize without one.

    Mapped files do not count as data.
    """
    return get_room_below(get_resource_limit("RLIMIT_DATA"), "VmData")


def get_room_below(limit: int, used: str) -> int:
    """Return the bytes left below a limit on a field of /proc/self/status; sys.maxsize without a limit."""
    return (
        limit if limit == sys.maxsize else limit - 1024 * (read_integer_after(f"{used}:\t", "/proc/self/status") or 0)
    )


def describe_limit(size: int | None = None) -> str:
    """Describe the limit of this process that leaves less than `size` bytes, or return "".

    size: None means any limit.
    """
    for option, room in (("-v", get_address_room()), ("-d", get_data_room())):
        if room < (sys.maxsize if size is None else size):
            return f"`ulimit {option}` leaves only {max(room, 0) / 1e9:.2f} GB"
    return ""


def is_out_of_memory(error: OSError) -> bool:
    """Return whether an error means that memory or addresses are exhausted."""
    import errno

    # Windows: ERROR_NOT_ENOUGH_MEMORY, ERROR_OUTOFMEMORY, ERROR_COMMITMENT_LIMIT (the page file is too small)
    return error.errno == errno.ENOMEM or getattr(error, "winerror", 0) in (8, 14, 1455)
