"""Register tiles of the integer matrix product.

A few vectors of 16 rows each, times a few tokens, unrolled.

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
    """Return first, first + stride, ..."""
    return [builder.add(first, builder.mul(stride, I64(i))) for i in range(count)]


def loads(builder, first, stride, count, llvm_type):
    """Load the values at these addresses."""
    return [load_value(builder, address, llvm_type) for address in addresses(builder, first, stride, count)]


@operation(ints)
def zero_ints(builder):
    return as_tuple(builder, [ir.Constant(i32x16.llvm, None)] * len(PLACES))


@operation(floats)
def zero_floats(builder):
    return as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * len(PLACES))


@operation(ints, ints)
def times_256(builder, sums):
    """Compute the sum of the high plane in units of the low one."""
    eight = ir.Constant(i32x16.llvm, [8] * 16)
    return as_tuple(builder, [builder.shl(value, eight) for value in elements(builder, sums)])


def in_turn(builder, values):
    """Return the same values, computed before any later load.

    Otherwise LLVM mixes the work of different words, and has more values than registers: tiles of IQ4_XS took 1.05
    times as long.
    """
    if not this_lane().has_512_bits:
        return values
    kinds = [value.type for value in values]
    constraints = ["=v"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    here = builder.asm(kind, "", ",".join(constraints), values, side_effect=True)
    return [builder.extract_value(here, i) for i in range(len(values))]


@operation(floats, floats)
def settled(builder, totals):
    """Return the same value, computed at this point of the code.

    Otherwise LLVM delays it, and has more values than registers (52 spills, not 28).
    """
    return as_tuple(builder, in_turn(builder, elements(builder, totals)))


def started(builder, values):
    """Return accumulators, initialized with one integer per token."""
    values = [splat_value(builder, i32x16.llvm, value) for value in values]
    return as_tuple(builder, [values[t] for t, _ in PLACES])


@operation(ints, int64, int64)
def start(builder, excess, stride):
    """Return sums that begin with the integers of the tokens at `excess`."""
    return started(builder, loads(builder, excess, stride, TOKENS, I32))


@operation(ints, int64, int64)
def start_of_both(builder, excess, stride):
    """Return initial sums: the sum of the tokens' two integers."""
    pairs = zip(*(loads(builder, builder.add(excess, I64(at)), stride, TOKENS, I32) for at in (0, 4)), strict=True)
    return started(builder, [builder.add(*pair) for pair in pairs])


@operation(types.boolean, int64, int64, int64)
def share_scales(builder, c, stride, tokens):
    """Return whether there are TOKENS tokens, and each has one scale for the two runs at c.

    Each scale is stored twice there.
    """
    different = I64(0)
    for both in loads(builder, builder.add(c, I64(4)), stride, TOKENS, I64):
        turned = builder.or_(builder.shl(both, I64(32)), builder.lshr(both, I64(32)))
        different = builder.or_(different, builder.xor(both, turned))
    are_there = builder.icmp_signed(">=", tokens, I64(TOKENS))
    return builder.and_(are_there, builder.icmp_signed("==", different, I64(0)))


@operation(floats, floats, ints, int64, int64, int64, int64)
def scaled(builder, totals, sums, s, s_stride, c, c_stride):
    """Compute totals + sums * (scales of the rows at s) * (scales of the tokens at c)."""
    rows, columns = rows_at(builder, s, s_stride), columns_at(builder, c, c_stride)
    totals, sums = elements(builder, totals), elements(builder, sums)
    for i, value in enumerate(sums):
        product = builder.fmul(builder.sitofp(value, f32x16.llvm), rows[i])
        totals[i] = multiply_add(builder, product, columns[i], totals[i])
    return as_tuple(builder, totals)


def rows_at(builder, s, stride):
    """Return vectors of the scales of rows, one for each vector of a tile's totals; s: address of the first ones."""
    scales = loads(builder, s, stride, VECTORS, f32x16.llvm)
    return [scales[v] for _, v in PLACES]


def columns_at(builder, c, stride):
    """Return vectors of the scales of tokens, one for each vector of a tile's totals; c: address of the first one."""
    scales = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, c, stride, TOKENS, F32)]
    return [scales[t] for t, _ in PLACES]


def make_times(scales_at, kind, first=False):
    """Return an intrinsic (totals, values, address, stride).

    It computes values * scales, plus the totals unless `first`.

    kind: of the values, `ints` or `floats`.
    """

    @operation(floats, floats, kind, int64, int64)
    def times(builder, totals, values, address, stride):
        scales, values = scales_at(builder, address, stride), elements(builder, values)
        if kind is ints:
            values = [builder.sitofp(value, f32x16.llvm) for value in values]
        products = zip(values, scales, elements(builder, totals), strict=True)
        if first:
            return as_tuple(builder, in_turn(builder, [builder.fmul(value, scale) for value, scale, _ in products]))
        return as_tuple(builder, in_turn(builder, [multiply_add(builder, *product) for product in products]))

    return times


@operation(floats, floats, float32, int64, int64, int64, int64)
def add_least(builder, totals, factor, m, m_stride, x_sums, sums_stride):
    """Compute totals + factor * (minimums of the rows at m) * (sums of the tokens at x_sums)."""
    factor = splat_value(builder, f32x16.llvm, factor)
    least = [builder.fmul(value, factor) for value in loads(builder, m, m_stride, VECTORS, f32x16.llvm)]
    sums = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, x_sums, sums_stride, TOKENS, F32)]
    totals = elements(builder, totals)
    for i, (t, v) in enumerate(PLACES):
        totals[i] = multiply_add(builder, least[v], sums[t], totals[i])
    return as_tuple(builder, totals)


def make_load_tile(vectors):
    """Return an intrinsic (y, token stride) that loads the first `vectors` vectors of each token, else zeros."""

    @operation(floats, int64, int64)
    def load_tile(builder, y, y_stride):
        rows, zero = addresses(builder, y, y_stride, TOKENS), ir.Constant(f32x16.llvm, None)
        places = [builder.add(rows[t], I64(64 * v)) if v < vectors else None for t, v in PLACES]
        return as_tuple(builder, [zero if p is None else load_value(builder, p, f32x16.llvm) for p in places])

    return load_tile


def make_store_tile(vectors):
    """Return an intrinsic (totals, y, token stride) that stores the first `vectors` vectors of each token."""

    @operation(None, floats, int64, int64)
    def store_tile(builder, totals, y, y_stride):
        rows = addresses(builder, y, y_stride, TOKENS)
        for value, (t, v) in zip(elements(builder, totals), PLACES, strict=True):
            if v < vectors:
                store_value(builder, builder.add(rows[t], I64(64 * v)), value)

    return store_tile


@device
def transpose_words(source, columns, target):
    """Transpose [16][columns] words of 4 bytes to [columns rounded up to 16][16].

    Rows are `columns` rounded up to 16 apart.
    """
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)
