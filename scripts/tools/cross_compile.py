"""Compile kernels for another system or CPU on this computer.

    python -m scripts.tools.cross_compile SYSTEM                      object files of the kernels that stdin names
    python -m scripts.tools.cross_compile SYSTEM --assembly KERNEL... assembly, to read

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name the CPU. For ARM, Numba is made to believe that it runs on ARM Linux; it
loads the code that it compiles, but nothing calls it.
"""

import gc
import sys

import llvmlite.binding as llvm

from localllm.system import cpu

ARM = "aarch64-unknown-linux-gnu"
# LLVM's triples, the lowest version of macOS that Python's own packages run on among them.
TRIPLES = {
    "linux-x86_64": "x86_64-unknown-linux-gnu",
    "linux-aarch64": ARM,
    "windows-amd64": "x86_64-pc-windows-msvc-elf",
    "macos-arm64": "arm64-apple-macosx11.0.0",
    "macos-x86_64": "x86_64-apple-macosx10.13.0",
}
HANDLER = "handle_bus_error"  # see localllm.kernels.build.faults


def initialize() -> None:
    """Initialize all targets of LLVM."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def pretend(system: str) -> None:
    """Make the system LLVM's default, as far as kernels depend on it. Call it before kernels are imported."""
    triple = TRIPLES[system]
    initialize()
    if triple.startswith(("aarch64", "arm64")):
        target = llvm.Target.from_triple(ARM)
        llvm.get_process_triple = llvm.get_default_triple = lambda: ARM
        llvm.Target.from_default_triple = lambda: target
    cpu.CACHE_LINE = 128 if system == "macos-arm64" else 64


def handler(system: str) -> tuple[str, bytes]:
    """Return the name and the object file of the handler of bus errors."""
    from localllm.kernels.build import faults
    from localllm.system.processes import POSIX_HANDLER, WINDOWS_HANDLER

    source = faults.build_handler_source(WINDOWS_HANDLER if system.startswith("windows") else POSIX_HANDLER)
    return faults.compute_handler_name(source), faults.compile_handler(source, TRIPLES[system])


def assembly(name: str, system: str) -> str:
    """Return a kernel as assembly."""
    from localllm.kernels.build.compile import compile_module

    module, machine = compile_module(name, TRIPLES[system])
    assert machine.emit_object(module)
    return machine.emit_assembly(module)


def main() -> None:
    system, *words = sys.argv[1:]
    pretend(system)
    if words:
        for kernel in words[1:]:
            print(assembly(kernel, system))
        return
    from localllm.kernels.build.compile import compile_object
    from localllm.kernels.build.compilers import serve

    gc.disable()  # as kernels/build/compile.py
    serve(lambda name: handler(system)[1] if name == HANDLER else compile_object(name, TRIPLES[system]))


if __name__ == "__main__":
    main()
