"""Numba's compiler pipeline for functions that only kernels call, without Python wrappers.

For each of a kernel's hundred functions Numba's own pipeline would build a Python wrapper, a C wrapper and machine
code, which are never used, and run passes for features that kernels do not use, such as arrays and closures. Without
these a kernel compiles in 0.55 of the time and is a tenth smaller, because generating a function's machine code changes
its IR.
"""

from typing import Any

from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.funcdesc import PythonFunctionDescriptor
from numba.core.lowering import Lower
from numba.core.typed_passes import (
    BaseNativeLowering,
    IRLegalization,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import DeadBranchPrune, FixupArgs, IRProcessing, ReconstructSSA, TranslateByteCode

from localllm.kernels.machine import get_lane


class UnoptimizedLibrary(CPUCodeLibrary):
    """LLVM IR of a function and its callees; a kernel is optimized once, as a whole (compile.py).

    Numba would optimize every function together with its callees, so inner functions would be optimized again for each
    caller: a third of the compile time of a large kernel.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class AlignedLower(Lower):
    """Lowering of functions whose stack frame begins at a cache line.

    LLVM itself decides too late that it has to spill vectors, which then cross cache lines: 12 stores of 64 bytes
    beside 192 dot products took 8 % of the time. On ARM this does not matter, because vectors have 16 bytes.
    """

    def setup_function(self, fndesc: Any) -> None:
        super().setup_function(fndesc)
        if "neon" not in get_lane().features:
            self.function.attributes.add("nounwind")  # llvmlite writes alignstack only beside another attribute
            self.function.attributes.alignstack = 64


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(BaseNativeLowering):
    _name = "localllm_lowering"  # type: ignore[assignment]
    lowering_class = AlignedLower

    def run_pass(self, state: Any) -> bool:
        context, function = state.targetctx, state.func_ir
        state.library = library = UnoptimizedLibrary(context.codegen(), state.func_id.func_qualname)
        description = PythonFunctionDescriptor.from_specialized_function(
            function, state.typemap, state.return_type, state.calltypes, mangler=context.mangler,
            inline=state.flags.forceinline, noalias=state.flags.noalias, abi_tags=[state.flags.get_mangle_string()],
        )  # fmt: skip
        with context.push_code_library(library):
            lower = AlignedLower(context, library, description, function, metadata=state.metadata)
            lower.lower()
        library.finalize()
        name = object().__sizeof__  # Numba needs a unique builtin to identify the function
        context.insert_user_function(name, description, [library])
        state["cr"] = _LowerResult(description, lower.call_helper, cfunc=name, env=lower.env)
        return True


STAGES = (TranslateByteCode, FixupArgs, IRProcessing, DeadBranchPrune, ReconstructSSA, NopythonTypeInference,
          PreLowerStripPhis, IRLegalization, KernelLowering, NoPythonBackend)  # fmt: skip


class KernelCompiler(CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("kernel")
        for stage in STAGES:
            manager.add_pass(stage, stage.__name__)
        manager.finalize()
        return [manager]
