"""Register tiles of the integer products: VECTORS vectors of 16 rows times TOKENS tokens, unrolled.

The sums of a tile are one tuple of vectors, which LLVM keeps in registers: element t * VECTORS + v is for token t and
rows 16 v to 16 v + 15. With 32 registers, 2 x 6 needs 8 loads for 12 dot products; 1 x 8 needs 9 for 8 and is bound by
them.
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
GROUP_WORDS = [64 * q + 4 * word for q in range(4) for word in (0, 1)]  # offsets of a run's words in a striped group
CHUNK_WORDS = [16 * q + 4 * word for q in range(4) for word in (0, 1)]  # in a striped chunk
PLACES = [(t, v) for t in range(TOKENS) for v in range(VECTORS)]


def addresses(builder, first, stride, count):
    """Return `count` addresses: first, first + stride, ..."""
    return [builder.add(first, builder.mul(stride, I64(i))) for i in range(count)]


def loads(builder, first, stride, count, llvm_type):
    """Load `count` values at first, first + stride, ..."""
    return [load_value(builder, address, llvm_type) for address in addresses(builder, first, stride, count)]


@operation(ints)
def zero_ints(builder):
    return as_tuple(builder, [ir.Constant(i32x16.llvm, None)] * len(PLACES))


@operation(floats)
def zero_floats(builder):
    return as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * len(PLACES))


@operation(ints, ints)
def times_256(builder, sums):
    """Multiply sums of the high plane by 256, to units of the low plane."""
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
    ordered = builder.asm(kind, "", ",".join(constraints), values, side_effect=True)
    return [builder.extract_value(ordered, i) for i in range(len(values))]


@operation(floats, floats)
def settled(builder, totals):
    """Return the same totals, computed at this point of the code.

    Otherwise LLVM delays the computation, and has more values than registers (52 spills, not 28).
    """
    return as_tuple(builder, in_turn(builder, elements(builder, totals)))


def started(builder, values):
    """Return initial sums of a tile: in each lane the integer of the token."""
    values = [splat_value(builder, i32x16.llvm, value) for value in values]
    return as_tuple(builder, [values[t] for t, _ in PLACES])


@operation(ints, int64, int64)
def start(builder, excess, stride):
    """Return initial sums of a tile: in each lane the token's integer at `excess`; stride: bytes between tokens."""
    return started(builder, loads(builder, excess, stride, TOKENS, I32))


@operation(ints, int64, int64)
def start_of_both(builder, excess, stride):
    """Return initial sums of a tile: in each lane the sum of the token's two integers at `excess`."""
    pairs = zip(*(loads(builder, builder.add(excess, I64(at)), stride, TOKENS, I32) for at in (0, 4)), strict=True)
    return started(builder, [builder.add(*pair) for pair in pairs])


@operation(types.boolean, int64, int64)
def share_scales(builder, c, stride):
    """Return whether each token has the same scale for two consecutive runs.

    c: address of the first token's scales, each stored twice; stride: bytes between tokens.
    """
    different = I64(0)
    for both in loads(builder, builder.add(c, I64(4)), stride, TOKENS, I64):
        swapped = builder.or_(builder.shl(both, I64(32)), builder.lshr(both, I64(32)))
        different = builder.or_(different, builder.xor(both, swapped))
    return builder.icmp_signed("==", different, I64(0))


def have_one_scale(builder, c, stride):
    """Return, in all lanes of each vector of a tile, whether its token has the same scale for two consecutive runs."""
    pairs = zip(*(loads(builder, builder.add(c, I64(at)), stride, TOKENS, I32) for at in (0, 8)), strict=True)
    splats = ([splat_value(builder, i32x16.llvm, scale) for scale in pair] for pair in pairs)
    equal = [builder.icmp_signed("==", *pair) for pair in splats]
    return [equal[t] for t, _ in PLACES]


def make_start_second(has_excess):
    """Return an intrinsic (sums, excess, stride, c, c_stride) -> initial sums of the second of two runs.

    sums: of the first run, with which tokens go on that have one scale for both runs. excess, stride: as in `start`, of
    the second run, if has_excess; c, c_stride: as in share_scales.
    """

    @operation(ints, ints, int64, int64, int64, int64)
    def start_second(builder, sums, excess, stride, c, c_stride):
        zero, are_one = ir.Constant(i32x16.llvm, None), have_one_scale(builder, c, c_stride)
        started_sums = [builder.select(*both, zero) for both in zip(are_one, elements(builder, sums), strict=True)]
        if has_excess:
            values = [splat_value(builder, i32x16.llvm, v) for v in loads(builder, excess, stride, TOKENS, I32)]
            started_sums = [builder.add(v, values[t]) for v, (t, _) in zip(started_sums, PLACES, strict=True)]
        return as_tuple(builder, started_sums)

    return start_second


@operation(floats, floats, ints, int64, int64, int64, int64)
def scaled_alone(builder, totals, sums, s, s_stride, c, c_stride):
    """Return `scaled` for tokens with two scales, and the totals of the others; see share_scales."""
    rows = rows_at(builder, s, s_stride)
    products = zip(elements(builder, sums), rows, strict=True)
    products = [builder.fmul(builder.sitofp(value, f32x16.llvm), row) for value, row in products]
    return as_tuple(builder, added_alone(builder, elements(builder, totals), products, c, c_stride))


@operation(floats, floats, floats, int64, int64)
def add_alone(builder, totals, products, c, c_stride):
    """Return totals + products * scales for tokens with two scales, and the totals of the others."""
    return as_tuple(builder, added_alone(builder, elements(builder, totals), elements(builder, products), c, c_stride))


def added_alone(builder, totals, products, c, c_stride):
    """Emit `add_alone` for lists of vectors."""
    columns, are_one = columns_at(builder, c, c_stride), have_one_scale(builder, c, c_stride)
    sums = [multiply_add(builder, *each) for each in zip(products, columns, totals, strict=True)]
    return [builder.select(*each) for each in zip(are_one, totals, sums, strict=True)]


@operation(floats, floats, ints, int64, int64, int64, int64)
def continued(builder, products, sums, s, s_stride, c, c_stride):
    """Return products + sums * (scales of the rows at s); for tokens with two scales without the products."""
    rows, zero = rows_at(builder, s, s_stride), ir.Constant(f32x16.llvm, None)
    are_one = have_one_scale(builder, c, c_stride)
    begun = [builder.select(*both, zero) for both in zip(are_one, elements(builder, products), strict=True)]
    values = [builder.sitofp(value, f32x16.llvm) for value in elements(builder, sums)]
    return as_tuple(builder, [multiply_add(builder, *each) for each in zip(values, rows, begun, strict=True)])


@operation(floats, floats, ints, int64, int64, int64, int64)
def scaled(builder, totals, sums, s, s_stride, c, c_stride):
    """Return totals + sums * (scales of the rows at s) * (scales of the tokens at c)."""
    rows, columns = rows_at(builder, s, s_stride), columns_at(builder, c, c_stride)
    totals, sums = elements(builder, totals), elements(builder, sums)
    for i, value in enumerate(sums):
        product = builder.fmul(builder.sitofp(value, f32x16.llvm), rows[i])
        totals[i] = multiply_add(builder, product, columns[i], totals[i])
    return as_tuple(builder, totals)


def rows_at(builder, s, stride):
    """Load the scales of rows, as one vector for each vector of a tile.

    s: their address, stride: bytes between vectors.
    """
    scales = loads(builder, s, stride, VECTORS, f32x16.llvm)
    return [scales[v] for _, v in PLACES]


def columns_at(builder, c, stride):
    """Load the scales of tokens, as one vector for each vector of a tile.

    c: their address, stride: bytes between tokens.
    """
    scales = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, c, stride, TOKENS, F32)]
    return [scales[t] for t, _ in PLACES]


def make_times(scales_at, kind, first=False):
    """Return an intrinsic (totals, values, address, stride) -> totals + values * scales, or values * scales if `first`.

    scales_at: rows_at or columns_at, which loads the scales; kind: the type of the values, `ints` or `floats`.
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
    """Return totals + factor * (minimums of the rows at m) * (sums of the tokens at x_sums)."""
    factor = splat_value(builder, f32x16.llvm, factor)
    lows = [builder.fmul(value, factor) for value in loads(builder, m, m_stride, VECTORS, f32x16.llvm)]
    sums = [splat_value(builder, f32x16.llvm, value) for value in loads(builder, x_sums, sums_stride, TOKENS, F32)]
    totals = elements(builder, totals)
    for i, (t, v) in enumerate(PLACES):
        totals[i] = multiply_add(builder, lows[v], sums[t], totals[i])
    return as_tuple(builder, totals)


def make_load_tile(vectors):
    """Return an intrinsic (y, bytes between tokens) that loads totals.

    vectors: how many vectors of rows to load; the others are zero.
    """

    @operation(floats, int64, int64)
    def load_tile(builder, y, y_stride):
        rows, zero = addresses(builder, y, y_stride, TOKENS), ir.Constant(f32x16.llvm, None)
        places = [builder.add(rows[t], I64(64 * v)) if v < vectors else None for t, v in PLACES]
        return as_tuple(builder, [zero if p is None else load_value(builder, p, f32x16.llvm) for p in places])

    return load_tile


def make_store_tile(vectors):
    """Return an intrinsic (totals, y, bytes between tokens) that stores the first `vectors` vectors of rows."""

    @operation(None, floats, int64, int64)
    def store_tile(builder, totals, y, y_stride):
        rows = addresses(builder, y, y_stride, TOKENS)
        for value, (t, v) in zip(elements(builder, totals), PLACES, strict=True):
            if v < vectors:
                store_value(builder, builder.add(rows[t], I64(64 * v)), value)

    return store_tile


@device
def transpose_words(source, columns, target):
    """Transpose 4-byte words: [16 rows][columns] to [columns, rounded up to 16][16 rows].

    The source rows are `columns`, rounded up to 16, words apart.
    """
    stride = (columns + 15) // 16 * 64
    for i in range((columns + 15) // 16):
        transpose_f32(source + i * 64, stride, target + i * 1024)
