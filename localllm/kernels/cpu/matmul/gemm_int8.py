"""Products of quantized weights and many tokens, with requantized weights and the high plane.

Weights are requantized to bytes, weight = scale * (byte - BYTE_OFFSET), with fewer scales than the format has. A
product whose sums are scaled for every 16 columns, or that has minimums, spends a third of its multiplications on
scaling. With one scale for 64 columns and no minimums, scaling takes a sixth. The rounding costs 3e-5 of the weights'
mean square (normally distributed): about as much as rounding the activations to 8 bits, a hundredth of the error of
Q4_K, a tenth of that of Q6_K. Logits of large batches are still nearer to the exact ones than llama.cpp's, at Q6_K by a
third. Formats with blocks of 32 and no minimums would gain 5 %: they keep their scales, and their weights exactly.

A byte is (code - offset) * factor + minimum, computed in 16-bit fixed point with 5 fraction bits. For more precision,
codes are first shifted left as far as they fit in a byte.

Scratch memory, in order (a "word" is 4 columns; span: columns that share a scale):

    weights   bytes [vector][word][16 rows][4]
    scales    f32 [vector][columns / span][16 rows]
    16 rows   weights and scales before they are transposed
"""

from llvmlite import ir
from numba import types

from localllm.kernels import simd
from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul import tiles
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

BYTE_OFFSET = 0 if simd.select_signed_dot() else 128
TOP = 126.0  # the byte of the largest weight; rounding then never exceeds 127
POINT = 5  # fraction bits
PLANE = 256.0  # the unit of the activations' high plane
words = ir.VectorType(simd.I16, 32)


PAIR = 64  # columns of a token that usually share a scale in long runs, see quantize.py
first, more = (
    tiles.make_times(tiles.load_row_scales, tiles.ints, True),
    tiles.make_times(tiles.load_row_scales, tiles.ints),
)
of_token = tiles.make_times(tiles.load_token_scales, tiles.floats)


def make_unpack(format):
    """Build a function (w, columns, codes, s) that unpacks a row.

    It writes bytes [columns] and scales f32 [columns / span].
    """
    codes_of, scales, minimums = format.codes, format.scales, format.minimums or format.scales
    vector = simd.f32x8 if format.sub_block == 32 else simd.f32x16
    rescale = make_requantize(format, vector, types.UniTuple(simd.u8x64, 4), 8)
    group_bytes, skip, has_chunks = format.group_bytes, 1024 // get_scale_span(format), format.chunk is not None
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
    codes_of, scales = format.chunk.codes, format.chunk.scales
    minimums = format.chunk.minimums or scales
    rescale = make_requantize(format, simd.f32x2, types.UniTuple(simd.u8x64, 1), 2)

    @device
    def unpack_chunk(w, codes, s):
        rescale((codes_of(w),), scales(w), minimums(w), codes, s)

    return unpack_chunk


def make_unpack_tile(format):
    unpack, group_bytes, columns_per_scale = make_unpack(format), format.group_bytes, get_scale_span(format)
    scale_bytes = 64 * SLAB // columns_per_scale

    @device
    def unpack_tile(a, tile, column, columns, scratch):
        s = scratch + tiles.VECTORS * 16 * SLAB
        codes_rows = s + tiles.VECTORS * scale_bytes
        s_rows, row_bytes, last = (
            codes_rows + 16 * SLAB,
            load_argument(a, LINEAR.row_bytes),
            load_argument(a, LINEAR.rows) - 1,
        )
        first_row = load_argument(a, LINEAR.weights) + column // 256 * group_bytes
        count = columns // columns_per_scale
        stride = (count + 15) // 16 * 64
        for v in range(tiles.VECTORS):
            for i in range(16):
                row = first_row + min(tile * tiles.ROWS + v * 16 + i, last) * row_bytes
                unpack(row, columns, codes_rows + i * columns, s_rows + i * stride)
            tiles.transpose_codes(codes_rows, columns // 4, scratch + v * 16 * SLAB)
            tiles.transpose_words(s_rows, count, s + v * scale_bytes)

    return unpack_tile


def make_pair(format, words):
    """Build a function that adds the products of 64 columns, two runs of 32, to a tile's totals.

    words: the offsets of the first run's words in x; those of the second are 8 bytes further.

    If all tokens have the same scale for both runs, as most do (quantize.py), sums are scaled less often. Otherwise
    each token is still computed as among tokens like it (`apart`), so that the others do not change its bits.
    Multiplications, 192 of which are dot products:

        weights have one scale for 64 columns: 216, but 228 if tokens have two scales
        weights have two scales: 228, but 240 if tokens have two scales
    """
    of_run, of_both = tiles.make_rescaled_dots(words), tiles.make_rescaled_dots([*words, *(word + 8 for word in words)])
    s_bytes, is_signed, has_one = 64 * SLAB // get_scale_span(format), BYTE_OFFSET == 0, get_scale_span(format) == PAIR
    start_second = tiles.make_start_second(not is_signed)

    @inlined
    def multiply_run(w, x, x_stride, n, stride):
        return of_run(tiles.zero_ints() if is_signed else tiles.load_excess(n, stride), w, 16 * SLAB, x, x_stride)

    @inlined
    def multiply_together(totals, w, s, x, x_stride, c, n, stride):
        if has_one:
            sums = of_both(
                tiles.zero_ints() if is_signed else tiles.load_both_excesses(n, stride), w, 16 * SLAB, x, x_stride
            )
            return tiles.add_scaled(totals, sums, s, s_bytes, c, 2 * stride)
        products = first(totals, multiply_run(w, x, x_stride, n, stride), s, s_bytes)
        products = more(products, multiply_run(w + 16 * 8, x + 8, x_stride, n + 4, stride), s + 64, s_bytes)
        return of_token(totals, products, c, 2 * stride)

    @inlined
    def multiply_apart(totals, w, s, x, x_stride, c, n, stride):
        sums, w2, x2, n2, c2 = multiply_run(w, x, x_stride, n, stride), w + 16 * 8, x + 8, n + 4, c + 8
        if has_one:
            totals = tiles.add_scaled_alone(totals, sums, s, s_bytes, c, 2 * stride)
            both = of_run(start_second(sums, n2, stride, c, 2 * stride), w2, 16 * SLAB, x2, x_stride)
            return tiles.add_scaled(totals, both, s, s_bytes, c2, 2 * stride)
        products = first(totals, sums, s, s_bytes)
        totals = tiles.add_alone(totals, products, c, 2 * stride)
        products = tiles.continue_products(
            products, multiply_run(w2, x2, x_stride, n2, stride), s + 64, s_bytes, c, 2 * stride
        )
        return of_token(totals, products, c2, 2 * stride)

    @inlined
    def multiply_pair(totals, w, s, x, x_stride, c, n, stride):
        if tiles.share_scales(c, 2 * stride):
            return multiply_together(totals, w, s, x, x_stride, c, n, stride)
        return multiply_apart(totals, w, s, x, x_stride, c, n, stride)

    return multiply_pair


def make_tile(format):
    group, chunk = make_pair(format, tiles.GROUP_WORDS), make_pair(format, tiles.CHUNK_WORDS)
    s_step = 64 * PAIR // get_scale_span(format)
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
    """Build a function that unpacks a slab and multiplies it by all tokens in the high plane.

    See make_slab.
    """
    product = make_tile(format)

    @inlined
    def multiply(a, totals, columns, place, tokens, scratch):
        s, width = scratch + tiles.VECTORS * 16 * SLAB, load_argument(a, LINEAR.columns)
        x, c = load_argument(a, LINEAR.high) + place, load_argument(a, LINEAR.scales) + place // 4
        n = load_argument(a, LINEAR.excess) + place // 8
        return product(totals, columns, scratch, s, x, width, c, n, width // 8)

    return tiles.make_slab(format, make_unpack_tile(format), multiply)


# ---- weights requantized to bytes


def magnitude(builder, value):
    return simd.llvm_call(builder, f"llvm.fabs.v{value.type.count}f32", value.type, [value])


def get_scale_span(format):
    """Return the number of columns that share a scale after requantization."""
    return 32 if format.sub_block == 32 and format.minimums is None else 64


def count_free_bits(format):
    """Return how many bits codes can be shifted left and still fit in a byte, signed after the offset."""
    offset, largest = format.offset, format.largest
    return max(s for s in range(8) if max(largest << s, 2 * (largest - offset) << s, (2 * offset << s) - 1) < 256)


def compute_max_magnitude(format):
    return max(format.offset, format.largest - format.offset)


def compute_bounds(builder, format, scales, minimums):
    """Return the largest magnitude that weights of each sub-block can have."""
    if minimums is None:
        return builder.fmul(
            magnitude(builder, scales), simd.constant_like(scales, float(compute_max_magnitude(format)))
        )
    highest = builder.fadd(builder.fmul(scales, simd.constant_like(scales, float(format.largest))), minimums)
    return simd.max_magnitude(builder, magnitude(builder, highest), magnitude(builder, minimums))


def find_largest_neighbours(builder, value, count):
    """Return in each lane the largest of its group of `count` lanes, 2 or 4; NaN if one of them is NaN."""
    for distance in (1, 2)[: count // 2]:
        other = simd.shuffle_lanes(builder, value, value, [lane ^ distance for lane in range(value.type.count)])
        value = simd.max_magnitude(builder, value, other)
    return value


def round_to_words(builder, value):
    integers = ir.VectorType(simd.I32, value.type.count)
    rounding = simd.constant_like(value, 1.5 * 2**23)  # floats of this size are integers
    nearest = builder.fsub(builder.fadd(value, rounding), rounding)
    return builder.trunc(builder.fptosi(nearest, integers), ir.VectorType(simd.I16, value.type.count))


def multiply_high(builder, x, y):
    """Multiply signed 16-bit words; return the upper 16 bits of the products."""
    wide = ir.VectorType(simd.I32, 32)
    product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    return builder.trunc(builder.ashr(product, simd.constant_like(product, 16)), words)


def requantize(builder, format, codes, factors, lows):
    """Requantize 64 codes to bytes.

    factors, lows: 32 words, the factor and the minimum of each pair of codes.
    """
    shift = count_free_bits(format)
    value = builder.bitcast(codes, words)
    value = builder.shl(value, simd.constant_like(value, shift))
    centre = ir.Constant(simd.u8x64.llvm, [format.offset << shift] * 64)
    value = builder.bitcast(builder.sub(builder.bitcast(value, simd.u8x64.llvm), centre), words)
    even, odd = builder.shl(value, simd.constant_like(value, 8)), builder.and_(value, simd.constant_like(value, 0xFF00))
    even, odd = (builder.add(multiply_high(builder, part, factors), lows) for part in (even, odd))
    even = builder.and_(builder.lshr(even, simd.constant_like(even, POINT)), simd.constant_like(even, 0xFF))
    odd = builder.and_(builder.shl(odd, simd.constant_like(odd, 8 - POINT)), simd.constant_like(odd, 0xFF00))
    result = builder.bitcast(builder.or_(even, odd), simd.u8x64.llvm)
    return builder.xor(result, ir.Constant(simd.u8x64.llvm, [BYTE_OFFSET] * 64))


def spread_word(builder, values, runs, part, parts):
    """Copy the words of a sub-block of each of `runs` runs to all words of a vector of codes.

    part, parts: the sub-block's index in its run, and the number of sub-blocks per run.
    """
    return simd.shuffle_lanes(builder, values, values, [parts * (i // 4 % runs) + part for i in range(32)])


def make_requantize(format, vector, codes_type, runs):
    """Return an intrinsic that requantizes `runs` runs.

    Its parameters: codes, scales, minimums, code address, scale address. A format without minimums gets its scales
    twice. vector, codes_type: the types of scales and codes.
    """
    if get_scale_span(format) == 32:
        return make_unchanged_codes(format, vector, codes_type)
    count = 32 // format.sub_block  # sub-blocks of a run

    @simd.operation(None, codes_type, vector, vector, types.int64, types.int64)
    def rescale(builder, codes, scales, minimums, codes_out, scales_out):
        minimums = minimums if format.minimums else None
        bound = find_largest_neighbours(builder, compute_bounds(builder, format, scales, minimums), 2 * count)
        zero = simd.constant_like(bound, 0.0)
        inverse = builder.fdiv(simd.constant_like(bound, TOP), bound)
        inverse = builder.select(builder.fcmp_ordered(">", bound, zero), inverse, zero)
        result = builder.fmul(bound, simd.constant_like(bound, PLANE / TOP))
        simd.store_value(
            builder, scales_out, simd.shuffle_lanes(builder, result, result, [*range(0, result.type.count, 2 * count)])
        )
        factors = builder.fmul(
            builder.fmul(scales, inverse), simd.constant_like(bound, float(1 << (8 + POINT - count_free_bits(format))))
        )
        # Adding a half rounds them up in the middle, which compensates for truncating the products.
        factors, half = round_to_words(builder, factors), float(1 << (POINT - 1))
        lows = simd.constant_like(bound, half)
        if minimums is not None:
            lows = builder.fmul(builder.fmul(minimums, inverse), simd.constant_like(bound, 2 * half))
            lows = builder.fadd(lows, simd.constant_like(bound, half))
        lows = round_to_words(builder, lows)
        for q, value in enumerate(simd.elements(builder, codes)):
            part = q * count // codes.type.count
            spreads = (spread_word(builder, vector, runs, part, count) for vector in (factors, lows))
            simd.store_value(
                builder, builder.add(codes_out, simd.I64(64 * q)), requantize(builder, format, value, *spreads)
            )

    return rescale


def make_unchanged_codes(format, vector, codes_type):
    """Return the intrinsic of make_requantize for formats whose weights keep their codes and scales."""

    @simd.operation(None, codes_type, vector, vector, types.int64, types.int64)
    def keep(builder, codes, scales, minimums, codes_out, scales_out):
        distance = ir.Constant(simd.u8x64.llvm, [(BYTE_OFFSET - format.offset) % 256] * 64)
        for q, value in enumerate(simd.elements(builder, codes)):
            simd.store_value(builder, builder.add(codes_out, simd.I64(64 * q)), builder.add(value, distance))
        simd.store_value(builder, scales_out, builder.fmul(scales, simd.constant_like(scales, PLANE)))

    return keep
