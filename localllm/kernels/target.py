"""Which CPU the kernels are compiled for: this one, or the one named in NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.

LLVM knows what this one is called and has. To ask it, llvmlite has to be imported, for which a start takes 50 ms: the
answer is kept for a computer of which Linux says the same.
"""

import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from localllm.files.kept import read_kept, write_kept
from localllm.kernels.system import arm_features, is_arm
from localllm.quant.cache import cache_folder

# What /proc/cpuinfo says of a CPU by which LLVM could tell it from others.
IDENTITY = (b"vendor_id", b"cpu family", b"model", b"model name", b"stepping", b"flags")


@cache
def cpu_name() -> str:
    """LLVM's name of the CPU, such as znver4."""
    return os.environ.get("NUMBA_CPU_NAME") or processor()[0]


@cache
def cpu_feature_string() -> str:
    """LLVM's feature list, such as +avx2,-avx512f. Every 64-bit ARM has +neon."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    return processor()[1] if given is None else given


@cache
def cpu_features() -> frozenset[str]:
    """The names of the features that the CPU has."""
    return frozenset(item[1:] for item in cpu_feature_string().split(",") if item.startswith("+"))


def has_instructions(x86_feature: str) -> bool:
    """Whether the CPU has instructions for f16c (half floats), fma (multiply and add) or sse4.1 (rounding).

    Every 64-bit ARM has them. Where there are none, LLVM calls a function, which is slow and may not be there.
    """
    return not cpu_features().isdisjoint((x86_feature, "neon"))


@cache
def processor() -> tuple[str, str]:
    """LLVM's name and feature list of this computer's CPU."""
    said = processor_information()
    if said is None:
        return processor_by_llvm()
    key = sha256(version_file("llvmlite") + b"\0" + said).hexdigest()[:20]
    path = cache_folder() / "kernels" / "processors" / key
    if kept := read_kept(path):
        name, _, features = kept.decode().partition("\n")
        return name, features
    found = processor_by_llvm()
    with suppress(OSError):  # of which the kernels warn
        write_kept(path, "\n".join(found).encode())
    return found


def processor_by_llvm() -> tuple[str, str]:
    import llvmlite.binding as llvm

    known = llvm.get_host_cpu_features().flatten()
    of_arm = [f"+{name}" for name in arm_features()] if is_arm() else []
    return llvm.get_host_cpu_name(), ",".join([*filter(None, [known]), *of_arm])


def processor_information(path: str = "/proc/cpuinfo") -> bytes | None:
    """What Linux says of an x86-64; None elsewhere."""
    try:
        with open(path, "rb", buffering=0) as file:
            first, end, _ = file.read(1 << 14).partition(b"\n\n")
    except OSError:
        return None
    lines = [line for line in first.split(b"\n") if line.partition(b"\t")[0].rstrip() in IDENTITY]
    return b"\n".join(lines) if end and len(lines) == len(IDENTITY) else None


def version_file(package: str) -> bytes:
    """The file in which Numba or llvmlite says its version: importing Numba takes 300 ms, importlib.metadata 12."""
    found = find_spec(package)
    assert found is not None and found.origin is not None, "it is a dependency"
    return Path(found.origin).with_name("_version.py").read_bytes()
