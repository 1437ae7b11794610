"""Requantizes weights of any format to bytes with fewer scales: weight = scale * (byte - BYTE_OFFSET).

A product whose sums are scaled for every 16 columns, or that has minimums, spends a third of its multiplications on
scaling. Here 64 columns share a scale, which takes a sixth, and there are no minimums. The rounding costs 3e-5 of the
weights' mean square (normally distributed): about what rounding the activations to 8 bits costs, a hundredth of what
Q4_K has cost, a tenth of Q6_K. Logits of large batches are still nearer to the exact ones than llama.cpp's, at Q6_K by
a third. Formats with blocks of 32 and no minimums would gain 5 %: they keep their scales, and their weights exactly.

A byte is (code - offset) * factor + minimum, computed in 16-bit fixed point with 5 fraction bits. Codes are first
shifted left as far as they fit in a byte, which makes the result more precise.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.simd import (
    I16,
    I32,
    I64,
    elements,
    larger_size,
    llvm_call,
    operation,
    shuffled,
    signed_dot_variant,
    store_value,
    u8x64,
)
from localllm.kernels.simd.half import constant_like

BYTE_OFFSET = 0 if signed_dot_variant() else 128
TOP = 126.0  # the byte that the largest weight becomes, so that rounding never exceeds 127
POINT = 5  # fraction bits
PLANE = 256.0  # the unit of the activations' high plane
words = ir.VectorType(I16, 32)


def magnitude(builder, value):
    """Return the absolute value of each float."""
    return llvm_call(builder, f"llvm.fabs.v{value.type.count}f32", value.type, [value])


def span(format):
    """Return how many columns share a scale after requantization."""
    return 32 if format.sub_block == 32 and format.minimums is None else 64


def room(format):
    """Return by how many bits codes can be shifted left and still fit in a byte.

    After the offset is subtracted they must fit in a signed byte.
    """
    offset, largest = format.offset, format.largest
    return max(s for s in range(8) if max(largest << s, 2 * (largest - offset) << s, (2 * offset << s) - 1) < 256)


def size_of(format):
    """Return the largest magnitude of code - offset, for a format without minimums."""
    return max(format.offset, format.largest - format.offset)


def bounds(builder, format, scales, minimums):
    """Return the largest magnitude that weights of each sub-block can have, from its scale and minimum."""
    if minimums is None:
        return builder.fmul(magnitude(builder, scales), constant_like(scales, float(size_of(format))))
    highest = builder.fadd(builder.fmul(scales, constant_like(scales, float(format.largest))), minimums)
    return larger_size(builder, magnitude(builder, highest), magnitude(builder, minimums))


def largest_of_neighbours(builder, value, count):
    """Return in each lane the largest of its group of `count` lanes, 2 or 4; NaN if one of them is NaN."""
    for distance in (1, 2)[: count // 2]:
        other = shuffled(builder, value, value, [lane ^ distance for lane in range(value.type.count)])
        value = larger_size(builder, value, other)
    return value


def as_words(builder, value):
    """Round floats to the nearest 16-bit integers."""
    integers = ir.VectorType(I32, value.type.count)
    rounding = constant_like(value, 1.5 * 2**23)  # floats of this size are whole numbers
    nearest = builder.fsub(builder.fadd(value, rounding), rounding)
    return builder.trunc(builder.fptosi(nearest, integers), ir.VectorType(I16, value.type.count))


def high_half(builder, x, y):
    """Multiply signed 16-bit words; return the upper 16 bits of the products."""
    wide = ir.VectorType(I32, 32)
    product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    return builder.trunc(builder.ashr(product, constant_like(product, 16)), words)


def rescaled(builder, format, codes, factors, lows):
    """Requantize 64 codes to bytes; factors, least: 32 words, the factor and the minimum for each pair of codes.

    Both bytes of a word are computed separately.
    """
    shift = room(format)
    value = builder.bitcast(codes, words)
    value = builder.shl(value, constant_like(value, shift))
    centre = ir.Constant(u8x64.llvm, [format.offset << shift] * 64)
    value = builder.bitcast(builder.sub(builder.bitcast(value, u8x64.llvm), centre), words)
    even, odd = builder.shl(value, constant_like(value, 8)), builder.and_(value, constant_like(value, 0xFF00))
    even, odd = (builder.add(high_half(builder, part, factors), lows) for part in (even, odd))
    even = builder.and_(builder.lshr(even, constant_like(even, POINT)), constant_like(even, 0xFF))
    odd = builder.and_(builder.shl(odd, constant_like(odd, 8 - POINT)), constant_like(odd, 0xFF00))
    result = builder.bitcast(builder.or_(even, odd), u8x64.llvm)
    return builder.xor(result, ir.Constant(u8x64.llvm, [BYTE_OFFSET] * 64))


def spread(builder, values, runs, part, parts):
    """Copy a word for each sub-block to all words of a vector of codes.

    The vector has `runs` runs of 32 columns, and sub-block `part` of the `parts` sub-blocks of each run.
    """
    return shuffled(builder, values, values, [parts * (i // 4 % runs) + part for i in range(32)])


def make_rescale(format, vector, codes_type, runs):
    """Return an intrinsic that requantizes `runs` runs of 32 columns, and stores them.

    Its parameters: codes, scales, minimums, code address, scale address. A format without minimums gets its scales
    twice. vector, codes_type: the types of scales and codes.
    """
    if span(format) == 32:
        return make_keep(format, vector, codes_type)
    count = 32 // format.sub_block  # sub-blocks of a run

    @operation(None, codes_type, vector, vector, types.int64, types.int64)
    def rescale(builder, codes, scales, minimums, codes_out, scales_out):
        minimums = minimums if format.minimums else None
        bound = largest_of_neighbours(builder, bounds(builder, format, scales, minimums), 2 * count)
        zero = constant_like(bound, 0.0)
        inverse = builder.fdiv(constant_like(bound, TOP), bound)
        inverse = builder.select(builder.fcmp_ordered(">", bound, zero), inverse, zero)
        result = builder.fmul(bound, constant_like(bound, PLANE / TOP))
        store_value(builder, scales_out, shuffled(builder, result, result, [*range(0, result.type.count, 2 * count)]))
        factors = builder.fmul(
            builder.fmul(scales, inverse), constant_like(bound, float(1 << (8 + POINT - room(format))))
        )
        # With a half they are rounded, the middle upwards, which makes up for what the products lose by being cut off.
        factors, half = as_words(builder, factors), float(1 << (POINT - 1))
        lows = constant_like(bound, half)
        if minimums is not None:
            lows = builder.fmul(builder.fmul(minimums, inverse), constant_like(bound, 2 * half))
            lows = builder.fadd(lows, constant_like(bound, half))
        lows = as_words(builder, lows)
        for q, value in enumerate(elements(builder, codes)):
            part = q * count // codes.type.count
            spreads = (spread(builder, vector, runs, part, count) for vector in (factors, lows))
            store_value(builder, builder.add(codes_out, I64(64 * q)), rescaled(builder, format, value, *spreads))

    return rescale


def make_keep(format, vector, codes_type):
    """Return the intrinsic of make_rescale for formats whose weights keep their codes and scales."""

    @operation(None, codes_type, vector, vector, types.int64, types.int64)
    def keep(builder, codes, scales, minimums, codes_out, scales_out):
        distance = ir.Constant(u8x64.llvm, [(BYTE_OFFSET - format.offset) % 256] * 64)
        for q, value in enumerate(elements(builder, codes)):
            store_value(builder, builder.add(codes_out, I64(64 * q)), builder.add(value, distance))
        store_value(builder, scales_out, builder.fmul(scales, constant_like(scales, PLANE)))

    return keep
