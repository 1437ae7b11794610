"""y = W x for block-quantized weights and activations in two planes of int8 (see quantize.py).

One token, and up to FEW: each row of W is read once, in the file's layout (rows_quantized.py). More tokens (prefill): a
tile of rows is unpacked once, to bytes, and multiplied with all tokens in registers (tiles.py); arithmetic is the
limit. Batches of up to `most tokens` use both planes of the activations, which is practically exact
(prefill_precise.py); larger ones use the high plane alone, which is what other programs do, and weights rescaled to
bytes (prefill_fast.py). One token always uses both.

The unpacked tile is a slab of at most SLAB columns, so that it stays in the cache close to the core while all tokens
pass by; sums wait in y from slab to slab.
"""

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.prefill_fast import make_fast_slab
from localllm.kernels.cpu.prefill_precise import make_precise_slab
from localllm.kernels.cpu.quantized_formats import QUANTIZED, SMALL_CODES
from localllm.kernels.cpu.rows_quantized import make_one, make_row
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.cpu.tiles import ROWS
from localllm.kernels.simd import load_i64

# Tokens for which rows are read as in decode. Against tiles, which come in sixes, rows of Q4_K take 0.67 of the time at
# 16 tokens in one plane and 0.9 in both, at 24 0.86 and 1.03; Q6_K 0.73, 0.91, 0.93, 1.02; Q8_0 0.97, 1.09, 1.16, 1.25.
FEW = 20
# Bytes of 256 weights up to which arithmetic is what limits decode, so that rows go in pairs. One core reads Q4_K at 20
# GB/s in pairs and 17 one by one, Q4_0 at 18 and 15, but Q8_0 at 18 and 20.
MOST_FOR_PAIRS = 200


def make_few(format):
    """Rows first to last for up to FEW tokens: both planes for one, and two rows at a time for more."""
    at_once = 2 if format.group_bytes <= MOST_FOR_PAIRS else 1
    one, precise = make_one(format, at_once), make_row(format, 2, 2, True)
    fast = make_row(format, 2, 1, True)

    @device
    def few(a, first, last, tokens, scratch):
        is_precise, distance = tokens <= load_i64(argument(a, LINEAR.most_precise)), at_once if tokens == 1 else 2
        row_bytes = argument(a, LINEAR.row_bytes)
        for r in range(first, last, distance):
            w, step, y = argument(a, LINEAR.weights) + r * row_bytes, row_bytes, argument(a, LINEAR.y) + r * 4
            if r + 1 == last:  # no second row: the same once more, for a padding column of y
                step = 0
            if tokens == 1:
                one(a, w, step, y)
            elif is_precise:
                precise(a, w, step, y, tokens, scratch)
            else:
                fast(a, w, step, y, tokens, scratch)

    return few


def make(format_name):
    """The kernel for one format."""
    few, unpacked = make_few(QUANTIZED[format_name]), SMALL_CODES.get(format_name, QUANTIZED[format_name])
    precise_slab, fast_slab = make_precise_slab(unpacked), make_fast_slab(unpacked)

    @kernel
    def linear(a, part, parts, thread):
        tokens = load_i64(argument(a, LINEAR.count))
        rows, columns = argument(a, LINEAR.rows), argument(a, LINEAR.columns)
        scratch = argument(a, LINEAR.scratch) + thread * argument(a, LINEAR.scratch_bytes)
        if tokens <= FEW:
            pairs = (rows + 1) // 2
            if tokens > 0:
                few(a, pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, rows), tokens, scratch)
            return
        tiles = (rows + ROWS - 1) // ROWS
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            for column in range(0, columns, SLAB):
                width = min(SLAB, columns - column)
                if tokens <= load_i64(argument(a, LINEAR.most_precise)):
                    precise_slab(a, tile, column, width, tokens, scratch)
                else:
                    fast_slab(a, tile, column, width, tokens, scratch)

    return linear
