"""Products of quantized weights with many tokens that keep the weights' own codes and scales, one slab at a time.

Used while both planes of the activations are multiplied, that is for moderate numbers of tokens. On CPUs with AVX2 only
it is used for more tokens, too: with codes of few bits and the high plane, or with 16-bit words.

Scratch memory, in order (a "word" is 4 columns):

    codes      u8 [vector][word][16 rows][4]
    scales     f32 [vector][sub-block][16 rows]
    minimums   f32 [vector][sub-block][16 rows]
    16 rows    codes, scales and minimums before they are transposed
"""

from numba import float32

from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul.avx2_dots import HAS_AVX2_DOTS, make_add_runs
from localllm.kernels.cpu.matmul.slab import make_fetch_next, make_slab
from localllm.kernels.cpu.matmul.tile_dots import make_code_dots, transpose_codes
from localllm.kernels.cpu.matmul.tiles import (
    CHUNK_WORDS,
    GROUP_WORDS,
    ROWS,
    TOKENS,
    VECTORS,
    add_least,
    scaled,
    settled,
    times_256,
    transpose_words,
    zero_ints,
)
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.simd import load_f32x16, splat_f32x16, store_f32x2, store_f32x8, store_f32x16, store_u8x64
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR


def make_unpack(format):
    """Make a function (w, columns, codes, s_out, m_out) that unpacks a row of weights.

    It writes codes u8 [columns], and scales and minimums f32 [columns / sub-block].
    """
    codes_of, scales, minimums = format.codes, format.scales, format.minimums
    store, skip = (store_f32x8, 32) if format.sub_block == 32 else (store_f32x16, 64)
    group_bytes, (chunk_codes, chunk_scales, chunk_minimums) = format.group_bytes, format.chunk or (None, None, None)

    @device
    def unpack(w, columns, codes, s_out, m_out):
        for _ in range(columns // 256):
            c0, c1, c2, c3 = codes_of(w)
            store_u8x64(codes, c0)
            store_u8x64(codes + 64, c1)
            store_u8x64(codes + 128, c2)
            store_u8x64(codes + 192, c3)
            store(s_out, scales(w))
            if minimums is not None:
                store(m_out, minimums(w))
            w, codes, s_out, m_out = w + group_bytes, codes + 256, s_out + skip, m_out + skip
        if chunk_codes is not None:
            for _ in range(columns % 256 // 64):
                store_u8x64(codes, chunk_codes(w))
                store_f32x2(s_out, chunk_scales(w))
                if chunk_minimums is not None:
                    store_f32x2(m_out, chunk_minimums(w))
                w, codes, s_out, m_out = w + group_bytes // 4, codes + 64, s_out + 8, m_out + 8

    return unpack


def make_unpack_tile(format):
    """Make a function that unpacks a slab of ROWS rows to scratch memory."""
    unpack, sub_block, group_bytes = make_unpack(format), format.sub_block, format.group_bytes
    has_minimum, scale_bytes = format.minimums is not None, 64 * SLAB // sub_block

    @device
    def unpack_tile(a, tile, column, columns, scratch):
        s, m = scratch + VECTORS * 16 * SLAB, scratch + VECTORS * (16 * SLAB + scale_bytes)
        codes_rows = m + VECTORS * scale_bytes
        s_rows, m_rows = codes_rows + 16 * SLAB, codes_rows + 16 * SLAB + scale_bytes
        count, row_bytes, last = columns // sub_block, argument(a, LINEAR.row_bytes), argument(a, LINEAR.rows) - 1
        first_row = argument(a, LINEAR.weights) + column // 256 * group_bytes
        stride = (count + 15) // 16 * 64
        for v in range(VECTORS):
            for i in range(16):
                row = first_row + min(tile * ROWS + v * 16 + i, last) * row_bytes
                unpack(row, columns, codes_rows + i * columns, s_rows + i * stride, m_rows + i * stride)
            transpose_codes(codes_rows, columns // 4, scratch + v * 16 * SLAB)
            transpose_words(s_rows, count, s + v * scale_bytes)
            if has_minimum:
                transpose_words(m_rows, count, m + v * scale_bytes)

    return unpack_tile


def make_sub_block(format, words):
    """Make a function that multiplies one sub-block of a tile in both planes and adds to the tile's totals.

    words: the offsets of the sub-block's words in x.
    """
    has_minimum = bool(format.minimums)
    factor = float32(1.0 if has_minimum else -format.offset)
    dots = make_code_dots(words, format.largest)

    @inlined
    def sub_block(totals, w, x, low, x_stride, s, m, s_stride, c, n, stride):
        totals = settled(add_least(totals, factor, m if has_minimum else s, s_stride, n, stride))
        sums = dots(times_256(dots(zero_ints(), w, 16 * SLAB, x, x_stride)), w, 16 * SLAB, low, x_stride)
        return scaled(totals, sums, s, s_stride, c, stride)

    return sub_block


def make_tile(format):
    """Make a function that multiplies ROWS rows by TOKENS tokens, in both planes, over the columns of a slab."""
    half, apart = format.sub_block == 16, format.sub_block // 4
    run = make_sub_block(format, GROUP_WORDS[:4] if half else GROUP_WORDS)
    second_half = make_sub_block(format, GROUP_WORDS[4:])
    chunk_run = make_sub_block(format, CHUNK_WORDS)
    has_chunks = format.chunk is not None

    @inlined
    def tile(totals, columns, w, s, m, s_stride, x, low, x_stride, c, n, stride):
        for i in range(columns // 256 * 8):
            k = i // 8 * 256 + i % 8 * 8
            v, high, rest = w + 16 * k, x + k, low + k
            totals = run(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
            s, m, n = s + 64, m + 64, n + apart
            if half:
                totals = second_half(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
                s, m, n = s + 64, m + 64, n + apart
            c += 8
        if has_chunks:
            for i in range(columns // 256 * 8, columns // 32):
                k = i // 2 * 64 + i % 2 * 8
                v, high, rest = w + 16 * k, x + k, low + k
                totals = chunk_run(totals, v, high, rest, x_stride, s, m, s_stride, c, n, stride)
                s, m, n, c = s + 64, m + 64, n + 8, c + 8
        return totals

    return tile


def make_precise_slab(format):
    """Make a function (arguments, tile, column, (tile, column) of the next slab, tokens, scratch) for both planes.

    It unpacks a slab and multiplies it with all tokens.
    """
    if HAS_AVX2_DOTS:
        return make_assembly_slab(format, True)
    product, scale_bytes = make_tile(format), 64 * SLAB // format.sub_block

    @inlined
    def multiply(a, totals, columns, place, tokens, scratch):
        s, m = scratch + VECTORS * 16 * SLAB, scratch + VECTORS * (16 * SLAB + scale_bytes)
        x, low, width = argument(a, LINEAR.high) + place, argument(a, LINEAR.low) + place, argument(a, LINEAR.columns)
        c, n = argument(a, LINEAR.scales) + place // 4, argument(a, LINEAR.sums) + place // 4
        return product(totals, columns, scratch, s, m, scale_bytes, x, low, width, c, n, width // 4)

    return make_slab(format, make_unpack_tile(format), multiply)


def make_assembly_slab(format, is_exact):
    """Make the function of make_precise_slab for CPUs with AVX2 only (avx2_dots.py).

    is_exact: multiply both planes, as 16-bit words; otherwise the high plane, as bytes. Two vectors of 16 rows are
    multiplied with the same tokens, one after the other, so activations, which come from the L2 or L3 cache, are read
    half as often (1.04 times as fast).
    """
    unpack_tile, fetch_next = make_unpack_tile(format), make_fetch_next(format.group_bytes)
    add_products = make_assembly_product(format, is_exact)

    @device
    def slab(a, tile, column, next_slab, tokens, scratch):
        columns = min(SLAB, argument(a, LINEAR.columns) - column)
        unpack_tile(a, tile, column, columns, scratch)
        width, y_stride = argument(a, LINEAR.columns), argument(a, LINEAR.y_stride)
        vectors = min(VECTORS, (argument(a, LINEAR.rows) - tile * ROWS + 15) // 16)
        for t in range(0, tokens, TOKENS):  # with up to TOKENS - 1 tokens too many, whose results are not used
            y = argument(a, LINEAR.y) + tile * ROWS * 4 + t * y_stride
            fetch_next(a, next_slab, t, tokens)
            for v in range(vectors):
                add_products(a, y + 64 * v, y_stride, v, columns, t * width + column, column == 0, scratch)

    return slab


def make_assembly_product(format, is_exact):
    """Make a function that adds the products of 16 rows and TOKENS tokens to y, or stores them there if is_first."""
    scale_bytes, has_chunks = 64 * SLAB // format.sub_block, format.chunk is not None
    add_groups, add_chunks = (
        make_add_runs(format, words, is_exact, VECTORS * scale_bytes) for words in (GROUP_WORDS, CHUNK_WORDS)
    )
    activations, size = (LINEAR.words, 2) if is_exact else (LINEAR.high, 1)
    sums, unit = (LINEAR.sums, float32(1.0)) if is_exact else (LINEAR.high_sums, float32(256.0))
    sum_bytes = 8  # bytes of a run's sums
    if format.has_integer_scales:
        sums, sum_bytes = LINEAR.excess, 4

    @inlined
    def add_products(a, y, y_stride, v, columns, place, is_first, scratch):
        w, s = scratch + v * 16 * SLAB, scratch + VECTORS * 16 * SLAB + v * scale_bytes
        totals = scratch + VECTORS * (16 * SLAB + 2 * scale_bytes)  # replaces the rows before they were transposed
        x, run = argument(a, activations) + size * place, place // 32
        c, n, groups = argument(a, LINEAR.scales) + 8 * run, argument(a, sums) + sum_bytes * run, columns // 256
        stride = argument(a, LINEAR.columns) // 32 * sum_bytes
        for i in range(TOKENS):
            store_f32x16(totals + 64 * i, splat_f32x16(float32(0.0)))
        if groups:
            add_groups(totals, w, x, s, c, n, stride, 8 * groups)
        if has_chunks and columns % 256:
            w, x, s, c, n = (
                w + 4096 * groups,
                x + 256 * size * groups,
                s + 512 * groups,
                c + 64 * groups,
                n + 64 * groups,
            )
            add_chunks(totals, w, x, s, c, n, stride, columns % 256 // 32)
        for i in range(TOKENS):
            products, place_in_y = load_f32x16(totals + 64 * i) * splat_f32x16(unit), y + i * y_stride
            store_f32x16(place_in_y, products if is_first else products + load_f32x16(place_in_y))

    return add_products
