"""y = W x for block-quantized weights and activations in two planes of int8 (see quantize.py).

One token, and up to 8: each row of W is read once, in the file's layout (rows_quantized.py). More tokens (prefill): a
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
from localllm.kernels.cpu.rows_quantized import make_row
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.cpu.tiles import ROWS
from localllm.kernels.simd import load_i64

FEW = 8  # tokens, for which rows are read as in decode
# Bytes of 256 weights up to which arithmetic is what limits decode, so that rows go in pairs. One core reads Q4_K at 20
# GB/s in pairs and 17 one by one, Q4_0 at 18 and 15, but Q8_0 at 18 and 20.
MOST_FOR_PAIRS = 200


def make_few(format):
    """Rows first to last for up to FEW tokens: one, or 4 with two rows at a time."""
    at_once = 2 if format.group_bytes <= MOST_FOR_PAIRS else 1
    one, four, fast_four = make_row(format, 1, at_once, 2), make_row(format, 4, 2, 2), make_row(format, 4, 2, 1)

    @device
    def few(a, first, last, tokens):
        precise, distance = tokens <= load_i64(argument(a, LINEAR.most_precise)), at_once if tokens == 1 else 2
        row_bytes, y_stride = argument(a, LINEAR.row_bytes), argument(a, LINEAR.y_stride)
        for r in range(first, last, distance):
            w, step, y = argument(a, LINEAR.weights) + r * row_bytes, row_bytes, argument(a, LINEAR.y) + r * 4
            if r + 1 == last:  # no second row: the same once more, for a padding column of y
                step = 0
            if tokens == 1:
                one(a, w, step, 0, y)
            else:  # and tokens too many, whose results nobody reads
                for t in range(0, tokens, 4):
                    if precise:
                        four(a, w, step, t, y + t * y_stride)
                    else:
                        fast_four(a, w, step, t, y + t * y_stride)

    return few


def make(format_name):
    """The kernel for one format."""
    few, unpacked = make_few(QUANTIZED[format_name]), SMALL_CODES.get(format_name, QUANTIZED[format_name])
    precise_slab, fast_slab = make_precise_slab(unpacked), make_fast_slab(unpacked)

    @kernel
    def linear(a, part, parts, thread):
        tokens = load_i64(argument(a, LINEAR.count))
        rows, columns = argument(a, LINEAR.rows), argument(a, LINEAR.columns)
        if tokens <= FEW:
            pairs = (rows + 1) // 2
            if tokens > 0:
                few(a, pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, rows), tokens)
            return
        tiles = (rows + ROWS - 1) // ROWS
        scratch = argument(a, LINEAR.scratch) + thread * argument(a, LINEAR.scratch_bytes)
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            for column in range(0, columns, SLAB):
                width = min(SLAB, columns - column)
                if tokens <= load_i64(argument(a, LINEAR.most_precise)):
                    precise_slab(a, tile, column, width, tokens, scratch)
                else:
                    fast_slab(a, tile, column, width, tokens, scratch)

    return linear
