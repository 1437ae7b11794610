"""Which CPU the kernels are compiled for: this one, or the one named in NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

import os
from functools import cache

import llvmlite.binding as llvm

from localllm.kernels.system import arm_features, is_arm


@cache
def cpu_name() -> str:
    """LLVM's name of the CPU, such as znver4."""
    return os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()


@cache
def cpu_feature_string() -> str:
    """LLVM's feature list, such as +avx2,-avx512f. Every 64-bit ARM has +neon."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        return given
    known = llvm.get_host_cpu_features().flatten()
    return ",".join([*filter(None, [known]), *(f"+{name}" for name in arm_features())]) if is_arm() else known


@cache
def cpu_features() -> frozenset[str]:
    """The names of the features that the CPU has."""
    return frozenset(item[1:] for item in cpu_feature_string().split(",") if item.startswith("+"))


def has_instructions(x86_feature: str) -> bool:
    """Whether the CPU has instructions for f16c (half floats), fma (multiply and add) or sse4.1 (rounding).

    Every 64-bit ARM has them. Where there are none, LLVM calls a function, which is slow and may not be there.
    """
    return not cpu_features().isdisjoint((x86_feature, "neon"))
