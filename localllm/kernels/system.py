"""What the operating system says about a computer with an ARM: LLVM knows the names of processors, not all features.

There are features by which kernels differ: products of bytes in fours (dotprod), and of small matrices (i8mm).
"""

import ctypes
import platform
import sys

# Linux: which word of the auxiliary vector tells (AT_HWCAP, AT_HWCAP2), and which bit (HWCAP_ASIMDDP, HWCAP2_I8MM).
LINUX = {"dotprod": (16, 20), "i8mm": (26, 13)}
MACOS = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}


def is_arm() -> bool:
    """Whether this is a 64-bit ARM, of which all have NEON: arithmetic on vectors of 128 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


def arm_features() -> list[str]:
    """LLVM's names of what this ARM can do."""
    if sys.platform == "darwin":
        return ["neon", *(feature for feature, name in MACOS.items() if system_number(name))]
    return ["neon", *(feature for feature, (word, bit) in LINUX.items() if auxiliary_value(word) >> bit & 1)]


def auxiliary_value(word: int) -> int:
    """What Linux has told this process about the computer; 0 if it told nothing."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except AttributeError:  # another system
        return 0
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(word))


def system_number(name: str) -> int:
    """An integer that macOS knows about the computer; 0 if it does not know it."""
    value = ctypes.c_int64()  # of which it fills 4 bytes or 8
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, None)
    return 0 if failed else value.value
