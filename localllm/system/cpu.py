"""The processor: cores available to this process, names, and features.

LLVM reports processor names and most features. On ARM it misses two, which are read from the operating system: dot
products of bytes (dotprod) and products of small byte matrices (i8mm).
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from localllm.system.control_groups import read_cpu_quota

# Linux: entry of the auxiliary vector (AT_HWCAP, AT_HWCAP2) and bit in it (HWCAP_ASIMDDP, HWCAP2_I8MM).
LINUX = {"dotprod": (16, 20), "i8mm": (26, 13)}
MACOS = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}
WINDOWS = {"dotprod": 43, "i8mm": 66}  # PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
# Fields of /proc/cpuinfo, and values in Windows' registry, that identify the CPU that LLVM compiles for.
IDENTITY = (b"vendor_id", b"cpu family", b"model", b"model name", b"stepping", b"flags")
REGISTRY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
VALUES = "VendorIdentifier", "Identifier", "ProcessorNameString"
FEATURES = 96  # upper bound of the features of Windows' IsProcessorFeaturePresent
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # Linux: asm/unistd_64.h, asm/prctl.h, bit of XCR0
CORES = 0  # Windows: RelationProcessorCore


def is_arm() -> bool:
    """Return whether this is a 64-bit ARM processor; all of them have NEON, with vectors of 128 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


# Bytes of a cache line: threads that write to the same line slow each other down. Apple's have 128.
CACHE_LINE = 128 if sys.platform == "darwin" and is_arm() else 64


def read_arm_features() -> list[str]:
    """Return LLVM's names of this ARM processor's features."""
    if sys.platform == "darwin":
        return ["neon", *(feature for feature, name in MACOS.items() if read_sysctl(name))]
    if sys.platform == "win32":
        return ["neon", *(feature for feature, number in WINDOWS.items() if has_feature(number))]
    return ["neon", *(feature for feature, (word, bit) in LINUX.items() if read_auxiliary_value(word) >> bit & 1)]


def read_auxiliary_value(word: int) -> int:
    """Read an entry of Linux's auxiliary vector; 0 without it."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except AttributeError:  # another system
        return 0
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(word))


def read_sysctl(name: str) -> int:
    """Read an integer from macOS's sysctl; 0 if it is unknown."""
    value = ctypes.c_int64()  # sysctl writes 4 or 8 bytes
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, None)
    return 0 if failed else value.value


def has_feature(number: int) -> bool:
    """Return whether Windows reports a processor feature."""
    return bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(number))  # type: ignore[attr-defined]


def request_amx() -> bool:
    """Request AMX tiles for all threads from Linux; return False elsewhere.

    They add 8 KB of registers to each context switch.
    """
    if sys.platform != "linux":
        return False
    result: bool = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
    return result


def get_processor_key(path: str = "/proc/cpuinfo") -> bytes | None:
    """Return a key that identifies the x86-64 processor, or None.

    It is read from /proc/cpuinfo, or from Windows' registry.
    """
    if sys.platform == "win32":
        features = "".join(str(int(has_feature(number))) for number in range(FEATURES))
        return None if is_arm() else "\n".join([*map(read_registry, VALUES), features]).encode()
    try:
        with open(path, "rb", buffering=0) as file:
            first, end, _ = file.read(1 << 14).partition(b"\n\n")
    except OSError:
        return None
    lines = [line for line in first.split(b"\n") if line.partition(b"\t")[0].rstrip() in IDENTITY]
    return b"\n".join(lines) if end and len(lines) == len(IDENTITY) else None


def get_system_name() -> str:
    """Return the operating system and processor type, such as "Linux x86_64"."""
    return f"{platform.system()} {platform.machine()}"


def get_processor_name() -> str:
    """Return the processor's brand string."""
    if sys.platform == "win32":
        return read_registry("ProcessorNameString").strip() or platform.machine()
    lines = (line.partition(":") for line in read_text("/proc/cpuinfo").splitlines())
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


def read_registry(name: str) -> str:
    """Read a value of the first processor from Windows' registry, or ""."""
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY) as key:  # type: ignore[attr-defined]
            return str(winreg.QueryValueEx(key, name)[0])  # type: ignore[attr-defined]
    except OSError:
        return ""


def get_object_triple(triple: str) -> str:
    """Return LLVM's target triple for object files: ELF also on Windows, with Windows' calling convention."""
    return f"{triple}-elf" if sys.platform == "win32" and not triple.endswith("elf") else triple


# ---- cores


def count_usable_cores() -> int:
    """Return how many physical cores this process may use, by affinity and CPU quota; at least 1."""
    return max(1, min(count_physical_cores(), int(read_cpu_quota())))


def count_logical_cores() -> int:
    """Return how many logical processors this process may use, for sizing process pools; at least 1."""
    return max(1, min(count_affinity_processors(), int(read_cpu_quota())))


def count_affinity_processors() -> int:
    """Return how many logical processors are in this process's affinity mask."""
    if sys.platform == "win32":
        return read_windows_affinity().bit_count() or os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_physical_cores() -> int:
    """Return how many cores are in this process's affinity mask, fast and slow; on macOS only the fast ones.

    Slow cores help because threads claim shares of the work dynamically (docs/decisions/unequal-cores.md). A Mac's slow
    cores are left to other programs.
    """
    if sys.platform == "darwin":
        return read_sysctl("hw.perflevel0.physicalcpu") or read_sysctl("hw.physicalcpu")
    if sys.platform == "win32":
        return count_cores(read_windows_cores(), read_windows_affinity()) or os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = (f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list" for i in os.sched_getaffinity(0))
    return len({read_text(path) or path for path in siblings})


def read_text(path: str) -> str:
    """Read a small system file; "" if it does not exist."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def count_cores(content: bytes, affinity: int) -> int:
    """Count Windows' cores in the affinity mask.

    content: from `read_windows_cores`.  affinity: one bit per processor of the first group.
    """
    return sum(not affinity or any(mask & affinity for mask in masks) for _, masks in iter_core_records(content))


def iter_core_records(content: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield each core's EfficiencyClass (higher is faster) and its processors in the first group, as bits.

    Source: SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX, PROCESSOR_RELATIONSHIP, GROUP_AFFINITY in winnt.h.
    """
    start = 0
    while start < len(content):
        relation, size, _, kind, groups = struct.unpack_from("<IIBB20xH", content, start)
        affinities = [struct.unpack_from("<QH", content, start + 32 + 16 * number) for number in range(groups)]
        if relation == CORES:
            yield kind, [mask for mask, group in affinities if group == 0]
        start += size


def read_windows_cores() -> bytes:
    """Return GetLogicalProcessorInformationEx's core records; b"" if the call fails."""
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx  # type: ignore[attr-defined]
    size = ctypes.c_uint32(0)
    ask(CORES, None, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    return content.raw[: size.value] if size.value and ask(CORES, content, ctypes.byref(size)) else b""


def read_windows_affinity() -> int:
    """Return Windows' affinity mask; 0 if it spans several groups of 64 processors."""
    kernel32 = ctypes.windll.kernel32  # type: ignore[attr-defined]
    process, system = ctypes.c_size_t(), ctypes.c_size_t()
    process_handle = ctypes.c_void_p(-1)
    mask = kernel32.GetProcessAffinityMask(process_handle, ctypes.byref(process), ctypes.byref(system))
    return process.value if mask else 0
