"""The kernel variants that multiply quantized weights, one for each range of token counts.

Each variant is compiled separately, when it is needed: compiling all of them takes as long as all other kernels of a
model together. This module has the rule that selects one, for the kernel that calls them and for Python, which loads
them before a run. It does not import Numba.
"""

from localllm.kernels.cpu import MAX_WORD_TOKENS, SUB_BLOCK
from localllm.kernels.machine import Lane, get_lane

# linear_one: one token; linear_few, linear_few_fast: a few tokens, for which rows are read as in decode;
# linear_precise, linear_fast: more tokens, in register tiles. The "fast" ones multiply the high plane only, the others
# both planes.
VARIANTS = ("linear_one", "linear_few", "linear_few_fast", "linear_precise", "linear_fast")
ONE, FEW, FEW_FAST, PRECISE, FAST = range(len(VARIANTS))

# Rows that are read together for several tokens. Four, if there are registers for them: the activations of many tokens
# come from the L2 cache, and four rows share each load: 0.8 of the time of two rows at 16 tokens.
ROWS_TOGETHER = 4 if get_lane().has_512_bits else 2
# Maximum number of tokens for which rows are read as in decode, in both planes. With 512 bits rows are as fast as
# register tiles of six tokens: measured in turn on a Zen 4, Q4_K takes 0.76, 0.91 and 1.03 of the time of tiles at 16,
# 64 and 128 tokens, Q6_K 0.74, 0.87 and 0.83, Q8_0 0.72, 1.0 and 1.0, Q3_K 0.77, 0.87 and 0.90. Otherwise the limit
# depends on the size of a sub-block.
FEW_WITH_512_BITS, FEW_BY_SUB_BLOCK = 128, {32: 20, 16: 20}
FEW_WITH_CHUNKS = 20  # if a row ends in chunks of 64 columns: 576 columns of Q4_1 take 0.87 in tiles at 24, 0.75 at 48
# Maximum number of tokens in the high plane, where tiles have weights as bytes.
FEW_IN_ONE_PLANE = {32: 48, 16: 30}


def get_max_few_tokens(format_name: str, columns: int, of: Lane | None = None) -> int:
    """Return the maximum number of tokens for which rows are read as in decode, in both planes.

    columns: weights per row.
    """
    lane = of or get_lane()
    if lane.has_avx2_only:
        return MAX_WORD_TOKENS
    if columns % 256:
        return FEW_WITH_CHUNKS
    return FEW_WITH_512_BITS if lane.has_512_bits else FEW_BY_SUB_BLOCK[SUB_BLOCK[format_name]]


def get_max_few_fast(format_name: str, columns: int, of: Lane | None = None) -> int:
    """Return the maximum number of tokens for which rows are read as in decode, in the high plane."""
    lane = of or get_lane()
    few = get_max_few_tokens(format_name, columns, lane)
    return min(few, FEW_IN_ONE_PLANE[SUB_BLOCK[format_name]]) if lane.has_512_bits else few


def select_variant(tokens, kernel_tokens, few, few_fast, most_precise):
    """Return the index in VARIANTS of the kernel for `tokens` tokens, at least 1.

    kernel_tokens: the token count that decides; few, few_fast: results of few_tokens and few_fast; most_precise: value
    of kernel_tokens up to which both planes are multiplied. Kernels compile this function, too, so its parameters have
    no type annotations.
    """
    if tokens == 1 and kernel_tokens == 1:
        return ONE
    if kernel_tokens <= most_precise:
        return PRECISE if kernel_tokens > few else (ONE if tokens == 1 else FEW)
    return FAST if kernel_tokens > few_fast else FEW_FAST
