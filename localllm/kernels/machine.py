"""The CPU that kernels are compiled for, as a frozen `Lane`.

LLVM reports the CPU's name and features. Importing llvmlite for that takes 50 ms, so the answer is cached, by a key
that identifies the CPU (localllm.system.cpu). NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override it; build/compilers.py
sets them in processes that compile for another lane.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.quant.cache import cache_folder
from localllm.system import cpu

# The features by which our sources select kernels; only LLVM uses the others. On CPUs with AVX-512, AVX-VNNI does not
# matter.
CHOSEN_BY = frozenset(("neon", "dotprod", "i8mm", "sse2", "ssse3", "sse4.1", "avx2", "f16c", "fma", "avxvnni"))
CHOSEN_BY |= {"avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16"}


@dataclass(frozen=True)
class Lane:
    """A CPU's name and features, as LLVM names them."""

    cpu: str
    feature_string: str

    @cached_property
    def features(self) -> frozenset[str]:
        """The names of the features that the CPU has."""
        return frozenset(item[1:] for item in self.feature_string.split(",") if item.startswith("+"))

    @property
    def choices(self) -> frozenset[str]:
        """The features that select kernels: lanes with equal choices get the same kernels."""
        superseded = {"avxvnni"} if {"avx512vnni", "avx512bw"} <= self.features else set[str]()
        return (self.features & CHOSEN_BY) - superseded

    @property
    def has_512_bits(self) -> bool:
        """Return whether vectors have 512 bits, and there are 32 of them: AVX-512."""
        return "avx512f" in self.features

    @property
    def has_avx2_only(self) -> bool:
        """Return whether it has AVX2, but neither AVX-512 nor a dot product of bytes (AVX-VNNI)."""
        return {"avx2", "f16c", "fma"} <= self.features and self.features.isdisjoint(("avx512f", "avxvnni"))

    @property
    def has_vnni(self) -> bool:
        """Return whether it has dot products of 512-bit vectors of bytes and 16-bit words (AVX512-VNNI)."""
        return {"avx512vnni", "avx512bw"} <= self.features

    @property
    def has_tiles(self) -> bool:
        """Return whether it has AMX tiles in BF16; the system may still refuse them (see the module's has_tiles)."""
        return {"amx-tile", "amx-bf16"} <= self.features

    def has_instructions(self, x86_feature: str) -> bool:
        """Return whether it has instructions for f16c, fma (multiply and add) or sse4.1 (rounding).

        Every 64-bit ARM has them. Where they are missing, LLVM calls a library function, which is slow and may be
        missing, too.
        """
        return not self.features.isdisjoint((x86_feature, "neon"))


@cache
def this_lane() -> Lane:
    """Return the lane that this process compiles for: this computer's unless the environment sets another one."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    return Lane(os.environ.get("NUMBA_CPU_NAME") or processor()[0], processor()[1] if given is None else given)


def lane_name() -> str:
    """Return the name of the instructions that multiply matrices in prefill on this lane.

    It is amx-bf16, avx512-vnni, avx-vnni, avx2, ssse3, or portable.
    """
    if has_tiles():
        return "amx-bf16"
    if this_lane().has_vnni:
        return "avx512-vnni"
    names = {"avxvnni": "avx-vnni", "avx2": "avx2", "ssse3": "ssse3"}
    return next((name for feature, name in names.items() if feature in this_lane().features), "portable")


def has_tiles() -> bool:
    """Return whether the CPU has AMX tiles in BF16 and the system lets this process use them."""
    return this_lane().has_tiles and allow_tiles()


@cache
def allow_tiles() -> bool:
    """Ask the system for permission to use tiles, once."""
    return cpu.allow_tiles()


@cache
def processor() -> tuple[str, str]:
    """Return LLVM's name and feature list of this computer's CPU."""
    said = cpu.processor_information()
    if said is None:
        return processor_by_llvm()
    key = sha256(version_file("llvmlite") + b"\0" + said).hexdigest()[:20]
    path = cache_folder() / "kernels" / "processors" / key
    if kept := read_checksummed(path):
        name, _, features = kept.decode().partition("\n")
        return name, features
    found = processor_by_llvm()
    with suppress(OSError):  # of which the kernels warn
        write_checksummed(path, "\n".join(found).encode())
    return found


def processor_by_llvm() -> tuple[str, str]:
    import llvmlite.binding as llvm

    known = llvm.get_host_cpu_features().flatten()
    of_arm = [f"+{name}" for name in cpu.arm_features()] if cpu.is_arm() else []
    return llvm.get_host_cpu_name(), ",".join([*filter(None, [known]), *of_arm])


def version_file(package: str) -> bytes:
    """Return the content of the file in which Numba or llvmlite states its version.

    Importing Numba takes 300 ms, importlib.metadata 12.
    """
    found = find_spec(package)
    assert found is not None and found.origin is not None, "it is a dependency"
    return Path(found.origin).with_name("_version.py").read_bytes()
