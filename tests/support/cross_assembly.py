"""Kernels as assembly for a 64-bit ARM, on any computer: python cross_assembly.py TRIPLE kernel...

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say for which one. Numba believes that it runs there, on Linux, and loads what it
compiles, but nothing calls it.
"""

import sys

import llvmlite.binding as llvm

LINUX = "aarch64-unknown-linux-gnu"


def pretend() -> None:
    """From now on, LLVM's default is that machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(LINUX)
    llvm.get_process_triple = llvm.get_default_triple = lambda: LINUX
    llvm.Target.from_default_triple = lambda: target


def assembly(name: str, triple: str) -> str:
    """Return the kernel for the system that the triple names."""
    from localllm.kernels.build.compile import linked
    from localllm.kernels.machine import this_lane

    module, _ = linked(name)
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=this_lane().cpu, features=this_lane().feature_string, opt=3, reloc="pic", codemodel="small"
    )
    module.triple, module.data_layout = triple, str(machine.target_data)
    assert machine.emit_object(module)
    return machine.emit_assembly(module)


if __name__ == "__main__":
    pretend()
    for kernel in sys.argv[2:]:
        print(assembly(kernel, sys.argv[1]))
