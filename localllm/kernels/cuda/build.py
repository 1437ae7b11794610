"""Compilation of the CUDA kernels; it does not need a GPU.

Numba compiles to PTX, and NVIDIA's linker compiles PTX to machine code. Machine code is cached like that of the CPU
kernels (localllm.kernels.build.objects), in a folder named by a hash of the sources, the compilers' versions and the
compute capability. Run as a module, with a compute capability such as 8.0, this is a compiling process
(localllm.kernels.build.compilers).
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.kernels.build.objects import add_sources, get_symbol, mark_used, prune
from localllm.kernels.machine import read_version_file
from localllm.system.files import get_cache_folder

Progress = Callable[[int, int], None]  # (kernels compiled, kernels to compile)
Capability = tuple[int, int]  # a GPU's compute capability, major and minor number
SOURCES = (
    "cuda/**/*.py", "build/objects.py", "declaration.py", "formats/__init__.py", "formulas.py", "table.py",
)  # in localllm.kernels  # fmt: skip
COMPILERS = ("numba-cuda", "llvmlite", "cuda-core", "nvidia-nvjitlink-cu12", "nvidia-nvjitlink")
ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(")


def build_machine_code(
    names: Iterable[str], capability: Capability, progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, tuple[bytes, str]]:  # fmt: skip
    """Return each kernel's machine code (a cubin) and the name of its entry, by the kernel's name.

    Kernels that are not cached are compiled, on all cores, and cached. warn: called with one line if machine code
    cannot be cached. Raises LocalllmError if a kernel cannot be compiled.
    """
    names, folder = sorted(set(names)), get_code_folder(capability)
    codes = {name: code for name in names if (code := read_checksummed(folder / f"{name}.cubin"))}
    mark_used(folder)
    if missing := [name for name in names if name not in codes]:
        codes |= compile_missing(
            missing, capability, progress or (lambda done, total: None), warn or (lambda line: None)
        )
    return {name: (codes[name], find_entry(name)) for name in names}


def compile_missing(
    names: list[str], capability: Capability, progress: Progress, warn: Callable[[str], None]
) -> dict[str, bytes]:
    from localllm.kernels.build.compilers import compile_kernels  # seldom needed, and slow to import

    problems: dict[str, None] = {}

    def finished(name: str, code: bytes) -> None:
        path = get_code_folder(capability) / f"{name}.cubin"
        try:
            write_checksummed(path, code)
        except OSError as error:
            problems[f"compiled kernels cannot be kept in {path.parent}: {error.strerror}"] = None

    codes = compile_kernels(names, finished, progress, __name__, f"{capability[0]}.{capability[1]}")
    prune()
    for problem in problems:
        warn(problem)
    return codes


@cache
def get_code_folder(capability: Capability) -> Path:
    key = hashlib.sha256()
    add_sources(key, SOURCES)
    versions = [f"{package} {get_version(package)}" for package in COMPILERS]
    for part in (read_version_file("numba"), *(text.encode() for text in (*versions, f"{capability}"))):
        key.update(part + b"\0")
    return get_cache_folder() / "kernels" / key.hexdigest()[:20]


def get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # only the packages of CUDA 12 or those of CUDA 13 are installed
        return ""


def find_entry(name: str) -> str:
    """Return the name of a kernel's entry point in its machine code."""
    return get_symbol(name).replace("-", "_")


def compile_ptx(name: str, capability: Capability) -> str:
    from numba import cuda, int64, void

    from localllm.kernels.cuda import find_kernel, list_parameters

    signature = void(*[int64] * len(list_parameters(name)))
    code, _ = cuda.compile(  # type: ignore[attr-defined]
        find_kernel(name), signature, device=False, abi="numba", output="ptx", cc=capability
    )
    (mangled,) = ENTRY.findall(code)
    return code.replace(mangled, find_entry(name))


def compile_cubin(name: str, capability: Capability) -> bytes:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}")
    return bytes(
        Linker(ObjectCode.from_ptx(compile_ptx(name, capability).encode()), options=options).link("cubin").code
    )


def find_assembler() -> Path:
    """Return the path of NVIDIA's ptxas, which reports the registers of kernels to measurements.

    Raises FileNotFoundError.
    """
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas*")):  # in the wheels for CUDA 12 or for CUDA 13
            return path
    raise FileNotFoundError("ptxas not found: install nvidia-cuda-nvcc")


def main() -> None:
    from localllm.kernels.build.compilers import serve

    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # the simulator compiles no machine code
    major, minor = map(int, sys.argv[1].split("."))
    serve(lambda name: compile_cubin(name, (major, minor)))


if __name__ == "__main__":
    main()
