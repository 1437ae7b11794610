"""Arithmetic on vectors, lane by lane and across lanes, and elementary functions."""

import math
import operator

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import overload

from localllm.kernels.build.pipeline import KernelCompiler
from localllm.kernels.machine import get_lane
from localllm.kernels.simd.vectors import (
    F32,
    I16,
    I32,
    I64,
    constant_like,
    f32x8,
    f32x16,
    i32x16,
    llvm_call,
    operation,
    shuffle_lanes,
    splat_f16,
    splat_value,
    store_value,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    widen_half,
)


def make_elementwise(vector, instruction):
    return operation(vector, vector, vector)(lambda builder, x, y: getattr(builder, instruction)(x, y))


def overload_operator(function, instructions):
    """Overload a Python operator for vectors; instructions: vector type to the name of LLVM's instruction."""
    implementations = {vector: make_elementwise(vector, name) for vector, name in instructions.items()}

    @overload(function, inline="never")
    def implement(x, y):
        if x == y and x in implementations:
            apply = implementations[x]
            return lambda x, y: apply(x, y)


overload_operator(operator.add, {f32x16: "fadd", f32x8: "fadd", i32x16: "add"})
overload_operator(operator.sub, {f32x16: "fsub", f32x8: "fsub", i32x16: "sub"})
overload_operator(operator.mul, {f32x16: "fmul", f32x8: "fmul", i32x16: "mul"})
overload_operator(operator.and_, {u8x64: "and_", u8x32: "and_", u8x16: "and_", i32x16: "and_"})
overload_operator(operator.or_, {u8x64: "or_", u8x32: "or_", u8x16: "or_", i32x16: "or_"})
overload_operator(operator.xor, {u8x64: "xor", u8x32: "xor"})


negative = {vector: operation(vector, vector)(lambda builder, x: builder.fneg(x)) for vector in (f32x8, f32x16)}


@overload(operator.neg, inline="never")
def negate(x):
    if x in negative:
        apply = negative[x]
        return lambda x: apply(x)


def constant(vector, *values):
    return operation(vector)(lambda builder: ir.Constant(vector.llvm, list(values) * (vector.lanes // len(values))))


zero_f32x16 = constant(f32x16, 0.0)


@operation(f32x16, types.float32)
def splat_f32x16(builder, scalar):
    return splat_value(builder, f32x16.llvm, scalar)


@operation(i32x16, types.int64)
def splat_i32x16(builder, scalar):
    return splat_value(builder, i32x16.llvm, builder.trunc(scalar, I32))


@operation(f32x8, types.float32)
def splat_f32x8(builder, scalar):
    return splat_value(builder, f32x8.llvm, scalar)


@operation(f32x16, types.int64)
def splat_f16x16(builder, bits):
    return splat_f16(16)(builder, builder.trunc(bits, I16))


@operation(types.float32, types.int64)
def float_f16(builder, bits):
    """Convert a float16 to float32; bits: an integer whose low 16 bits are the float16."""
    return widen_half(builder, builder.trunc(bits, I16))


def multiply_add(builder, x, y, z):
    """Compute x * y + z, rounded once if the CPU has an instruction for that, else twice.

    LLVM's other intrinsic, "llvm.fma", would call a slow function on CPUs without the instruction.
    """
    return llvm_call(builder, f"llvm.fmuladd.v{x.type.count}f32", x.type, [x, y, z])


fma_f32x16 = operation(f32x16, *[f32x16] * 3)(multiply_add)


@operation(f32x16, f32x16, f32x16)
def max_f32x16(builder, x, y):
    """Return the larger value in each lane; y where either is NaN, like x86's instruction."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(f32x16, f32x16, f32x16)
def min_f32x16(builder, x, y):
    """Return the smaller value in each lane; y where either is NaN, like x86's instruction."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@operation(f32x16, f32x16)
def abs_f32x16(builder, x):
    return llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [x])


@operation(f32x16, f32x16)
def sqrt_f32x16(builder, x):
    return llvm_call(builder, "llvm.sqrt.v16f32", f32x16.llvm, [x])


def max_magnitude(builder, x, y):
    """Return the larger of two non-negative floats given as their bits, in which NaN exceeds infinity."""
    integers = ir.VectorType(I32, x.type.count)
    above = builder.icmp_signed(">", builder.bitcast(x, integers), builder.bitcast(y, integers))
    return builder.select(above, x, y)


@operation(types.float32, f32x16, f32x16)
def max_magnitude_f32x16(builder, x, y):
    """Return the largest magnitude of the 32 values in x and y; NaN if one of them is NaN."""
    x, y = (llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [value]) for value in (x, y))
    sizes = builder.bitcast(max_magnitude(builder, x, y), i32x16.llvm)
    return builder.bitcast(llvm_call(builder, "llvm.vector.reduce.smax.v16i32", I32, [sizes]), F32)


@operation(f32x16, f32x16, types.float32)
def keep_below_f32x16(builder, x, limit):
    """Return x, but NaN in the lanes whose magnitude is not below the limit."""
    size = llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [x])
    below = builder.fcmp_ordered("<", size, splat_value(builder, f32x16.llvm, limit))
    return builder.select(below, x, constant_like(x, math.nan))


@operation(f32x16, f32x16)
def round_f32x16(builder, x):
    """Round to the nearest integer, ties to even. x must be at most 2 ** 22 in magnitude.

    Without an instruction for rounding, 1.5 * 2 ** 23 is added and subtracted: floats from 2 ** 23 to 2 ** 24 are
    integers, so the addition rounds.
    """
    if get_lane().has_instructions("sse4.1"):
        return llvm_call(builder, "llvm.nearbyint.v16f32", f32x16.llvm, [x])
    large = constant_like(x, 1.5 * 2**23)
    return builder.fsub(builder.fadd(x, large), large)


def reduce_add(builder, value):
    """Compute the sum of a vector's floats. LLVM chooses the order of additions."""
    function = ir.FunctionType(F32, [F32, value.type])
    name = f"llvm.vector.reduce.fadd.v{value.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(function, [ir.Constant(F32, 0.0), value], fastmath=("reassoc",))


sum_f32x16 = operation(types.float32, f32x16)(reduce_add)


@operation(types.float32, f32x16)
def largest_f32x16(builder, value):
    for distance in (8, 4, 2, 1):
        lanes = ir.Constant(ir.VectorType(I32, 16), [(lane + distance) % 16 for lane in range(16)])
        other = builder.shuffle_vector(value, value, lanes)
        value = builder.select(builder.fcmp_ordered(">", value, other), value, other)
    return builder.extract_element(value, I32(0))


@operation(types.boolean, f32x16, f32x16)
def any_above_f32x16(builder, x, y):
    above = builder.fcmp_ordered(">", x, y)
    if "neon" in get_lane().features:  # NEON has no masks with one bit per lane
        return llvm_call(builder, "llvm.vector.reduce.or.v16i1", ir.IntType(1), [above])
    return builder.icmp_unsigned("!=", builder.bitcast(above, I16), I16(0))


@operation(types.int64, i32x16)
def sum_i32x16(builder, value):
    return builder.sext(llvm_call(builder, "llvm.vector.reduce.add.v16i32", I32, [value]), I64)


@operation(i32x16, f32x16)
def int_f32x16(builder, value):
    """Convert floats to integers, rounding toward zero."""
    return builder.fptosi(value, i32x16.llvm)


def make_shift_i32(left, amount):
    """Return an intrinsic that shifts each lane by `amount` bits: left, or right with sign extension."""

    def shift(builder, value):
        counts = ir.Constant(i32x16.llvm, [amount] * 16)
        return builder.shl(value, counts) if left else builder.ashr(value, counts)

    return operation(i32x16, i32x16)(shift)


@operation(u8x16, i32x16)
def bytes_i32x16(builder, value):
    return builder.trunc(value, u8x16.llvm)


@operation(f32x8, u8x8)
def float_u8x8(builder, value):
    return builder.uitofp(value, f32x8.llvm)


@operation(f32x16, u8x16)
def float_i8x16(builder, value):
    return builder.sitofp(value, f32x16.llvm)


@operation(f32x16, u8x16)
def duplicate_i8x16(builder, value):
    """Sign-extend bytes to 16 bits and put each twice in a lane. The lanes have the type float."""
    return pack_pairs(builder, *[builder.sext(value, i32x16.llvm)] * 2)


def pack_pairs(builder, low, high):
    """Combine integer vectors to floats: a lane gets the low 16 bits of `low`, then those of `high`."""
    low = builder.and_(low, constant_like(low, 0xFFFF))
    return builder.bitcast(builder.or_(low, builder.shl(high, constant_like(high, 16))), f32x16.llvm)


def make_terms(offset):
    """Return an intrinsic (bytes, scale) for the terms of a format with integer scales, see GroupFormat.

    Lane 2 i: -offset * byte 2 i and -offset * byte 2 i + 1, 16 bits each. Lane 2 i + 1: that lane of `scale`.
    """

    @operation(f32x16, u8x16, f32x16)
    def terms(builder, value, scale):
        value = builder.sext(value, i32x16.llvm)
        value = builder.mul(value, constant_like(value, -offset))
        pairs = pack_pairs(builder, value, shuffle_lanes(builder, value, value, [i ^ 1 for i in range(16)]))
        return shuffle_lanes(builder, pairs, scale, [i + 16 * (i % 2) for i in range(16)])

    return terms


@operation(f32x16, u8x16, types.int64, f32x16, f32x16)
def nibbles_f32x16(builder, codes, bit, scale, minimum):
    """Compute scale * code + minimum, rounded once, for the 4-bit codes of 16 bytes.

    bit: the first bit of a code in its byte, 0 or 4. With AVX-512, all 16 possible results are computed, and codes
    select among them.
    """
    codes = builder.zext(codes, i32x16.llvm)
    codes = builder.lshr(codes, splat_value(builder, i32x16.llvm, builder.trunc(bit, I32)))
    if get_lane().has_512_bits:
        table = multiply_add(builder, ir.Constant(f32x16.llvm, [float(code) for code in range(16)]), scale, minimum)
        return llvm_call(builder, "llvm.x86.avx512.permvar.sf.512", f32x16.llvm, [table, codes])
    codes = builder.and_(codes, constant_like(codes, 15))
    return multiply_add(builder, builder.sitofp(codes, f32x16.llvm), scale, minimum)


@operation(f32x16, u8x16, types.int64, types.int64, f32x16, f32x16)
def five_bits_f32x16(builder, codes, bit, fifth, scale, minimum):
    """Compute scale * code + minimum, rounded once, for 5-bit codes.

    Their low 4 bits are those of `nibbles_f32x16`, the highest one is a bit of `fifth`.
    """
    codes = builder.zext(codes, i32x16.llvm)
    codes = builder.lshr(codes, splat_value(builder, i32x16.llvm, builder.trunc(bit, I32)))
    codes = builder.and_(codes, constant_like(codes, 15))
    lanes = ir.Constant(i32x16.llvm, [1 << lane for lane in range(16)])
    flag = builder.and_(splat_value(builder, i32x16.llvm, builder.trunc(fifth, I32)), lanes)
    sixteen = builder.select(builder.icmp_signed("==", flag, lanes), constant_like(codes, 16), constant_like(codes, 0))
    return multiply_add(builder, builder.sitofp(builder.or_(codes, sixteen), f32x16.llvm), scale, minimum)


@operation(types.int64, i32x16)
def fifth_bits_i32x16(builder, codes):
    sixteen = constant_like(codes, 16)
    lanes = ir.Constant(i32x16.llvm, [1 << lane for lane in range(16)])
    is_set = builder.icmp_signed("==", builder.and_(codes, sixteen), sixteen)
    bits = builder.select(is_set, lanes, ir.Constant(i32x16.llvm, None))
    return builder.zext(llvm_call(builder, "llvm.vector.reduce.or.v16i32", I32, [bits]), I64)


def make_staircase(first, edges, steps):
    """Return an intrinsic: `first` (also for NaN) plus the steps of all edges that are at most x."""

    def count_edges(builder, x):
        zero, result = constant_like(x, 0.0), constant_like(x, float(first))
        for edge, step in zip(edges, steps, strict=True):
            is_reached = builder.fcmp_ordered(">=", x, constant_like(x, float(edge)))
            result = builder.fadd(result, builder.select(is_reached, constant_like(x, float(step)), zero))
        return result

    return operation(f32x16, f32x16)(count_edges)


@operation(None, types.int64, i32x16, i32x16)
def store_nibbles(builder, address, low, high):
    """Store 16 bytes; byte i has the low 4 bits of lane i of `low`, and above them those of `high`."""
    low = builder.and_(low, constant_like(low, 15))
    both = builder.or_(low, builder.shl(high, constant_like(high, 4)))
    store_value(builder, address, builder.trunc(both, u8x16.llvm))


def make_butterfly(distance):
    """Return an intrinsic that replaces pairs of lanes by their sums and differences.

    distance: that of the lanes of a pair.
    """
    lanes = range(16)
    signs = [-1.0 if lane & distance else 1.0 for lane in lanes]

    def butterfly(builder, x):
        other = shuffle_lanes(builder, x, x, [lane ^ distance for lane in lanes])
        return multiply_add(builder, x, ir.Constant(f32x16.llvm, signs), other)

    return operation(f32x16, f32x16)(butterfly)


@operation(f32x16, f32x16)
def raise_two(builder, value):
    """Compute 2 ** value, for integers from -126 to 127, by exponent bits; -127 gives 0, and 128 infinity."""
    whole = builder.fptosi(value, i32x16.llvm)
    biased = builder.add(whole, ir.Constant(i32x16.llvm, [127] * 16))
    return builder.bitcast(builder.shl(biased, ir.Constant(i32x16.llvm, [23] * 16)), f32x16.llvm)


@operation(f32x16, f32x16)
def reciprocal_f32x16(builder, value):
    return builder.fdiv(ir.Constant(f32x16.llvm, [1.0] * 16), value)


_device = njit(nogil=True, pipeline_class=KernelCompiler)


@_device
def clamp_f32x16(x, low, high):
    """Clamp x to [low, high]. NaN stays NaN, because max and min return their second argument for it."""
    return min_f32x16(splat_f32x16(high), max_f32x16(splat_f32x16(low), x))


@_device
def exp_f32x16(x):
    """Compute e ** x within 2 units in the last place for x from -87 to 88.

    The result is 0 below -87.7, infinity above 88.4. x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two terms, so that r
    is exact); e ** r by its series to r ** 7 / 7!.
    """
    x = clamp_f32x16(x, -88.0, 89.0)
    n = round_f32x16(x * splat_f32x16(1.4426950408889634))
    r = fma_f32x16(n, splat_f32x16(-0.693359375), x)
    r = fma_f32x16(n, splat_f32x16(2.12194440e-4), r)
    p = splat_f32x16(1 / 5040)
    p = fma_f32x16(p, r, splat_f32x16(1 / 720))
    p = fma_f32x16(p, r, splat_f32x16(1 / 120))
    p = fma_f32x16(p, r, splat_f32x16(1 / 24))
    p = fma_f32x16(p, r, splat_f32x16(1 / 6))
    p = fma_f32x16(p, r, splat_f32x16(0.5))
    p = fma_f32x16(p, r, splat_f32x16(1.0))
    p = fma_f32x16(p, r, splat_f32x16(1.0))
    return p * raise_two(n)


@_device
def exp2_f32x16(x):
    """Compute 2 ** x to a relative error of 2e-7 for x from -126 to 127.5; 0 below -126.5, infinity above.

    x = n + r with |r| <= 1/2; 2 ** r by the polynomial that interpolates it at the 6 Chebyshev nodes, with an error of
    at most 1e-7.
    """
    x = clamp_f32x16(x, -127.0, 128.0)
    n = round_f32x16(x)
    r = x - n
    p = splat_f32x16(0.001339086336353527)
    p = fma_f32x16(p, r, splat_f32x16(0.009676031918255982))
    p = fma_f32x16(p, r, splat_f32x16(0.05550357114222094))
    p = fma_f32x16(p, r, splat_f32x16(0.2402210748530968))
    p = fma_f32x16(p, r, splat_f32x16(0.6931471880262273))
    p = fma_f32x16(p, r, splat_f32x16(1.0000000754548972))
    return p * raise_two(n)


@operation(f32x16, f32x16, f32x16)
def copy_sign(builder, value, sign):
    """Return `value`, which must not be negative, with the sign of `sign`."""
    return llvm_call(builder, "llvm.copysign.v16f32", f32x16.llvm, [value, sign])


@_device
def tanh_f32x16(x):
    """Compute tanh x = (1 - e ** -2|x|) / (1 + e ** -2|x|) with the sign of x; the error is at most 2e-7."""
    e = exp_f32x16(abs_f32x16(x) * splat_f32x16(-2.0))
    one = splat_f32x16(1.0)
    return copy_sign((one - e) * reciprocal_f32x16(one + e), x)


@_device
def erf_f32x16(x):
    """Compute erf x; the error is at most 3e-7.

    erf |x| = 1 - (a t + ... + e t^5) e ** -x^2 with t = 1 / (1 + p |x|). Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    size, one = abs_f32x16(x), splat_f32x16(1.0)
    t = reciprocal_f32x16(fma_f32x16(size, splat_f32x16(0.3275911), one))
    p = splat_f32x16(1.061405429)
    p = fma_f32x16(p, t, splat_f32x16(-1.453152027))
    p = fma_f32x16(p, t, splat_f32x16(1.421413741))
    p = fma_f32x16(p, t, splat_f32x16(-0.284496736))
    p = fma_f32x16(p, t, splat_f32x16(0.254829592))
    return copy_sign(one - p * t * exp_f32x16(-(x * x)), x)


@_device
def propagate_nan_f32x16(y, x):
    """Return y, but NaN where x is not finite.

    A bounded function, such as a sigmoid, would otherwise hide that broken weights have produced infinity or NaN.
    """
    return fma_f32x16(x, zero_f32x16(), y)


@_device
def sigmoid_f32x16(x):
    """Compute 1 / (1 + e ** -x); infinity gives NaN."""
    return propagate_nan_f32x16(reciprocal_f32x16(splat_f32x16(1.0) + exp_f32x16(-x)), x)


@_device
def softplus_f32x16(x):
    """Compute log(1 + e ** x) = max(x, 0) + log(1 + u) with u = e ** -|x|.

    The relative error is at most 2e-7; infinity gives NaN.

    log(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3, by its series to s ** 15 / 15.
    """
    u = exp_f32x16(-abs_f32x16(x))
    s = u * reciprocal_f32x16(splat_f32x16(2.0) + u)
    square = s * s
    p = splat_f32x16(2 / 15)
    p = fma_f32x16(p, square, splat_f32x16(2 / 13))
    p = fma_f32x16(p, square, splat_f32x16(2 / 11))
    p = fma_f32x16(p, square, splat_f32x16(2 / 9))
    p = fma_f32x16(p, square, splat_f32x16(2 / 7))
    p = fma_f32x16(p, square, splat_f32x16(2 / 5))
    p = fma_f32x16(p, square, splat_f32x16(2 / 3))
    p = fma_f32x16(p, square, splat_f32x16(2.0))
    return propagate_nan_f32x16(fma_f32x16(p, s, max_f32x16(zero_f32x16(), x)), x)
