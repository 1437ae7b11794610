"""Register tiles of the integer matrix product: a few vectors of 16 rows each, times a few tokens, unrolled.

A tile's sums are one tuple of vectors, element t * VECTORS + v for token t and rows 16 v to 16 v + 15, which LLVM keeps
in registers. With 32 registers, 2 x 6 needs 8 loads for 12 dot products; 1 x 8 needs 9 for 8 and is bound by them.
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.cpu import INTEGER_TILE
from localllm.kernels.cpu.signature import device
from localllm.kernels.machine import this_lane
from localllm.kernels.simd import (
    F32,
    I32,
    I64,
    as_tuple,
    elements,
    f32x16,
    i32x16,
    load_value,
    multiply_add,
    operation,
    splat_value,
    store_value,
    transpose_f32,
)

VECTORS, TOKENS = INTEGER_TILE
ROWS = 16 * VECTORS
int64 = types.int64
ints, floats = types.UniTuple(i32x16, VECTORS * TOKENS), types.UniTuple(f32x16, VECTORS * TOKENS)
GROUP_WORDS = [64 * q + 4 * word for q in range(4) for word in (0, 1)]  # a run's words in 256 striped columns
CHUNK_WORDS = [16 * q + 4 * word for q in range(4) for word in (0, 1)]  # in 64
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


@operation(floats, floats)
def settled(builder, totals):
    """The same, computed here: LLVM delays it, and has more to keep than registers then (52 spills, not 28)."""
    if not this_lane().has_512_bits:
        return totals
    kind = ir.FunctionType(f32x16.llvm, [f32x16.llvm])
    here = [builder.asm(kind, "", "=v,0", [value], side_effect=True) for value in elements(builder, totals)]
    return as_tuple(builder, here)


@operation(ints, int64, int64)
def start(builder, excess, stride):
    """Sums that begin with the integers of the tokens at `excess`."""
    values = loads(builder, excess, stride, TOKENS, I32)
    values = [splat_value(builder, i32x16.llvm, value) for value in values]
    return as_tuple(builder, [values[t] for t, _ in PLACES])


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


def make_times_columns(first):
    """An intrinsic (totals, sums, c, stride): totals (not if it is the first) + sums * (scales of the tokens at c)."""

    @operation(floats, floats, ints, int64, int64)
    def times_columns(builder, totals, sums, c, c_stride):
        columns = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, c, c_stride, TOKENS, F32)]
        totals, sums = elements(builder, totals), elements(builder, sums)
        for i, (t, _) in enumerate(PLACES):
            value = builder.sitofp(sums[i], f32x16.llvm)
            totals[i] = (
                builder.fmul(value, columns[t]) if first else multiply_add(builder, value, columns[t], totals[i])
            )
        return as_tuple(builder, totals)

    return times_columns


@operation(floats, floats, floats, int64, int64)
def times_rows(builder, totals, products, s, s_stride):
    """totals + products * (scales of the rows at s)."""
    rows = loads(builder, s, s_stride, VECTORS, f32x16.llvm)
    totals, products = elements(builder, totals), elements(builder, products)
    totals = [multiply_add(builder, products[i], rows[v], totals[i]) for i, (_, v) in enumerate(PLACES)]
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


def make_load_tile(vectors):
    """An intrinsic (y, bytes between tokens of y) that loads the first `vectors` vectors of each token, else zeros."""

    @operation(floats, int64, int64)
    def load_tile(builder, y, y_stride):
        rows, zero = addresses(builder, y, y_stride, TOKENS), ir.Constant(f32x16.llvm, None)
        places = [builder.add(rows[t], I64(64 * v)) if v < vectors else None for t, v in PLACES]
        return as_tuple(builder, [zero if p is None else load_value(builder, p, f32x16.llvm) for p in places])

    return load_tile


def make_store_tile(vectors):
    """An intrinsic (totals, y, bytes between tokens of y) that stores the first `vectors` vectors of each token."""

    @operation(None, floats, int64, int64)
    def store_tile(builder, totals, y, y_stride):
        rows = addresses(builder, y, y_stride, TOKENS)
        for value, (t, v) in zip(elements(builder, totals), PLACES, strict=True):
            if v < vectors:
                store_value(builder, builder.add(rows[t], I64(64 * v)), value)

    return store_tile


@device
def transpose_words(source, columns, target):
    """[16][columns] words of 4 bytes to [columns rounded up to 16][16]; rows are `columns` rounded up to 16 apart."""
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)
