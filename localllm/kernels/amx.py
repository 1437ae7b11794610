"""AMX: whether this process may use a CPU's tiles (what they compute is in localllm.kernels.cpu.amx_tiles)."""

import ctypes
import sys
from functools import cache

from localllm.kernels.target import cpu_features

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # Linux: asm/unistd_64.h, asm/prctl.h, bit of XCR0


@cache
def has_tiles() -> bool:
    """Whether the CPU multiplies tiles in BF16 and the system lets this process do it: asked once, for all threads."""
    return {"amx-tile", "amx-bf16"} <= cpu_features() and allow_tiles()


def allow_tiles() -> bool:
    """Ask Linux for room for the tiles' 8 KB wherever it saves registers; no other system is asked."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
