"""Loads, stores and prefetches at int64 addresses of any alignment. Nothing is checked."""

from llvmlite import ir
from numba import types

from localllm.kernels.simd.half import narrow_bf16, narrow_half, widen_bf16, widen_half
from localllm.kernels.simd.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    f32x2,
    f32x8,
    f32x16,
    i32x16,
    llvm_call,
    operation,
    splat_value,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
)


def load_value(builder, address, llvm_type):
    """Emit a load of an LLVM type from an address."""
    value = builder.load(builder.inttoptr(address, llvm_type.as_pointer()), typ=llvm_type)
    value.align = 1
    return value


def make_load(result, llvm_type, convert=lambda builder, value: value):
    """Return an intrinsic (address) -> `result` that loads an LLVM type and converts it by the emitter `convert`."""
    return operation(result, types.int64)(
        lambda builder, address: convert(builder, load_value(builder, address, llvm_type))
    )


def store_value(builder, address, value):
    """Emit a store of a value to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def make_store(vector):
    """Return an intrinsic (address, value) that stores a value of the given type."""
    return operation(None, types.int64, vector)(store_value)


load_u8 = make_load(types.int64, I8, lambda builder, value: builder.zext(value, I64))
load_i8 = make_load(types.int64, I8, lambda builder, value: builder.sext(value, I64))
load_u16 = make_load(types.int64, I16, lambda builder, value: builder.zext(value, I64))
load_u32 = make_load(types.int64, I32, lambda builder, value: builder.zext(value, I64))
load_i32 = make_load(types.int64, I32, lambda builder, value: builder.sext(value, I64))
load_i64 = make_load(types.int64, I64)
load_f16, load_bf16 = make_load(types.float32, I16, widen_half), make_load(types.float32, I16, widen_bf16)
load_f32 = make_load(types.float32, F32)
load_f64 = make_load(types.float64, ir.DoubleType())
load_u8x8, load_u8x16 = make_load(u8x8, u8x8.llvm), make_load(u8x16, u8x16.llvm)
load_u8x32, load_u8x64 = make_load(u8x32, u8x32.llvm), make_load(u8x64, u8x64.llvm)
load_f32x8, load_f32x16 = make_load(f32x8, f32x8.llvm), make_load(f32x16, f32x16.llvm)
load_f16x16 = make_load(f32x16, ir.VectorType(I16, 16), widen_half)
load_bf16x16 = make_load(f32x16, ir.VectorType(I16, 16), widen_bf16)


def splat_f16(lanes):
    """Return an emitter (builder, bits) that converts a float16 to float32 in every lane of a vector.

    It is spread over the lanes first: converting a scalar depends on the other lanes of a register, and waits for them.
    Rows of Q4_K took three times as long.
    """

    def emit(builder, value):
        return widen_half(builder, splat_value(builder, ir.VectorType(I16, lanes), value))

    return emit


load_splat_f16x8, load_splat_f16x16 = make_load(f32x8, I16, splat_f16(8)), make_load(f32x16, I16, splat_f16(16))
load_splat_4 = make_load(
    u8x64, I32, lambda builder, value: builder.bitcast(splat_value(builder, i32x16.llvm, value), u8x64.llvm)
)
store_f32, store_f32x16 = make_store(types.float32), make_store(f32x16)
store_f32x2, store_f32x8 = make_store(f32x2), make_store(f32x8)
load_splat_8 = make_load(
    u8x64, I64, lambda builder, value: builder.bitcast(splat_value(builder, ir.VectorType(I64, 8), value), u8x64.llvm)
)
store_u8x64, store_u8x16 = make_store(u8x64), make_store(u8x16)
store_u8x8 = make_store(u8x8)
store_i32x16 = make_store(i32x16)
store_i32 = operation(None, types.int64, types.int64)(
    lambda builder, address, value: store_value(builder, address, builder.trunc(value, I32))
)
store_i64 = make_store(types.int64)


def first_lanes(builder, count):
    """Return a mask of the first `count` of 16 lanes."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    return builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))


@operation(f32x16, types.int64, types.int64)
def load_lanes_f32x16(builder, address, count):
    """Load `count` floats, followed by zeros. No memory after them is read."""
    pointer, zeros = builder.inttoptr(address, f32x16.llvm.as_pointer()), ir.Constant(f32x16.llvm, None)
    arguments = [pointer, I32(1), first_lanes(builder, count), zeros]
    return llvm_call(builder, "llvm.masked.load.v16f32.p0", f32x16.llvm, arguments)


@operation(None, types.int64, f32x16, types.int64)
def store_lanes_f32x16(builder, address, value, count):
    """Store the first `count` lanes. No memory after them is written."""
    pointer = builder.inttoptr(address, f32x16.llvm.as_pointer())
    arguments = [value, pointer, I32(1), first_lanes(builder, count)]
    llvm_call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


def make_narrow_store(vector, narrow):
    """Return an intrinsic (address, value) that converts to 16 bits by the emitter `narrow`, and stores."""
    return operation(None, types.int64, vector)(
        lambda builder, address, value: store_value(builder, address, narrow(builder, value))
    )


store_f16, store_f16x16 = make_narrow_store(types.float32, narrow_half), make_narrow_store(f32x16, narrow_half)
store_bf16x16 = make_narrow_store(f32x16, narrow_bf16)
store_words_i32x16 = make_narrow_store(
    i32x16, lambda builder, value: builder.trunc(value, ir.VectorType(I16, value.type.count))
)


def prefetch_line(builder, address, locality=3):
    """Prefetch the cache line at an address, which may be invalid.

    locality: 3 for all caches, 2 for the L2 cache and slower ones.
    """
    pointer = builder.inttoptr(address, I8.as_pointer())
    llvm_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(locality), I32(1)])


prefetch = operation(None, types.int64)(prefetch_line)
prefetch_l2 = operation(None, types.int64)(lambda builder, address: prefetch_line(builder, address, 2))
