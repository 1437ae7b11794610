"""The CPU that kernels are compiled for: a `Lane`, its name and features.

LLVM detects both. Importing llvmlite for that takes 50 ms, so the result is cached on disk under a key that identifies
the CPU (localllm.system.cpu). The environment variables NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override it;
build/compilers.py sets them in processes that compile for another CPU.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.system import cpu
from localllm.system.files import get_cache_folder

# The features that select instructions in these sources; the others matter to LLVM only.
SELECTING_FEATURES = frozenset(("neon", "dotprod", "i8mm", "sse2", "ssse3", "sse4.1", "avx2", "f16c", "fma", "avxvnni"))
SELECTING_FEATURES |= {"avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16"}


@dataclass(frozen=True)
class Lane:
    """A CPU that kernels are compiled for, with LLVM's name and features for it."""

    cpu: str
    feature_string: str

    @cached_property
    def features(self) -> frozenset[str]:
        """The names of the CPU's features."""
        return frozenset(item[1:] for item in self.feature_string.split(",") if item.startswith("+"))

    @property
    def choices(self) -> frozenset[str]:
        """The features that select instructions in these sources.

        Lanes with equal choices get the same kernels. AVX-VNNI does not count on a CPU with AVX512-VNNI, which is
        preferred.
        """
        superseded = {"avxvnni"} if {"avx512vnni", "avx512bw"} <= self.features else set[str]()
        return (self.features & SELECTING_FEATURES) - superseded

    @property
    def has_512_bits(self) -> bool:
        return "avx512f" in self.features

    @property
    def has_avx2_only(self) -> bool:
        """Return whether kernels use AVX2, but neither AVX-512 nor AVX-VNNI's dot product of bytes."""
        return {"avx2", "f16c", "fma"} <= self.features and self.features.isdisjoint(("avx512f", "avxvnni"))

    @property
    def has_vnni(self) -> bool:
        """Return whether the CPU has AVX512-VNNI.

        It has dot products of 512-bit vectors of bytes and of 16-bit words.
        """
        return {"avx512vnni", "avx512bw"} <= self.features

    @property
    def has_tiles(self) -> bool:
        """Return whether the CPU has AMX tiles in BF16.

        The operating system may still refuse them to this process: see the function `has_tiles` of this module.
        """
        return {"amx-tile", "amx-bf16"} <= self.features

    def has_instructions(self, x86_feature: str) -> bool:
        """Return whether the CPU has the instructions of f16c, fma (multiply-add) or sse4.1 (rounding).

        Every ARM has them. Where they are missing, LLVM would call a library function, which is slow and may not exist.
        """
        return not self.features.isdisjoint((x86_feature, "neon"))


@cache
def get_lane() -> Lane:
    """Return the lane that this process compiles for: this computer's, unless the environment sets one."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    features = disable_slow_512_bits(detect_processor()[1] if features is None else features)
    return Lane(os.environ.get("NUMBA_CPU_NAME") or detect_processor()[0], features)


def disable_slow_512_bits(features: str) -> str:
    """Turn AVX-512 off in a list of features without VNNI (Skylake), so that the CPU counts as AVX2.

    On such a CPU 512 bits multiply bytes no faster than AVX2 kernels do, and lower the clock.
    """
    names = features.split(",")
    if {"+avx512vnni", "+avx512bw"} <= {*names}:
        return features
    return ",".join(f"-{name[1:]}" if name.startswith("+avx512") else name for name in names)


def get_lane_name() -> str:
    """Return the instruction set of prefill: amx-bf16, avx512-vnni, avx-vnni, avx2, ssse3 or portable."""
    if has_tiles():
        return "amx-bf16"
    if get_lane().has_vnni:
        return "avx512-vnni"
    names = {"avxvnni": "avx-vnni", "avx2": "avx2", "ssse3": "ssse3"}
    return next((name for feature, name in names.items() if feature in get_lane().features), "portable")


def has_tiles() -> bool:
    """Return whether the CPU has AMX tiles in BF16 and the operating system lets this process use them."""
    return get_lane().has_tiles and request_tiles()


@cache
def request_tiles() -> bool:
    """Ask the operating system for permission to use AMX tiles, once per process; return its answer."""
    return cpu.request_amx()


@cache
def detect_processor() -> tuple[str, str]:
    """Return the name and features that LLVM detects for this CPU, from the cache if it has them."""
    identity = cpu.get_processor_key()
    if identity is None:
        return detect_by_llvm()
    key = sha256(read_version_file("llvmlite") + b"\0" + identity).hexdigest()[:20]
    path = get_cache_folder() / "kernels" / "processors" / key
    if cached := read_checksummed(path):
        name, _, features = cached.decode().partition("\n")
        return name, features
    detected = detect_by_llvm()
    with suppress(OSError):  # compiling kernels warns about an unwritable cache
        write_checksummed(path, "\n".join(detected).encode())
    return detected


def detect_by_llvm() -> tuple[str, str]:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    of_arm = [f"+{name}" for name in cpu.read_arm_features()] if cpu.is_arm() else []
    return llvm.get_host_cpu_name(), ",".join([*filter(None, [features]), *of_arm])


def read_version_file(package: str) -> bytes:
    """Read the source file that states the version of Numba or llvmlite.

    Importing Numba takes 300 ms, importlib.metadata 12.
    """
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, "Numba and llvmlite are dependencies"
    return Path(spec.origin).with_name("_version.py").read_bytes()


def describe_processor() -> str:
    """Return the processor's brand string and the name that compilers know it by."""
    return f"{cpu.get_processor_name()} ({get_lane().cpu})"
