from llvmlite import ir
from numba import types

from localllm.kernels.cpu.tiles_f32 import places, vectors
from localllm.kernels.simd import (
    F32,
    I64,
    as_tuple,
    elements,
    f32x16,
    llvm_call,
    load_value,
    operation,
    reduce_add,
    splat_value,
    store_value,
)

int64 = types.int64


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


def make_outer_bf16(rows, columns):
    """As make_outer, for vectors that hold pairs of BF16: every lane adds two products."""

    @operation(vectors(rows * columns), vectors(rows * columns), vectors(rows), vectors(columns))
    def outer(builder, tile, x, w):
        pairs = ir.VectorType(BFloat(), 32)
        tile = elements(builder, tile)
        x, w = ([builder.bitcast(value, pairs) for value in elements(builder, values)] for values in (x, w))
        for r, value in enumerate(x):
            for c in range(columns):
                i = r * columns + c
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                tile[i] = llvm_call(builder, name, f32x16.llvm, [tile[i], value, w[c]])
        return as_tuple(builder, tile)

    return outer


def make_splats_apart(count):
    """An intrinsic (address, stride) -> vectors, each full of one of the numbers at address, address + stride, ..."""

    @operation(vectors(count), int64, int64)
    def splats(builder, address, stride):
        numbers = [builder.add(address, builder.mul(stride, I64(i))) for i in range(count)]
        return as_tuple(builder, [splat_value(builder, f32x16.llvm, load_value(builder, n, F32)) for n in numbers])

    return splats


def make_store_some(rows, columns, stored):
    """As make_store, for the first `stored` of the columns."""

    @operation(None, vectors(rows * columns), int64, int64, int64)
    def store(builder, tile, address, row_stride, column_stride):
        addresses = places(builder, address, rows, row_stride, columns, column_stride)
        for i, (place, value) in enumerate(zip(addresses, elements(builder, tile), strict=True)):
            if i % columns < stored:
                store_value(builder, place, value)

    return store


def make_store_sums(count):
    """An intrinsic (vectors, vectors, address, stride) that stores the sum of all lanes of the first two, and so on."""

    @operation(None, vectors(count), vectors(count), int64, int64)
    def store(builder, x, y, address, stride):
        for i, (u, v) in enumerate(zip(elements(builder, x), elements(builder, y), strict=True)):
            place = builder.add(address, builder.mul(stride, I64(i)))
            store_value(builder, place, reduce_add(builder, builder.fadd(u, v)))

    return store
