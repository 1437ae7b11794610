"""The kernel variants that multiply quantized weights, one for each range of token counts.

Each variant is compiled separately, when it is needed: compiling all of them takes as long as all other kernels of a
model together. The rule that chooses one is here, both for the kernel that calls them and for Python, which loads them
before a run. This module does not import Numba.
"""

from localllm.kernels.cpu import MOST_IN_WORDS, SUB_BLOCK
from localllm.kernels.machine import Lane, this_lane

# linear_one: one token; linear_few, linear_few_fast: a few, for which rows are read as in decode; linear_precise,
# linear_fast: more, in register tiles. The "fast" ones multiply the high plane only, the others both planes.
VARIANTS = ("linear_one", "linear_few", "linear_few_fast", "linear_precise", "linear_fast")
ONE, FEW, FEW_FAST, PRECISE, FAST = range(len(VARIANTS))

# Rows that are read together for several tokens. Four, if there are registers for them: the activations of many tokens
# come from the L2 cache, and four rows share each load: 0.8 of the time of two rows at 16 tokens.
TOGETHER = 4 if this_lane().has_512_bits else 2
# Most tokens for which rows are read as in decode, by the size of a sub-block. Compared with register tiles, of six
# tokens each, rows of Q4_K in both planes take 0.78 of the time at 24 tokens, 0.9 at 48; Q8_0 0.77, 0.91; Q4_0 0.9,
# 0.97; Q6_K 0.97, and at 36 1.04.
FEW_WITH_512_BITS, FEW_OTHERWISE = {32: 48, 16: 30}, {32: 20, 16: 20}
FEW_WITH_CHUNKS = 20  # if a row ends in chunks of 64 columns: 576 columns of Q4_1 take 0.87 in tiles at 24, 0.75 at 48


def few_tokens(format_name: str, columns: int, of: Lane | None = None) -> int:
    """Return the largest number of tokens for which rows of `columns` weights are read as in decode.

    of: the lane, by default this computer's.
    """
    lane = of or this_lane()
    if lane.has_avx2_only:
        return MOST_IN_WORDS
    if columns % 256:
        return FEW_WITH_CHUNKS
    few = FEW_WITH_512_BITS if lane.has_512_bits else FEW_OTHERWISE
    return few[SUB_BLOCK[format_name]]


def variant_for(tokens, few, most_precise):
    """Return the index in VARIANTS of the kernel for `tokens` tokens, at least 1.

    few: as few_tokens returns it; most_precise: number of tokens up to which both planes are multiplied. Kernels
    compile this function, too, so its parameters have no type annotations.
    """
    if tokens == 1:
        return ONE
    if tokens <= few:
        return FEW if tokens <= most_precise else FEW_FAST
    return PRECISE if tokens <= most_precise else FAST
