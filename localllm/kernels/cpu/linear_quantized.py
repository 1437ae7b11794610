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
from localllm.kernels.target import cpu_features

# Rows that are read at a time for several tokens. Four, where there are registers for them: activations come from the
# second cache if there are many tokens, and four rows share what is read of them: 0.8 of the time of two at 16 tokens.
TOGETHER = 4 if "avx512f" in cpu_features() else 2
# Tokens for which rows are read as in decode, by the columns of a sub-block. Against tiles, which come in sixes, rows
# of Q4_K in both planes take 0.78 of the time at 24 tokens, 0.9 at 48; Q8_0 0.77, 0.91; Q4_0 0.9, 0.97; Q6_K 0.97, and
# at 36 1.04.
FEW = {32: 48, 16: 30} if TOGETHER == 4 else {32: 20, 16: 20}
FEW_WITH_CHUNKS = 20  # if a row ends in chunks of 64 columns: 576 columns of Q4_1 take 0.87 in tiles at 24, 0.75 at 48
# Bytes of 256 weights up to which arithmetic is what limits decode, so that rows go in pairs. One core reads Q4_K at 20
# GB/s in pairs and 17 one by one, Q4_0 at 18 and 15, but Q8_0 at 18 and 20.
MOST_FOR_PAIRS = 200
# Tiles that meet a slab's columns of all tokens one after the other, while those are in the second cache, if rows are
# longer than WIDE: 512 tokens of 8192 columns came from the third cache for every tile, and took 1.08 to 1.12 times as
# long. Of 2048 columns they take 1.01 times as long in turn: sums go to the second cache and back more often.
TILES, WIDE = 4, 2 * SLAB


def make_one_token(format):
    """Rows first to last for one token, in both planes."""
    at_once = 2 if format.group_bytes <= MOST_FOR_PAIRS else 1
    one = make_one(format, at_once)

    @device
    def one_token(a, first, last):
        row_bytes = argument(a, LINEAR.row_bytes)
        for r in range(first, last, at_once):
            step = row_bytes if r + 1 < last else 0  # no second row: the same once more, for a padding column of y
            one(a, argument(a, LINEAR.weights) + r * row_bytes, step, argument(a, LINEAR.y) + r * 4)

    return one_token


def make_few(format, together):
    """Rows first to last for up to FEW tokens, so many rows at a time."""
    precise, fast = make_row(format, together, 2), make_row(format, together, 1)

    @device
    def few(a, first, last, tokens, scratch):
        is_precise, row_bytes = tokens <= load_i64(argument(a, LINEAR.most_precise)), argument(a, LINEAR.row_bytes)
        r = first
        while r < last:
            w, y = argument(a, LINEAR.weights) + r * row_bytes, argument(a, LINEAR.y) + r * 4
            step = row_bytes if r + together <= last else 0  # the same row again, for those behind or padding of y
            if is_precise:
                precise(a, w, step, y, tokens, scratch)
            else:
                fast(a, w, step, y, tokens, scratch)
            r += together if step else 1

    return few


@device
def following(tile, group, end, column, columns):
    """The tile and the column of the slab that comes next: the tiles from `group` to `end` take turns."""
    if tile + 1 < end:
        return tile + 1, column
    if column + SLAB < columns:
        return group, column + SLAB
    return end, 0


def make(format_name):
    """The kernel for one format."""
    format = QUANTIZED[format_name]
    one_token, few = make_one_token(format), make_few(format, TOGETHER)
    unpacked = SMALL_CODES.get(format_name, format)
    few_tokens = FEW[unpacked.sub_block]
    precise_slab, fast_slab = make_precise_slab(unpacked), make_fast_slab(unpacked)

    @kernel
    def linear(a, part, parts, thread):
        tokens = load_i64(argument(a, LINEAR.count))
        rows, columns = argument(a, LINEAR.rows), argument(a, LINEAR.columns)
        scratch = argument(a, LINEAR.scratch) + thread * argument(a, LINEAR.scratch_bytes)
        if tokens <= (few_tokens if columns % 256 == 0 else FEW_WITH_CHUNKS):
            fours = (rows + 3) // 4
            first, last = fours * part // parts * 4, min(fours * (part + 1) // parts * 4, rows)
            if tokens == 1:
                one_token(a, first, last)
            elif tokens > 1:
                few(a, first, last, tokens, scratch)
            return
        tiles = (rows + ROWS - 1) // ROWS
        first, last = tiles * part // parts, tiles * (part + 1) // parts
        at_once = TILES if columns > WIDE else 1
        for group in range(first, last, at_once):
            end = min(group + at_once, last)
            for column in range(0, columns, SLAB):
                for tile in range(group, end):
                    next_slab = following(tile, group, end, column, columns)
                    if tokens <= load_i64(argument(a, LINEAR.most_precise)):
                        precise_slab(a, tile, column, next_slab, tokens, scratch)
                    else:
                        fast_slab(a, tile, column, next_slab, tokens, scratch)

    return linear
