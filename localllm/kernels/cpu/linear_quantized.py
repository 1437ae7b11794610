"""y = W x for block-quantized weights and activations in two planes of int8 (see quantize.py).

One token, and up to 8: each row of W is read once, in the file's layout (rows_quantized.py). More tokens (prefill): a
tile of rows is unpacked once, to bytes, and multiplied with all tokens in registers (tiles.py); arithmetic is the
limit. Batches of up to `most tokens` use both planes of the activations, which is practically exact; larger ones use
the high plane alone, which is what other programs do. One token always uses both.

The unpacked tile is a slab of at most SLAB columns, so that it stays in the cache close to the core while all tokens
pass by; sums wait in y from slab to slab.

Arguments: 0 address of the token count, 1 weights, 2 bytes per row, 3 rows, 4 columns (a multiple of 64),
5 activations' high plane int8 [tokens, columns], 6 low plane, 7 scales f32 [tokens, columns / 32], 8 sums f32
[tokens, columns / sub-block], 9 sums of the high plane int32, 10 y f32, 11 bytes between tokens of y, 12 address of the
most tokens for both planes, 13 scratch memory, 14 bytes of it per thread.
"""

from numba import float32

from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.quantized_formats import QUANTIZED
from localllm.kernels.cpu.rows_quantized import make_row
from localllm.kernels.cpu.signature import argument, device, inlined, kernel
from localllm.kernels.cpu.tiles import (
    ROWS,
    TOKENS,
    VECTORS,
    add_least,
    load_tile,
    make_dots,
    make_start,
    make_store_tile,
    scaled,
    scaled_from_minimum,
    times_256,
    zero_floats,
    zero_ints,
)
from localllm.kernels.simd import (
    load_i64,
    splat_f32x8,
    splat_f32x16,
    store_f32,
    store_f32x8,
    store_f32x16,
    store_u8x64,
    transpose_f32,
)

FEW = 8  # tokens, for which rows are read as in decode
# Bytes of 256 weights up to which arithmetic is what limits decode, so that rows go in pairs. One core reads Q4_K at 20
# GB/s in pairs and 17 one by one, Q4_0 at 18 and 15, but Q8_0 at 18 and 20.
MOST_FOR_PAIRS = 200
store_all, store_first = make_store_tile(VECTORS), make_store_tile(1)
GROUP_WORDS = [64 * q + 4 * word for q in range(4) for word in (0, 1)]  # a run's words in 256 striped columns
CHUNK_WORDS = [16 * q + 4 * word for q in range(4) for word in (0, 1)]  # in 64


def make_unpack(format):
    """Unpack a row: codes to bytes [columns], scales and minimums times `unit` to f32 [columns / sub-block]."""
    codes_of, scales, minimums = format.codes, format.scales, format.minimums
    store, splat, skip = (store_f32x8, splat_f32x8, 32) if format.sub_block == 32 else (store_f32x16, splat_f32x16, 64)
    group_bytes, chunk = format.group_bytes, format.chunk
    chunk_codes, block_bytes = (chunk.codes, chunk.block_bytes) if chunk else (codes_of, 0)
    block_scale, block_minimum = (chunk.scale, chunk.minimum) if chunk else (None, None)

    @device
    def unpack(w, columns, unit, codes, s_out, m_out):
        for _ in range(columns // 256):
            c0, c1, c2, c3 = codes_of(w)
            store_u8x64(codes, c0)
            store_u8x64(codes + 64, c1)
            store_u8x64(codes + 128, c2)
            store_u8x64(codes + 192, c3)
            store(s_out, scales(w) * splat(unit))
            if minimums is not None:
                store(m_out, minimums(w) * splat(unit))
            w, codes, s_out, m_out = w + group_bytes, codes + 256, s_out + skip, m_out + skip
        if block_scale is not None:
            for _ in range(columns % 256 // 64):
                store_u8x64(codes, chunk_codes(w))
                for _ in range(2):
                    store_f32(s_out, block_scale(w) * unit)
                    if block_minimum is not None:
                        store_f32(m_out, block_minimum(w) * unit)
                    w, s_out, m_out = w + block_bytes, s_out + 4, m_out + 4
                codes += 64

    return unpack


def make_sub_block(format, words, both_planes):
    """Multiply one sub-block, whose words lie at these offsets, and add it to a tile's totals."""
    dots, start = make_dots(words, format.below_128), make_start(format.offset)
    has_minimum = format.minimums is not None
    factor = float32(1.0 if has_minimum else -format.offset)

    @inlined
    def precise(totals, w, x, low, x_stride, s, m, s_stride, c, c_stride, n, n_stride):
        sums = times_256(dots(zero_ints(), w, 16 * SLAB, x, x_stride))
        sums = dots(sums, w, 16 * SLAB, low, x_stride)
        totals = add_least(totals, factor, m if has_minimum else s, s_stride, n, n_stride)
        return scaled(totals, sums, s, s_stride, c, c_stride)

    @inlined
    def fast(totals, w, x, low, x_stride, s, m, s_stride, c, c_stride, n, n_stride):
        if has_minimum:
            sums = dots(zero_ints(), w, 16 * SLAB, x, x_stride)
            return scaled_from_minimum(totals, sums, s, s_stride, c, c_stride, m, n, n_stride)
        sums = dots(start(zero_ints(), n, n_stride), w, 16 * SLAB, x, x_stride)
        return scaled(totals, sums, s, s_stride, c, c_stride)

    return precise if both_planes else fast


def make_tile(format, both_planes):
    """ROWS rows times TOKENS tokens over the columns of a slab."""
    half = format.sub_block == 16
    run = make_sub_block(format, GROUP_WORDS[:4] if half else GROUP_WORDS, both_planes)
    second_half = make_sub_block(format, GROUP_WORDS[4:], both_planes)
    chunk_run = make_sub_block(format, CHUNK_WORDS, both_planes)
    has_chunks = format.chunk is not None

    @inlined
    def tile(totals, columns, w, s, m, s_stride, x, low, x_stride, c, c_stride, n, n_stride):
        for i in range(columns // 256 * 8):
            k = i // 8 * 256 + i % 8 * 8
            v, high, rest = w + 16 * k, x + k, low + k
            totals = run(totals, v, high, rest, x_stride, s, m, s_stride, c, c_stride, n, n_stride)
            s, m, n = s + 64, m + 64, n + 4
            if half:
                totals = second_half(totals, v, high, rest, x_stride, s, m, s_stride, c, c_stride, n, n_stride)
                s, m, n = s + 64, m + 64, n + 4
            c += 4
        if has_chunks:
            for i in range(columns // 256 * 8, columns // 32):
                k = i // 2 * 64 + i % 2 * 8
                v, high, rest = w + 16 * k, x + k, low + k
                totals = chunk_run(totals, v, high, rest, x_stride, s, m, s_stride, c, c_stride, n, n_stride)
                s, m, n, c = s + 64, m + 64, n + 4, c + 4
        return totals

    return tile


@device
def transpose_words(source, columns, target):
    """[16][columns] words of 4 bytes to [columns rounded up to 16][16]; rows are `columns` rounded up to 16 apart."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)


def make_unpack_tile(format):
    """Unpack a slab of ROWS rows: codes to [vector][word][16 rows][4], scales and minimums to [vector][sub-block][16].

    Scratch: the tile; its scales; its minimums; then 16 rows before they are transposed.
    """
    unpack, sub_block, group_bytes = make_unpack(format), format.sub_block, format.group_bytes
    has_minimum, scale_bytes = format.minimums is not None, 64 * SLAB // sub_block

    @device
    def unpack_tile(a, tile, column, columns, unit, scratch):
        s, m = scratch + VECTORS * 16 * SLAB, scratch + VECTORS * (16 * SLAB + scale_bytes)
        codes_rows = m + VECTORS * scale_bytes
        s_rows, m_rows = codes_rows + 16 * SLAB, codes_rows + 16 * SLAB + scale_bytes
        count, row_bytes, last = columns // sub_block, argument(a, 2), argument(a, 3) - 1
        stride = (count + 15) // 16 * 64
        for v in range(VECTORS):
            for i in range(16):
                row = argument(a, 1) + min(tile * ROWS + v * 16 + i, last) * row_bytes + column // 256 * group_bytes
                unpack(row, columns, unit, codes_rows + i * columns, s_rows + i * stride, m_rows + i * stride)
            transpose_words(codes_rows, columns // 4, scratch + v * 16 * SLAB)
            transpose_words(s_rows, count, s + v * scale_bytes)
            if has_minimum:
                transpose_words(m_rows, count, m + v * scale_bytes)

    return unpack_tile


def make_few(format):
    """Rows first to last for up to FEW tokens: one, or 4 with two rows at a time."""
    at_once = 2 if format.group_bytes <= MOST_FOR_PAIRS else 1
    one, four, fast_four = make_row(format, 1, at_once, 2), make_row(format, 4, 2, 2), make_row(format, 4, 2, 1)

    @device
    def few(a, first, last, tokens):
        precise, distance = tokens <= load_i64(argument(a, 12)), at_once if tokens == 1 else 2
        for r in range(first, last, distance):
            w, step, y = argument(a, 1) + r * argument(a, 2), argument(a, 2), argument(a, 10) + r * 4
            if r + 1 == last:  # no second row: the same once more, for a padding column of y
                step = 0
            if tokens == 1:
                one(a, w, step, 0, y)
            else:  # and tokens too many, whose results nobody reads
                for t in range(0, tokens, 4):
                    if precise:
                        four(a, w, step, t, y + t * argument(a, 11))
                    else:
                        fast_four(a, w, step, t, y + t * argument(a, 11))

    return few


def make(format_name):
    """The kernel for one format."""
    format = QUANTIZED[format_name]
    few, unpack_tile = make_few(format), make_unpack_tile(format)
    precise_tile, fast_tile = make_tile(format, True), make_tile(format, False)
    sub_block, scale_bytes = format.sub_block, 64 * SLAB // format.sub_block

    @device
    def multiply(a, tile, column, columns, tokens, scratch):
        """An unpacked slab with all tokens, and up to TOKENS - 1 too many, whose results nobody reads."""
        s, m = scratch + VECTORS * 16 * SLAB, scratch + VECTORS * (16 * SLAB + scale_bytes)
        width, y_stride = argument(a, 4), argument(a, 11)
        both_planes, whole = tokens <= load_i64(argument(a, 12)), argument(a, 3) - tile * ROWS > ROWS - 16
        sums = argument(a, 8) if both_planes else argument(a, 9)
        c_stride, n_stride = width // 8, width // sub_block * 4
        for t in range(0, tokens, TOKENS):
            x, low = argument(a, 5) + t * width + column, argument(a, 6) + t * width + column
            c, n = argument(a, 7) + t * c_stride + column // 8, sums + t * n_stride + column // sub_block * 4
            y = argument(a, 10) + tile * ROWS * 4 + t * y_stride
            totals = load_tile(y, y_stride) if column else zero_floats()
            if both_planes:
                totals = precise_tile(
                    totals, columns, scratch, s, m, scale_bytes, x, low, width, c, c_stride, n, n_stride
                )
            else:
                totals = fast_tile(totals, columns, scratch, s, m, scale_bytes, x, low, width, c, c_stride, n, n_stride)
            if whole:
                store_all(totals, y, y_stride)
            else:
                store_first(totals, y, y_stride)

    @kernel
    def linear(a, part, parts, thread):
        tokens, rows, columns = load_i64(argument(a, 0)), argument(a, 3), argument(a, 4)
        if tokens <= FEW:
            pairs = (rows + 1) // 2
            if tokens > 0:
                few(a, pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, rows), tokens)
            return
        tiles, scratch = (rows + ROWS - 1) // ROWS, argument(a, 13) + thread * argument(a, 14)
        unit = float32(1.0 if tokens <= load_i64(argument(a, 12)) else 256.0)
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            for column in range(0, columns, SLAB):
                width = min(SLAB, columns - column)
                unpack_tile(a, tile, column, width, unit, scratch)
                multiply(a, tile, column, width, tokens, scratch)

    return linear
