"""A slab of a tile of rows with all tokens, in the weights' own codes.

It is used for so few tokens that both planes of the activations are multiplied; on CPUs that multiply words also for
more tokens, and for codes of few bits in the high plane alone.

Scratch: the codes, [vector][word][16 rows][4]; their scales, [vector][sub-block][16]; their minimums; then 16 rows
before they are transposed.
"""

from numba import float32

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul.avx2_dots import HAS_AVX2_DOTS, make_add_sub_block
from localllm.kernels.cpu.matmul.slab import load_all, make_slab, store_all
from localllm.kernels.cpu.matmul.tile_dots import make_code_dots, transpose_codes
from localllm.kernels.cpu.matmul.tiles import (
    CHUNK_WORDS,
    GROUP_WORDS,
    ROWS,
    VECTORS,
    add_256_times,
    add_least,
    scaled,
    settled,
    times_256,
    transpose_words,
    zero_floats,
    zero_ints,
)
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.simd import store_f32x2, store_f32x8, store_f32x16, store_u8x64


def make_unpack(format):
    """Make a function that unpacks a row of weights.

    Codes become bytes [columns], scales and minimums f32 [columns / sub-block].
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
    """Make a function that unpacks a slab of ROWS rows to the scratch memory."""
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


def make_sub_block(format, words, is_exact):
    """Make a function that multiplies one sub-block, with words at these offsets, and adds it to a tile's totals.

    The totals may also be at an address. Their unit is that of the low plane, or of the high one if it is not exact.
    """
    has_minimum = bool(format.minimums)
    factor = float32(1.0 if has_minimum else -format.offset)
    if HAS_AVX2_DOTS:
        add = make_add_sub_block(words, None if is_exact else format.largest, None if has_minimum else float(factor))

        @inlined
        def sub_block(totals, w, x, low, both, x_stride, s, m, s_stride, c, n, stride):
            if is_exact:
                add(totals, w, both, 2 * x_stride, s, m, c, n, stride)
            else:
                add(totals, w, x, x_stride, s, m, c, n, stride)
            return totals

        return sub_block
    dots = make_code_dots(words, format.largest)

    @inlined
    def sub_block(totals, w, x, low, both, x_stride, s, m, s_stride, c, n, stride):
        totals = settled(add_least(totals, factor, m if has_minimum else s, s_stride, n, stride))
        sums = dots(times_256(dots(zero_ints(), w, 16 * SLAB, x, x_stride)), w, 16 * SLAB, low, x_stride)
        return scaled(totals, sums, s, s_stride, c, stride)

    return sub_block


def make_tile(format, is_exact):
    """Make a function that multiplies ROWS rows by TOKENS tokens over the columns of a slab."""
    half, apart = format.sub_block == 16, format.sub_block // 4
    run = make_sub_block(format, GROUP_WORDS[:4] if half else GROUP_WORDS, is_exact)
    second_half = make_sub_block(format, GROUP_WORDS[4:], is_exact)
    chunk_run = make_sub_block(format, CHUNK_WORDS, is_exact)
    has_chunks = format.chunk is not None

    @inlined
    def tile(totals, columns, w, s, m, s_stride, x, low, both, x_stride, c, n, stride):
        for i in range(columns // 256 * 8):
            k = i // 8 * 256 + i % 8 * 8
            v, high, rest, words = w + 16 * k, x + k, low + k, both + 2 * k
            totals = run(totals, v, high, rest, words, x_stride, s, m, s_stride, c, n, stride)
            s, m, n = s + 64, m + 64, n + apart
            if half:
                totals = second_half(totals, v, high, rest, words, x_stride, s, m, s_stride, c, n, stride)
                s, m, n = s + 64, m + 64, n + apart
            c += 8
        if has_chunks:
            for i in range(columns // 256 * 8, columns // 32):
                k = i // 2 * 64 + i % 2 * 8
                v, high, rest, words = w + 16 * k, x + k, low + k, both + 2 * k
                totals = chunk_run(totals, v, high, rest, words, x_stride, s, m, s_stride, c, n, stride)
                s, m, n, c = s + 64, m + 64, n + 8, c + 8
        return totals

    return tile


def make_precise_slab(format):
    """Make a function (arguments, tile, column, (tile, column) of the next slab, tokens, scratch)."""
    return make_code_slab(format, True)


def make_code_slab(format, is_exact):
    """Make the slab product for codes; with HAS_AVX2_DOTS, perhaps of the high plane alone."""
    product, scale_bytes = make_tile(format, is_exact), 64 * SLAB // format.sub_block
    sums = LINEAR.sums if is_exact else LINEAR.high_sums

    @inlined
    def multiply(a, totals, columns, place, tokens, scratch):
        s, m = scratch + VECTORS * 16 * SLAB, scratch + VECTORS * (16 * SLAB + scale_bytes)
        x, low, width = argument(a, LINEAR.high) + place, argument(a, LINEAR.low) + place, argument(a, LINEAR.columns)
        both, c, n = (
            argument(a, LINEAR.words) + 2 * place,
            argument(a, LINEAR.scales) + place // 4,
            argument(a, sums) + place // 4,
        )
        if not HAS_AVX2_DOTS:
            return product(totals, columns, scratch, s, m, scale_bytes, x, low, both, width, c, n, width // 4)
        here = m + VECTORS * scale_bytes  # where the rows lay before they were transposed
        store_all(totals if is_exact else zero_floats(), here, 64)
        product(here, columns, scratch, s, m, scale_bytes, x, low, both, width, c, n, width // 4)
        products = load_all(here, 64)
        return products if is_exact else add_256_times(totals, products)

    return make_slab(format, make_unpack_tile(format), multiply)
