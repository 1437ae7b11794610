"""Register tiles of float32 products: tuples of vectors, element row * columns + column, which LLVM keeps in registers.

Every product is built of one step, `outer`: tile[row, column] += x[row] * w[column], where x and w are tuples of
vectors. A vector of x is one number in all its lanes if w runs along the columns of the result; if both run along what
is summed up, the lanes of the tile are added up in the end.
"""

from llvmlite import ir
from numba import types

from localllm.kernels.simd import (
    F32,
    I32,
    I64,
    as_tuple,
    elements,
    f32x16,
    load_value,
    multiply_add,
    operation,
    splat_value,
    store_value,
)
from localllm.kernels.target import cpu_features

# The largest tile that fits the registers. With 32 of 64 bytes, 12 x 2 needs 14 loads for 24 multiplications and runs
# at the speed of these; 8 x 1 needs 9 for 8 and is bound by loads.
ROWS, COLUMNS = (12, 2) if "avx512f" in cpu_features() else (4, 1)
int64 = types.int64


def vectors(count):
    """The type of a tuple of vectors."""
    return types.UniTuple(f32x16, count)


def make_zeros(count):
    """An intrinsic () -> `count` vectors of zeros."""
    return operation(vectors(count))(lambda builder: as_tuple(builder, [ir.Constant(f32x16.llvm, None)] * count))


def make_outer(rows, columns):
    """An intrinsic (tile, x, w) -> tile + the products of every x with every w."""

    @operation(vectors(rows * columns), vectors(rows * columns), vectors(rows), vectors(columns))
    def outer(builder, tile, x, w):
        tile, w = elements(builder, tile), elements(builder, w)
        for r, value in enumerate(elements(builder, x)):
            for c in range(columns):
                i = r * columns + c
                tile[i] = multiply_add(builder, value, w[c], tile[i])
        return as_tuple(builder, tile)

    return outer


def make_splats(count, stride):
    """An intrinsic address -> vectors, each full of one of the numbers at address, address + stride, ..."""

    @operation(vectors(count), int64)
    def splats(builder, address):
        values = [load_value(builder, builder.add(address, I64(i * stride)), F32) for i in range(count)]
        return as_tuple(builder, [splat_value(builder, f32x16.llvm, value) for value in values])

    return splats


def places(builder, address, rows, row_stride, columns, column_stride):
    """The addresses of a tile's vectors."""
    starts = [builder.add(address, builder.mul(row_stride, I64(r))) for r in range(rows)]
    return [builder.add(start, builder.mul(column_stride, I64(c))) for start in starts for c in range(columns)]


def make_load(rows, columns):
    """An intrinsic (address, bytes between rows, bytes between columns) -> tile."""

    @operation(vectors(rows * columns), int64, int64, int64)
    def load(builder, address, row_stride, column_stride):
        addresses = places(builder, address, rows, row_stride, columns, column_stride)
        return as_tuple(builder, [load_value(builder, place, f32x16.llvm) for place in addresses])

    return load


def make_store(rows, columns):
    """An intrinsic (tile, address, bytes between rows, bytes between columns)."""

    @operation(None, vectors(rows * columns), int64, int64, int64)
    def store(builder, tile, address, row_stride, column_stride):
        addresses = places(builder, address, rows, row_stride, columns, column_stride)
        for place, value in zip(addresses, elements(builder, tile), strict=True):
            store_value(builder, place, value)

    return store


PAIRS = [lane + i for lane in (0, 4, 8, 12) for i in (0, 2, 16, 18)]  # every second lane of two vectors, by fours
FOURS = [lane + i for lane in (0, 8, 16, 24) for i in range(4)]  # every second group of four lanes of two vectors


def add_neighbours(builder, values, order, distance):
    """Two vectors become one, whose lanes are sums of two lanes: those at `order` and at `distance` from there."""
    first, second = (ir.Constant(ir.VectorType(I32, 16), [lane + i for lane in order]) for i in (0, distance))
    pairs = [(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return [builder.fadd(builder.shuffle_vector(x, y, first), builder.shuffle_vector(x, y, second)) for x, y in pairs]


@operation(None, *[vectors(4)] * 4, int64, int64)
def store_sums_4x4(builder, x0, x1, x2, x3, address, row_stride):
    """Add up the lanes of every vector; store float32 [4][4], one column from each tuple.

    Four rounds of adding neighbours; most shuffles stay within 128 bits.
    """
    values = [value for row in zip(*(elements(builder, x) for x in (x0, x1, x2, x3)), strict=True) for value in row]
    for order, distance in ((PAIRS, 1), (PAIRS, 1), (FOURS, 4), (FOURS, 4)):
        values = add_neighbours(builder, values, order, distance)
    for r in range(4):
        row = ir.Constant(ir.VectorType(I32, 4), [*range(4 * r, 4 * r + 4)])
        place = builder.add(address, builder.mul(row_stride, I64(r)))
        store_value(builder, place, builder.shuffle_vector(values[0], values[0], row))
