"""Products of quantized weights with many tokens: weights requantized to bytes, activations in the high plane.

Scratch memory, in order (a "word" is 4 columns; span: columns that share a scale, see requantize_tile.py):

    weights   bytes [vector][word][16 rows][4]
    scales    f32 [vector][columns / span][16 rows]
    16 rows   weights and scales before they are transposed
"""

from numba import types

from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul.requantize_tile import BYTE_OFFSET, make_rescale, span
from localllm.kernels.cpu.matmul.slab import make_slab
from localllm.kernels.cpu.matmul.tile_dots import make_rescaled_dots, transpose_codes
from localllm.kernels.cpu.matmul.tiles import (
    CHUNK_WORDS,
    GROUP_WORDS,
    ROWS,
    VECTORS,
    add_alone,
    columns_at,
    continued,
    floats,
    ints,
    make_start_second,
    make_times,
    rows_at,
    scaled,
    scaled_alone,
    share_scales,
    start,
    start_of_both,
    transpose_words,
    zero_ints,
)
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.simd import f32x2, f32x8, f32x16, u8x64
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

PAIR = 64  # columns of a token that usually share a scale with so many tokens, see quantize.py
first, more, of_token = make_times(rows_at, ints, True), make_times(rows_at, ints), make_times(columns_at, floats)


def make_unpack(format):
    """Make a function (w, columns, codes, s) that unpacks a row to bytes [columns] and scales f32 [columns / span]."""
    codes_of, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    vector = f32x8 if format.sub_block == 32 else f32x16
    rescale = make_rescale(format, vector, types.UniTuple(u8x64, 4), 8)
    group_bytes, skip, has_chunks = format.group_bytes, 1024 // span(format), format.chunk is not None
    unpack_chunk = make_unpack_chunk(format) if has_chunks else None

    @device
    def unpack(w, columns, codes, s):
        for _ in range(columns // 256):
            rescale(codes_of(w), scales(w), minimums(w), codes, s)
            w, codes, s = w + group_bytes, codes + 256, s + skip
        if has_chunks:
            for _ in range(columns % 256 // 64):
                unpack_chunk(w, codes, s)
                w, codes, s = w + group_bytes // 4, codes + 64, s + skip // 4

    return unpack


def make_unpack_chunk(format):
    """Make a function (w, codes, s) that unpacks a chunk of 64 columns to bytes and scales."""
    codes_of, scales = format.chunk.codes, format.chunk.scales
    minimums = format.chunk.minimums or scales
    rescale = make_rescale(format, f32x2, types.UniTuple(u8x64, 1), 2)

    @device
    def unpack_chunk(w, codes, s):
        rescale((codes_of(w),), scales(w), minimums(w), codes, s)

    return unpack_chunk


def make_unpack_tile(format):
    """Make a function that unpacks a slab of ROWS rows to scratch memory."""
    unpack, group_bytes, columns_per_scale = make_unpack(format), format.group_bytes, span(format)
    scale_bytes = 64 * SLAB // columns_per_scale

    @device
    def unpack_tile(a, tile, column, columns, scratch):
        s = scratch + VECTORS * 16 * SLAB
        codes_rows = s + VECTORS * scale_bytes
        s_rows, row_bytes, last = codes_rows + 16 * SLAB, argument(a, LINEAR.row_bytes), argument(a, LINEAR.rows) - 1
        first_row = argument(a, LINEAR.weights) + column // 256 * group_bytes
        count = columns // columns_per_scale
        stride = (count + 15) // 16 * 64
        for v in range(VECTORS):
            for i in range(16):
                row = first_row + min(tile * ROWS + v * 16 + i, last) * row_bytes
                unpack(row, columns, codes_rows + i * columns, s_rows + i * stride)
            transpose_codes(codes_rows, columns // 4, scratch + v * 16 * SLAB)
            transpose_words(s_rows, count, s + v * scale_bytes)

    return unpack_tile


def make_pair(format, words):
    """Make a function that multiplies 64 columns, two runs of 32, and adds the results to a tile's totals.

    words: the offsets of the first run's words in x; those of the second are 8 bytes further.

    If all tokens have the same scale for both runs, as most do (quantize.py), sums are scaled less often. Otherwise
    each token is still computed as among tokens like it (`apart`), so that the others do not change its bits.
    Multiplications, 192 of which are dot products:

        weights have one scale for 64 columns: 216, but 228 if tokens have two scales
        weights have two scales: 228, but 240 if tokens have two scales
    """
    of_run, of_both = make_rescaled_dots(words), make_rescaled_dots([*words, *(word + 8 for word in words)])
    s_bytes, is_signed, has_one = 64 * SLAB // span(format), BYTE_OFFSET == 0, span(format) == PAIR
    start_second = make_start_second(not is_signed)

    @inlined
    def run(w, x, x_stride, n, stride):
        return of_run(zero_ints() if is_signed else start(n, stride), w, 16 * SLAB, x, x_stride)

    @inlined
    def together(totals, w, s, x, x_stride, c, n, stride):
        if has_one:
            sums = of_both(zero_ints() if is_signed else start_of_both(n, stride), w, 16 * SLAB, x, x_stride)
            return scaled(totals, sums, s, s_bytes, c, 2 * stride)
        products = first(totals, run(w, x, x_stride, n, stride), s, s_bytes)
        products = more(products, run(w + 16 * 8, x + 8, x_stride, n + 4, stride), s + 64, s_bytes)
        return of_token(totals, products, c, 2 * stride)

    @inlined
    def apart(totals, w, s, x, x_stride, c, n, stride):
        sums, w2, x2, n2, c2 = run(w, x, x_stride, n, stride), w + 16 * 8, x + 8, n + 4, c + 8
        if has_one:
            totals = scaled_alone(totals, sums, s, s_bytes, c, 2 * stride)
            both = of_run(start_second(sums, n2, stride, c, 2 * stride), w2, 16 * SLAB, x2, x_stride)
            return scaled(totals, both, s, s_bytes, c2, 2 * stride)
        products = first(totals, sums, s, s_bytes)
        totals = add_alone(totals, products, c, 2 * stride)
        products = continued(products, run(w2, x2, x_stride, n2, stride), s + 64, s_bytes, c, 2 * stride)
        return of_token(totals, products, c2, 2 * stride)

    @inlined
    def pair(totals, w, s, x, x_stride, c, n, stride):
        if share_scales(c, 2 * stride):
            return together(totals, w, s, x, x_stride, c, n, stride)
        return apart(totals, w, s, x, x_stride, c, n, stride)

    return pair


def make_tile(format):
    """Make a function that multiplies ROWS rows by TOKENS tokens over the columns of a slab."""
    group, chunk, s_step = make_pair(format, GROUP_WORDS), make_pair(format, CHUNK_WORDS), 64 * PAIR // span(format)
    has_chunks = format.chunk is not None

    @inlined
    def tile(totals, columns, w, s, x, x_stride, c, n, stride):
        for i in range(columns // 256 * 4):
            k = i // 4 * 256 + i % 4 * 16
            totals = group(totals, w + 16 * k, s + i * s_step, x + k, x_stride, c + i * 16, n + i * 8, stride)
        if has_chunks:
            for i in range(columns // 256 * 4, columns // 64):
                k = i * 64
                totals = chunk(totals, w + 16 * k, s + i * s_step, x + k, x_stride, c + i * 16, n + i * 8, stride)
        return totals

    return tile


def make_fast_slab(format):
    """Make a function (arguments, tile, column, (tile, column) of the next slab, tokens, scratch) for the high plane.

    It unpacks a slab and multiplies it with all tokens.
    """
    product = make_tile(format)

    @inlined
    def multiply(a, totals, columns, place, tokens, scratch):
        s, width = scratch + VECTORS * 16 * SLAB, argument(a, LINEAR.columns)
        x, c = argument(a, LINEAR.high) + place, argument(a, LINEAR.scales) + place // 4
        n = argument(a, LINEAR.excess) + place // 8
        return product(totals, columns, scratch, s, x, width, c, n, width // 8)

    return make_slab(format, make_unpack_tile(format), multiply)
