"""A process that compiles kernels: it reads kernel names and writes object files.

compilers.py starts it as python -m localllm.kernels.build.compile.
"""

import gc

import llvmlite.binding as llvm

from localllm.kernels.build.compilers import serve
from localllm.kernels.build.objects import get_symbol
from localllm.kernels.cpu import find_kernel
from localllm.kernels.cpu.signature import SIGNATURE
from localllm.kernels.machine import get_lane
from localllm.system.cpu import get_object_triple

ENTRY = """
declare i32 @"{function}"(ptr, ptr, i64, i64, i64, i64)

define void @{entry}(i64 %a, i64 %b, i64 %c, i64 %d) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @"{function}"(ptr %result, ptr %exception, i64 %a, i64 %b, i64 %c, i64 %d)
  ret void
}}
"""


def compile_object(name: str, triple: str | None = None) -> bytes:
    module, machine = compile_module(name, triple)
    return machine.emit_object(module)


def compile_module(name: str, triple: str | None = None) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Compile a kernel and its entry to LLVM IR; return the module and LLVM's target machine.

    Numba's functions have two hidden parameters (result and exception, unused) and return a status. `ENTRY` calls them
    with the C signature that the tape uses. triple: LLVM's name of the operating system to compile for, by default this
    one, with the same CPU architecture.
    """
    function = find_kernel(name)
    function.compile(SIGNATURE)
    (compiled,) = function.overloads.values()
    numba_name = compiled.fndesc.llvm_func_name
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    module.link_in(llvm.parse_assembly(ENTRY.format(entry=get_symbol(name), function=numba_name)))
    module.triple = triple or get_object_triple(module.triple)
    target = llvm.Target.from_triple(module.triple)
    machine = target.create_target_machine(
        cpu=get_lane().cpu, features=get_lane().feature_string, opt=3, reloc="pic", codemodel="small"
    )
    module.data_layout = str(machine.target_data)
    optimize_module(module, machine)
    for function in module.functions:
        if function.name != get_symbol(name) and not function.is_declaration:
            function.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    remove_unused_functions(module, machine)
    refuse_numba_runtime(name, module)
    return module, machine


def optimize_module(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Optimize a kernel's whole module.

    At this point its functions still have external linkage: with internal linkage LLVM would inline more, for twice the
    code.
    """
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization, tuning.slp_vectorization = True, False  # as in Numba
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)


def remove_unused_functions(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))


def refuse_numba_runtime(name: str, module: llvm.ModuleRef) -> None:
    """Exit with an error if a kernel needs Python or Numba, because its source has an exception or array."""
    needed = [f.name for f in module.functions if f.is_declaration and f.name.startswith(("Py", "NRT", "numba"))]
    if needed:
        raise SystemExit(f"kernel {name} needs {', '.join(needed)}")


def main() -> None:
    gc.disable()  # Numba's objects live until the end, and searching them for garbage would take 0.15 of the time
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    serve(compile_object)


if __name__ == "__main__":
    main()
