"""Register tiles of float32 products: tuples of vectors that LLVM keeps in registers.

The tuple's element row * columns + column belongs to that row and column. Every product is built of one step, `outer`:
tile[row, column] += x[row] * w[column], where x and w are tuples of vectors. If w's lanes run along the result's
columns, a vector of x is one value in all lanes. If the lanes of both run along the dimension that is summed, the lanes
of the tile are added up in the end.
"""

from llvmlite import ir
from numba import int64, types

from localllm.kernels import simd
from localllm.kernels.cpu import FLOAT_TILE

# The largest tile that fits in the registers. With 32 registers of 64 bytes, 12 x 2 needs 14 loads for 24
# multiplications and runs at the speed of these; 8 x 1 needs 9 for 8 and is bound by loads.
COLUMNS, ROWS = FLOAT_TILE


def get_tuple_type(count):
    return types.UniTuple(simd.f32x16, count)


def make_zeros(count):
    return simd.operation(get_tuple_type(count))(
        lambda builder: simd.as_tuple(builder, [ir.Constant(simd.f32x16.llvm, None)] * count)
    )


def make_outer(rows, columns):
    """Return an intrinsic (tile, x, w) -> tile + the products of every x and every w."""

    @simd.operation(
        get_tuple_type(rows * columns), get_tuple_type(rows * columns), get_tuple_type(rows), get_tuple_type(columns)
    )
    def outer(builder, tile, x, w):
        tile, w = simd.elements(builder, tile), simd.elements(builder, w)
        for r, value in enumerate(simd.elements(builder, x)):
            for c in range(columns):
                i = r * columns + c
                tile[i] = simd.multiply_add(builder, value, w[c], tile[i])
        return simd.as_tuple(builder, tile)

    return outer


def make_add(count):
    """Return an intrinsic (tile, tile) -> their sum."""

    @simd.operation(get_tuple_type(count), get_tuple_type(count), get_tuple_type(count))
    def add(builder, tile, other):
        pairs = zip(simd.elements(builder, tile), simd.elements(builder, other), strict=True)
        return simd.as_tuple(builder, [builder.fadd(x, y) for x, y in pairs])

    return add


def make_splats(count, stride):
    """Return an intrinsic (address) -> the floats at address, address + stride, ..., each in all lanes."""

    @simd.operation(get_tuple_type(count), int64)
    def splats(builder, address):
        values = [simd.load_value(builder, builder.add(address, simd.I64(i * stride)), simd.F32) for i in range(count)]
        return simd.as_tuple(builder, [simd.splat_value(builder, simd.f32x16.llvm, value) for value in values])

    return splats


def compute_addresses(builder, address, rows, row_stride, columns, column_stride):
    starts = [builder.add(address, builder.mul(row_stride, simd.I64(r))) for r in range(rows)]
    return [builder.add(start, builder.mul(column_stride, simd.I64(c))) for start in starts for c in range(columns)]


def make_load(rows, columns):
    """Return an intrinsic (address, bytes between rows, bytes between columns) -> tile."""

    @simd.operation(get_tuple_type(rows * columns), int64, int64, int64)
    def load(builder, address, row_stride, column_stride):
        addresses = compute_addresses(builder, address, rows, row_stride, columns, column_stride)
        return simd.as_tuple(builder, [simd.load_value(builder, place, simd.f32x16.llvm) for place in addresses])

    return load


def make_store(rows, columns):
    """Return an intrinsic (tile, address, bytes between rows, bytes between columns) that stores a tile."""

    @simd.operation(None, get_tuple_type(rows * columns), int64, int64, int64)
    def store(builder, tile, address, row_stride, column_stride):
        addresses = compute_addresses(builder, address, rows, row_stride, columns, column_stride)
        for place, value in zip(addresses, simd.elements(builder, tile), strict=True):
            simd.store_value(builder, place, value)

    return store


PAIRS = [lane + i for lane in (0, 4, 8, 12) for i in (0, 2, 16, 18)]  # every second lane of two vectors
FOURS = [lane + i for lane in (0, 8, 16, 24) for i in range(4)]  # every second group of four lanes of two vectors


def add_neighbours(builder, values, order, distance):
    """Combine each two vectors to one: lane i is the sum of lane order[i] and the lane `distance` further."""
    first, second = (ir.Constant(ir.VectorType(simd.I32, 16), [lane + i for lane in order]) for i in (0, distance))
    pairs = [(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return [builder.fadd(builder.shuffle_vector(x, y, first), builder.shuffle_vector(x, y, second)) for x, y in pairs]


def make_join(count):
    """Return an intrinsic that joins four tuples of `count` vectors."""

    @simd.operation(get_tuple_type(4 * count), *[get_tuple_type(count)] * 4)
    def join(builder, *tuples):
        return simd.as_tuple(builder, [value for each in tuples for value in simd.elements(builder, each)])

    return join


def make_store_sums_by_four(rows):
    """Return an intrinsic that stores the sums of the lanes of 4 * `rows` vectors: float32 [rows][4].

    The vectors are in columns, one after the other; rows: even. Neighbouring lanes are added in four rounds; most
    shuffles stay within 128 bits.
    """

    @simd.operation(None, get_tuple_type(4 * rows), int64, int64)
    def store_sums(builder, tile, address, row_stride):
        tile = simd.elements(builder, tile)
        for first in range(0, rows, 4):
            some = range(first, min(first + 4, rows))
            values = [tile[column * rows + row] for row in some for column in range(4)]
            for order, distance in ((PAIRS, 1), (PAIRS, 1), (FOURS, 4), (FOURS, 4)):
                values = add_neighbours(builder, values if len(values) > 1 else values * 2, order, distance)
            for i, row in enumerate(some):
                four = simd.shuffle_lanes(builder, values[0], values[0], range(4 * i, 4 * i + 4))
                simd.store_value(builder, builder.add(address, builder.mul(row_stride, simd.I64(row))), four)

    return store_sums


class BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"


def make_outer_bf16(rows, columns):
    """Return the intrinsic of make_outer for vectors of pairs of BF16. Every lane adds two products."""

    @simd.operation(
        get_tuple_type(rows * columns), get_tuple_type(rows * columns), get_tuple_type(rows), get_tuple_type(columns)
    )
    def outer(builder, tile, x, w):
        pairs = ir.VectorType(BFloat(), 32)
        tile = simd.elements(builder, tile)
        x, w = ([builder.bitcast(value, pairs) for value in simd.elements(builder, values)] for values in (x, w))
        for r, value in enumerate(x):
            for c in range(columns):
                i = r * columns + c
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                tile[i] = simd.llvm_call(builder, name, simd.f32x16.llvm, [tile[i], value, w[c]])
        return simd.as_tuple(builder, tile)

    return outer


def make_splats_apart(count):
    """Return an intrinsic (address, stride) -> `count` vectors.

    It is make_splats with a stride that is known at run time.
    """

    @simd.operation(get_tuple_type(count), int64, int64)
    def splats(builder, address, stride):
        numbers = [builder.add(address, builder.mul(stride, simd.I64(i))) for i in range(count)]
        return simd.as_tuple(
            builder,
            [simd.splat_value(builder, simd.f32x16.llvm, simd.load_value(builder, n, simd.F32)) for n in numbers],
        )

    return splats


def make_load_some(rows, columns, loaded):
    """Return the intrinsic of make_load for the first `loaded` columns of a tile; the others are zero."""

    @simd.operation(get_tuple_type(rows * columns), int64, int64, int64)
    def load(builder, address, row_stride, column_stride):
        zero = ir.Constant(simd.f32x16.llvm, None)
        addresses = compute_addresses(builder, address, rows, row_stride, columns, column_stride)
        tile = [
            simd.load_value(builder, a, simd.f32x16.llvm) if i % columns < loaded else zero
            for i, a in enumerate(addresses)
        ]
        return simd.as_tuple(builder, tile)

    return load


def make_store_some(rows, columns, stored):
    """Return the intrinsic of make_store for the first `stored` columns of a tile."""

    @simd.operation(None, get_tuple_type(rows * columns), int64, int64, int64)
    def store(builder, tile, address, row_stride, column_stride):
        addresses = compute_addresses(builder, address, rows, row_stride, columns, column_stride)
        for i, (place, value) in enumerate(zip(addresses, simd.elements(builder, tile), strict=True)):
            if i % columns < stored:
                simd.store_value(builder, place, value)

    return store


def make_store_sums(count):
    """Return an intrinsic (x, y, address, stride) that stores sums of lanes.

    For each i, it stores the sum of the lanes of x[i] and y[i].
    """

    @simd.operation(None, get_tuple_type(count), get_tuple_type(count), int64, int64)
    def store(builder, x, y, address, stride):
        for i, (u, v) in enumerate(zip(simd.elements(builder, x), simd.elements(builder, y), strict=True)):
            place = builder.add(address, builder.mul(stride, simd.I64(i)))
            simd.store_value(builder, place, simd.reduce_add(builder, builder.fadd(u, v)))

    return store
