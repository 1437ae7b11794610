"""y = W x for block-quantized weights and activations in two planes of int8 (see quantize.py).

One token (decode): each row of W is read once, in the file's layout, as a stream; memory speed is the limit.
More tokens (prefill): 16 rows are unpacked once to a tile of bytes that all tokens are multiplied with in registers;
arithmetic is the limit. So decode and small batches use both planes of the activations, which is practically exact;
large batches use the high plane alone, which is what other programs do.

With weight = s * code + m and activation = c * q: y = sum over sub-blocks of s * c * dot(code, q) + m * c * sum(q).

Arguments: 0 address of the token count, 1 weights, 2 bytes per row, 3 rows, 4 columns (a multiple of 64),
5 activations' high plane int8 [tokens, columns], 6 low plane, 7 scales f32 [tokens, columns / 32], 8 sums f32 [tokens,
columns / sub-block], 9 sums of the high plane, 10 y f32, 11 bytes between tokens of y, 12 most tokens for both planes,
13 scratch memory, 14 bytes of it per thread.
"""

from localllm.kernels.cpu.quantized_formats import QUANTIZED
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    concatenate_f32x16,
    dot_u8i8,
    f32x8,
    f32x16,
    float_i32x16,
    fma_f32x8,
    fma_f32x16,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i64,
    load_splat_4,
    load_u8x64,
    make_shift_i32,
    make_shuffle,
    prefetch,
    splat_f32x8,
    splat_f32x16,
    store_f32,
    store_f32x8,
    store_f32x16,
    store_u8x64,
    sum_f32x8,
    sum_f32x16,
    transpose_f32,
    zero_f32x8,
    zero_f32x16,
    zero_i32x16,
)

AHEAD = 4096  # bytes between the weights in use and those asked for

# the scales of the sub-blocks of chunk c, each over the lanes that its dot products fall into
spread_8 = [make_shuffle(f32x16, f32x8, [2 * c] * 8 + [2 * c + 1] * 8) for c in range(4)]
spread_16 = [make_shuffle(f32x16, f32x16, [4 * c + lane // 4 for lane in range(16)]) for c in range(4)]
up_8 = make_shift_i32(True, 8)
each_twice = make_shuffle(f32x16, f32x8, [lane // 2 for lane in range(16)])


@device
def dot_planes(codes, high, low):
    """Dot products of 64 codes with the activations at two addresses, each of 4."""
    dots = up_8(dot_u8i8(zero_i32x16(), codes, load_u8x64(high)))
    return float_i32x16(dot_u8i8(dots, codes, load_u8x64(low)))


def make_row(format):
    """The dot product of one row with one token."""
    codes0, codes1, codes2, codes3 = format.codes
    scales, minimums, group_bytes = format.scales, format.minimums, format.group_bytes
    if format.sub_block == 32:
        zero, load, fma, add_up, per_sub_block = zero_f32x8, load_f32x8, fma_f32x8, sum_f32x8, device(lambda v: v)
        spread0, spread1, spread2, spread3 = spread_8
    else:
        zero, load, fma, add_up, per_sub_block = zero_f32x16, load_f32x16, fma_f32x16, sum_f32x16, each_twice
        spread0, spread1, spread2, spread3 = spread_16
    sums_bytes = 256 // format.sub_block * 4

    @device
    def row(w, x, x_low, x_scales, x_sums, groups):
        total, least = zero_f32x16(), zero()
        for _ in range(groups):
            for line in range(0, group_bytes, 64):
                prefetch(w + AHEAD + line)
            s = scales(w)
            least = fma(minimums(w, s), load(x_sums), least)
            s = s * per_sub_block(load_f32x8(x_scales))
            total = fma_f32x16(dot_planes(codes0(w), x, x_low), spread0(s), total)
            total = fma_f32x16(dot_planes(codes1(w), x + 64, x_low + 64), spread1(s), total)
            total = fma_f32x16(dot_planes(codes2(w), x + 128, x_low + 128), spread2(s), total)
            total = fma_f32x16(dot_planes(codes3(w), x + 192, x_low + 192), spread3(s), total)
            w, x, x_low, x_scales, x_sums = w + group_bytes, x + 256, x_low + 256, x_scales + 32, x_sums + sums_bytes
        return sum_f32x16(total) + add_up(least)

    return row


def make_tail(format):
    """The dot product over the chunks of a row that make no whole group; only formats with blocks of 32 have them."""
    if not format.chunk_bytes:
        return device(lambda w, x, x_low, x_scales, x_sums, chunks: zero_f32x16())
    codes, block_scale, block_minimum = format.codes[0], format.block_scale, format.block_minimum
    chunk_bytes = format.chunk_bytes

    @device
    def tail(w, x, x_low, x_scales, x_sums, chunks):
        total = zero_f32x16()
        for _ in range(chunks):
            s, t = block_scale(w), block_scale(w + chunk_bytes // 2)
            m = splat_f32x8(block_minimum(w, s) * load_f32(x_sums) / 8)
            n = splat_f32x8(block_minimum(w + chunk_bytes // 2, t) * load_f32(x_sums + 4) / 8)
            scale = concatenate_f32x16(splat_f32x8(s * load_f32(x_scales)), splat_f32x8(t * load_f32(x_scales + 4)))
            total = fma_f32x16(dot_planes(codes(w), x, x_low), scale, total + concatenate_f32x16(m, n))
            w, x, x_low, x_scales, x_sums = w + chunk_bytes, x + 64, x_low + 64, x_scales + 8, x_sums + 8
        return total

    return tail


def make_unpack(format):
    """Unpack a row: codes to bytes [columns], scales and minimums to f32 [columns / sub-block]."""
    codes0, codes1, codes2, codes3 = format.codes
    scales, minimums, group_bytes, chunk_bytes = format.scales, format.minimums, format.group_bytes, format.chunk_bytes
    store, sub_blocks = (store_f32x8, 8) if format.sub_block == 32 else (store_f32x16, 16)
    block_scale, block_minimum = format.block_scale, format.block_minimum

    @device
    def unpack(w, columns, codes, s_out, m_out):
        for _ in range(columns // 256):
            store_u8x64(codes, codes0(w))
            store_u8x64(codes + 64, codes1(w))
            store_u8x64(codes + 128, codes2(w))
            store_u8x64(codes + 192, codes3(w))
            s = scales(w)
            store(s_out, s)
            store(m_out, minimums(w, s))
            w, codes, s_out, m_out = w + group_bytes, codes + 256, s_out + sub_blocks * 4, m_out + sub_blocks * 4
        if chunk_bytes:
            for _ in range(columns % 256 // 64):
                store_u8x64(codes, codes0(w))
                for _ in range(2):
                    s = block_scale(w)
                    store_f32(s_out, s)
                    store_f32(m_out, block_minimum(w, s))
                    w, s_out, m_out = w + chunk_bytes // 2, s_out + 4, m_out + 4
                codes += 64

    return unpack


def make_dots_8(dots):
    """The integer dot products of one sub-block of 4 * `dots` columns."""

    @device
    def dots_8(w, x, stride, sums):
        """One sub-block: 16 rows times 8 tokens that are `stride` bytes apart, added to the integers `sums`."""
        i0, i1, i2, i3, i4, i5, i6, i7 = sums
        x1, x2, x3, x4 = x + stride, x + 2 * stride, x + 3 * stride, x + 4 * stride
        x5, x6, x7 = x + 5 * stride, x + 6 * stride, x + 7 * stride
        for q in range(dots):
            v, k = load_u8x64(w + q * 64), q * 4
            i0 = dot_u8i8(i0, v, load_splat_4(x + k))
            i1 = dot_u8i8(i1, v, load_splat_4(x1 + k))
            i2 = dot_u8i8(i2, v, load_splat_4(x2 + k))
            i3 = dot_u8i8(i3, v, load_splat_4(x3 + k))
            i4 = dot_u8i8(i4, v, load_splat_4(x4 + k))
            i5 = dot_u8i8(i5, v, load_splat_4(x5 + k))
            i6 = dot_u8i8(i6, v, load_splat_4(x6 + k))
            i7 = dot_u8i8(i7, v, load_splat_4(x7 + k))
        return i0, i1, i2, i3, i4, i5, i6, i7

    return dots_8


def make_tile(dots, both_planes):
    """16 rows times 8 tokens, with a scale for every 4 * `dots` columns (8: sub-blocks of 32, 4: of 16).

    w: bytes [columns / 4][16 rows][4]; s, m: f32 [columns / sub-block][16 rows].
    """
    sub_block, unit, dots_8 = 4 * dots, 1.0 if both_planes else 256.0, make_dots_8(dots)

    @device
    def tile(w, s, m, x, low, x_scales, x_sums, columns, y, y_stride):
        t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = zero_f32x16()
        scales, sums = columns // 8, columns // sub_block * 4  # bytes per token
        for b in range(columns // sub_block):
            codes, k = w + b * dots * 64, b * sub_block
            i0, i1, i2, i3, i4, i5, i6, i7 = dots_8(codes, x + k, columns, zeros_8())
            if both_planes:
                high = times_256(i0, i1, i2, i3, i4, i5, i6, i7)
                i0, i1, i2, i3, i4, i5, i6, i7 = dots_8(codes, low + k, columns, high)
            scale, least = load_f32x16(s + b * 64) * splat_f32x16(unit), load_f32x16(m + b * 64)
            c, d = x_scales + b * sub_block // 32 * 4, x_sums + b * 4
            t0 = scaled(t0, i0, scale, least, c, d)
            t1 = scaled(t1, i1, scale, least, c + scales, d + sums)
            t2 = scaled(t2, i2, scale, least, c + 2 * scales, d + 2 * sums)
            t3 = scaled(t3, i3, scale, least, c + 3 * scales, d + 3 * sums)
            t4 = scaled(t4, i4, scale, least, c + 4 * scales, d + 4 * sums)
            t5 = scaled(t5, i5, scale, least, c + 5 * scales, d + 5 * sums)
            t6 = scaled(t6, i6, scale, least, c + 6 * scales, d + 6 * sums)
            t7 = scaled(t7, i7, scale, least, c + 7 * scales, d + 7 * sums)
        store_f32x16(y, t0)
        store_f32x16(y + y_stride, t1)
        store_f32x16(y + 2 * y_stride, t2)
        store_f32x16(y + 3 * y_stride, t3)
        store_f32x16(y + 4 * y_stride, t4)
        store_f32x16(y + 5 * y_stride, t5)
        store_f32x16(y + 6 * y_stride, t6)
        store_f32x16(y + 7 * y_stride, t7)

    return tile


@device
def zeros_8():
    """Eight vectors of zeros."""
    zero = zero_i32x16()
    return zero, zero, zero, zero, zero, zero, zero, zero


@device
def times_256(i0, i1, i2, i3, i4, i5, i6, i7):
    """Sums of the high plane in units of the low one."""
    return up_8(i0), up_8(i1), up_8(i2), up_8(i3), up_8(i4), up_8(i5), up_8(i6), up_8(i7)


@device
def scaled(total, dots, scale, least, x_scale, x_sum):
    """total + dots * (scale * x_scale) + least * x_sum; the last two are addresses."""
    total = fma_f32x16(least, splat_f32x16(load_f32(x_sum)), total)
    return fma_f32x16(float_i32x16(dots), scale * splat_f32x16(load_f32(x_scale)), total)


@device
def transpose_words(source, columns, target):
    """[16][columns] words of 4 bytes to [columns rounded up to 16][16]; rows are `columns` rounded up to 16 apart."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)


def make(format_name):
    """The kernel for one format."""
    format = QUANTIZED[format_name]
    row, tail, unpack = make_row(format), make_tail(format), make_unpack(format)
    precise_tile, fast_tile = make_tile(format.sub_block // 4, True), make_tile(format.sub_block // 4, False)
    sub_block, group_bytes = format.sub_block, format.group_bytes

    @device
    def decode(a, first, last):
        row_bytes, columns, y = argument(a, 2), argument(a, 4), argument(a, 10)
        x, x_low, x_scales, x_sums = argument(a, 5), argument(a, 6), argument(a, 7), argument(a, 8)
        groups, chunks, w = columns // 256, columns % 256 // 64, argument(a, 1) + first * row_bytes
        done, skip = groups * 256, groups * 32
        for r in range(first, last):
            value = row(w, x, x_low, x_scales, x_sums, groups)
            if chunks:
                rest = w + groups * group_bytes
                value += sum_f32x16(tail(rest, x + done, x_low + done, x_scales + skip, x_sums + skip, chunks))
            store_f32(y + r * 4, value)
            w += row_bytes

    @device
    def prefill(a, first, last, tokens, scratch):
        """Tiles `first` to `last`. Scratch: codes and scales as rows, then the tile and its scales."""
        rows, columns, row_bytes = argument(a, 3), argument(a, 4), argument(a, 2)
        x, x_low, x_scales, y, y_stride = (
            argument(a, 5), argument(a, 6), argument(a, 7), argument(a, 10), argument(a, 11)
        )  # fmt: skip
        both_planes = tokens <= argument(a, 12)
        x_sums = argument(a, 8) if both_planes else argument(a, 9)
        scales, stride = columns // sub_block, (columns // sub_block + 15) // 16 * 64
        codes_rows, s_rows = scratch, scratch + 16 * columns
        m_rows, w_tile = s_rows + 16 * stride, s_rows + 32 * stride
        s_tile = w_tile + 16 * columns
        m_tile = s_tile + 16 * stride
        for t in range(first, last):
            for i in range(16):
                w = argument(a, 1) + min(t * 16 + i, rows - 1) * row_bytes
                unpack(w, columns, codes_rows + i * columns, s_rows + i * stride, m_rows + i * stride)
            transpose_words(codes_rows, columns // 4, w_tile)
            transpose_words(s_rows, scales, s_tile)
            transpose_words(m_rows, scales, m_tile)
            for i in range(0, tokens, 8):
                c, d, target = x_scales + i * columns // 8, x_sums + i * scales * 4, y + t * 64 + i * y_stride
                high, low = x + i * columns, x_low + i * columns
                if both_planes:
                    precise_tile(w_tile, s_tile, m_tile, high, low, c, d, columns, target, y_stride)
                else:
                    fast_tile(w_tile, s_tile, m_tile, high, low, c, d, columns, target, y_stride)

    @kernel
    def linear(a, part, parts, thread):
        tokens, rows = load_i64(argument(a, 0)), argument(a, 3)
        if tokens == 1:
            decode(a, rows * part // parts, rows * (part + 1) // parts)
        elif tokens > 1:
            tiles, scratch = (rows + 15) // 16, argument(a, 13) + thread * argument(a, 14)
            prefill(a, tiles * part // parts, tiles * (part + 1) // parts, tokens, scratch)

    return linear
