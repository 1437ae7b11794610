"""Products of the experts' matrices in AMX tiles. The panels of each expert's rows begin where amx/pack.py put them."""

from localllm.kernels.cpu import PANEL_BYTES, PANEL_TOKENS
from localllm.kernels.cpu.matmul.experts import ANY_NUMBER, make_experts, put
from localllm.kernels.cpu.matmul.routing import EXPERT_BYTES
from localllm.kernels.cpu.signature import argument, device
from localllm.kernels.simd import load_i64, store_i64
from localllm.kernels.table import (
    EXPERT,
    EXPERTS_TILES_FLOAT,
    EXPERTS_TILES_QUANTIZED,
    LINEAR_TILES_FLOAT,
    LINEAR_TILES_QUANTIZED,
)


def make_finish(product, own):
    """Make a function that sets the arguments of an expert's product that depend on the expert.

    Those are the address of its panels, and whether the run has few enough tokens for both planes. product, own: the
    declarations of the kernel for one matrix and of the kernel for all experts.
    """

    @device
    def finish(a, call, expert, memory):
        number = (expert - argument(a, own.active)) // EXPERT_BYTES
        panel = number + argument(expert, EXPERT.first) // PANEL_TOKENS
        put(call, product.panels, argument(a, own.panels) + panel * PANEL_BYTES)
        is_exact = load_i64(argument(a, own.kernel_tokens)) <= load_i64(argument(a, own.most_exact))
        store_i64(memory, ANY_NUMBER if is_exact else 0)
        put(call, product.most_exact, memory)

    return finish


def __getattr__(name):
    """Make one of the two kernels when it is first requested."""
    if name == "experts_tiles_quantized":
        finish = make_finish(LINEAR_TILES_QUANTIZED, EXPERTS_TILES_QUANTIZED)
        return make_experts(LINEAR_TILES_QUANTIZED, EXPERTS_TILES_QUANTIZED, True, finish)
    if name == "experts_tiles_float":
        finish = make_finish(LINEAR_TILES_FLOAT, EXPERTS_TILES_FLOAT)
        return make_experts(LINEAR_TILES_FLOAT, EXPERTS_TILES_FLOAT, False, finish)
    raise AttributeError(name)
