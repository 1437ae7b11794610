"""Register tiles of the integer matrix product: a few vectors of 16 rows each, times a few tokens, unrolled.

A tile's sums are one tuple of vectors, element t * VECTORS + v for token t and rows 16 v to 16 v + 15, which LLVM keeps
in registers. With 32 registers, 2 x 6 needs 8 loads for 12 dot products; 1 x 8 needs 9 for 8 and is bound by them.
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.simd import (
    F32,
    I32,
    I64,
    as_tuple,
    below_128,
    dot_variant,
    elements,
    f32x16,
    i32x16,
    load_value,
    multiply_add,
    operation,
    splat_value,
    store_value,
    u8x64,
)
from localllm.kernels.target import cpu_features

VECTORS, TOKENS = (2, 6) if "avx512f" in cpu_features() else (1, 4)
ROWS = 16 * VECTORS
int64 = types.int64
ints, floats = types.UniTuple(i32x16, VECTORS * TOKENS), types.UniTuple(f32x16, VECTORS * TOKENS)
PLACES = [(t, v) for t in range(TOKENS) for v in range(VECTORS)]


def addresses(builder, first, stride, count):
    """first, first + stride, ..."""
    return [builder.add(first, builder.mul(stride, I64(i))) for i in range(count)]


def loads(builder, first, stride, count, llvm_type):
    """What lies at these addresses."""
    return [load_value(builder, address, llvm_type) for address in addresses(builder, first, stride, count)]


@operation(ints)
def zero_ints(builder):
    return as_tuple(builder, [ir.Constant(i32x16.llvm, None)] * len(PLACES))


@operation(floats)
def zero_floats(builder):
    return as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * len(PLACES))


@operation(ints, ints)
def times_256(builder, sums):
    """Sums of the high plane in units of the low one."""
    eight = ir.Constant(i32x16.llvm, [8] * 16)
    return as_tuple(builder, [builder.shl(value, eight) for value in elements(builder, sums)])


def make_start(offset):
    """An intrinsic (sums, address, stride): adds -offset times the integer that each token has there.

    With codes that are `offset` too large and the sum of a token's activations there, this takes back the excess.
    """

    @operation(ints, ints, int64, int64)
    def start(builder, sums, x_sums, stride):
        values = loads(builder, x_sums, stride, TOKENS, I32)
        excess = [splat_value(builder, i32x16.llvm, builder.mul(value, I32(-offset))) for value in values]
        sums = [builder.add(value, excess[t]) for value, (t, _) in zip(elements(builder, sums), PLACES, strict=True)]
        return as_tuple(builder, sums)

    return start


def make_dots(words, small):
    """An intrinsic (sums, w, bytes between vectors of w, x, bytes between tokens of x).

    Adds the products of `words`, which are byte offsets of 4 columns in x; w has them for 16 rows, 64 bytes a word.
    `small`: all of w is below 128.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def dots(builder, sums, w, w_stride, x, x_stride):
        sums, dot = elements(builder, sums), dot_variant()
        ws, xs = addresses(builder, w, w_stride, VECTORS), addresses(builder, x, x_stride, TOKENS)
        for word in words:
            weights = [load_value(builder, builder.add(address, I64(16 * word)), u8x64.llvm) for address in ws]
            weights = [below_128(builder, codes) if small else codes for codes in weights]
            for t, address in enumerate(xs):
                columns = load_value(builder, builder.add(address, I64(word)), I32)
                columns = builder.bitcast(splat_value(builder, i32x16.llvm, columns), u8x64.llvm)
                for v, rows in enumerate(weights):
                    i = t * VECTORS + v
                    sums[i] = dot(builder, sums[i], rows, columns)
        return as_tuple(builder, sums)

    return dots


@operation(floats, floats, ints, int64, int64, int64, int64)
def scaled(builder, totals, sums, s, s_stride, c, c_stride):
    """totals + sums * (scales of the rows at s) * (scales of the tokens at c)."""
    rows = loads(builder, s, s_stride, VECTORS, f32x16.llvm)
    columns = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, c, c_stride, TOKENS, F32)]
    totals, sums = elements(builder, totals), elements(builder, sums)
    for i, (t, v) in enumerate(PLACES):
        product = builder.fmul(builder.sitofp(sums[i], f32x16.llvm), rows[v])
        totals[i] = multiply_add(builder, product, columns[t], totals[i])
    return as_tuple(builder, totals)


@operation(floats, floats, ints, int64, int64, int64, int64, int64, int64, int64)
def scaled_from_minimum(builder, totals, sums, s, s_stride, c, c_stride, m, x_sums, sums_stride):
    """The same with minimums of the rows at m: totals + (sums * s + m * (integers of the tokens at x_sums)) * c."""
    rows, least = (loads(builder, address, s_stride, VECTORS, f32x16.llvm) for address in (s, m))
    columns = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, c, c_stride, TOKENS, F32)]
    x_sums = [builder.sitofp(value, F32) for value in loads(builder, x_sums, sums_stride, TOKENS, I32)]
    x_sums = [splat_value(builder, f32x16.llvm, value) for value in x_sums]
    totals, sums = elements(builder, totals), elements(builder, sums)
    for i, (t, v) in enumerate(PLACES):
        product = builder.fmul(builder.sitofp(sums[i], f32x16.llvm), rows[v])
        product = multiply_add(builder, least[v], x_sums[t], product)
        totals[i] = multiply_add(builder, product, columns[t], totals[i])
    return as_tuple(builder, totals)


@operation(floats, floats, float32, int64, int64, int64, int64)
def add_least(builder, totals, factor, m, m_stride, x_sums, sums_stride):
    """totals + factor * (minimums of the rows at m) * (sums of the tokens at x_sums)."""
    factor = splat_value(builder, f32x16.llvm, factor)
    least = [builder.fmul(value, factor) for value in loads(builder, m, m_stride, VECTORS, f32x16.llvm)]
    sums = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, x_sums, sums_stride, TOKENS, F32)]
    totals = elements(builder, totals)
    for i, (t, v) in enumerate(PLACES):
        totals[i] = multiply_add(builder, least[v], sums[t], totals[i])
    return as_tuple(builder, totals)


@operation(floats, int64, int64)
def load_tile(builder, y, y_stride):
    """What `store_tile` has stored."""
    rows = addresses(builder, y, y_stride, TOKENS)
    return as_tuple(builder, [load_value(builder, builder.add(rows[t], I64(64 * v)), f32x16.llvm) for t, v in PLACES])


def make_store_tile(vectors):
    """An intrinsic (totals, y, bytes between tokens of y) that stores the first `vectors` vectors of each token."""

    @operation(None, floats, int64, int64)
    def store_tile(builder, totals, y, y_stride):
        rows = addresses(builder, y, y_stride, TOKENS)
        for value, (t, v) in zip(elements(builder, totals), PLACES, strict=True):
            if v < vectors:
                store_value(builder, builder.add(rows[t], I64(64 * v)), value)

    return store_tile
