"""Vector types for Numba, and helpers that emit LLVM instructions on them.

They include 16-bit floats, and memory by address. The 16 bits of a float are passed as integers. Most CPUs have
instructions for float16; on the others LLVM would call functions that do not exist when kernels are loaded, so there
are replacements. Loads, stores and prefetches take int64 addresses of any alignment; nothing is checked.
"""

import math

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from localllm.kernels.machine import get_lane

# Numba links a helper into its caller after LLVM has prepared it for the machine. One of the preparations converts an
# address that is a sum of integers to an offset from either of them, "null + offset" if the caller knows that one to be
# zero, and LLVM deletes loads from there (seen with LLVM 22: Q4_K became an empty function). This option keeps sums.
llvm.set_option("localllm", "-addr-sink-using-gep=false")

if "neon" in get_lane().features:  # LLVM does not report all features of an ARM to Numba
    config.CPU_FEATURES = get_lane().feature_string  # type: ignore[attr-defined]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INFINITY, NAN = types.float32(math.inf), types.float32(math.nan)


class Vector(types.Type):
    """A vector type: `lanes` elements of one LLVM type, kept in a register."""

    def __init__(self, name: str, element: ir.Type, lanes: int):
        self.element, self.lanes, self.llvm = element, lanes, ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


u8x8, u8x16, u8x32, u8x64 = (Vector(f"u8x{lanes}", I8, lanes) for lanes in (8, 16, 32, 64))
i32x16 = Vector("i32x16", I32, 16)
f32x2, f32x8, f32x16 = (Vector(f"f32x{lanes}", F32, lanes) for lanes in (2, 8, 16))


def llvm_call(builder, name, result, arguments):
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def splat_value(builder, vector_type, scalar):
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, vector_type.count), None))


def slice_lanes(builder, value, start, stop, step=1):
    lanes = [*range(start, stop, step)]
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def shuffle_lanes(builder, x, y, order):
    """Return the lanes `order` of two vectors of n lanes: 0 to n - 1 are x's, n to 2 n - 1 are y's."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), [*order]))


# Variants of vector instructions: the CPU feature, the number of slices of 64 bytes, LLVM's name.
MULTIPLY_BYTES = [
    ("avx512bw", 1, "llvm.x86.avx512.pmaddubs.w.512"),
    ("avx2", 2, "llvm.x86.avx2.pmadd.ub.sw"),
    ("ssse3", 4, "llvm.x86.ssse3.pmadd.ub.sw.128"),
]
MULTIPLY_WORDS = [
    ("avx512bw", 1, "llvm.x86.avx512.pmaddw.d.512"),
    ("avx2", 2, "llvm.x86.avx2.pmadd.wd"),
    ("sse2", 4, "llvm.x86.sse2.pmadd.wd"),
]
SIGN_BYTES = [("avx2", 2, "llvm.x86.avx2.psign.b"), ("ssse3", 4, "llvm.x86.ssse3.psign.b.128")]
SHUFFLE_BYTES = [
    ("avx512bw", 1, "llvm.x86.avx512.pshuf.b.512"),
    ("avx2", 2, "llvm.x86.avx2.pshuf.b"),
    ("ssse3", 4, "llvm.x86.ssse3.pshuf.b.128"),
    ("neon", 4, "llvm.aarch64.neon.tbl1.v16i8"),
]
SHUFFLE_16_BYTES = [(feature, 1, name) for feature, parts, name in SHUFFLE_BYTES if parts == 4]
MIXED_DOT = "i8mm", 4, "llvm.aarch64.neon.usdot.v4i32.v16i8"
SIGNED_DOT = "dotprod", 4, "llvm.aarch64.neon.sdot.v4i32.v16i8"


def select_widest(variants):
    return next((variant for variant in variants if variant[0] in get_lane().features), None)


def call_on_slices(builder, variant, result, arguments):
    """Call a variant of an instruction (see MULTIPLY_BYTES) on slices of 64-byte vectors as wide as it takes."""
    _, parts, name = variant
    part = ir.VectorType(result.element, result.count // parts)
    return map_slices(builder, lambda builder, *values: llvm_call(builder, name, part, values), parts, arguments)


def map_slices(builder, emit, parts, arguments):
    """Split the arguments into `parts` slices, apply `emit` to each, and concatenate the results."""
    pieces = []
    for i in range(parts):
        sizes = [value.type.count // parts for value in arguments]
        ends = [(i * size, (i + 1) * size) for size in sizes]
        pieces.append(
            emit(builder, *(slice_lanes(builder, value, *end) for value, end in zip(arguments, ends, strict=True)))
        )
    while len(pieces) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * pieces[0].type.count), [*range(2 * pieces[0].type.count)])
        pieces = [builder.shuffle_vector(low, high, lanes) for low, high in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def elements(builder, value):
    return [builder.extract_value(value, i) for i in range(value.type.count)]


def as_tuple(builder, values):
    result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        result = builder.insert_value(result, value, i)
    return result


def operation(result, *arguments):
    """Decorate an emitter, emit(builder, *values) -> value, to make it an intrinsic; None: no result."""

    def decorate(emit):
        def codegen(context, builder, signature, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if result is None else value

        signature = (types.void if result is None else result)(*arguments)
        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope = {"signature": signature, "codegen": codegen}
        exec(f"def typing(typingctx{', ' if names else ''}{names}): return signature, codegen", scope)
        scope["typing"].__name__, scope["typing"].__doc__ = emit.__name__, emit.__doc__
        return intrinsic(scope["typing"])

    return decorate


F16 = ir.HalfType()


def like(value, element):
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def constant_like(value, scalar):
    return ir.Constant(value.type, [scalar] * value.type.count if isinstance(value.type, ir.VectorType) else scalar)


def widen_bf16(builder, half):
    wide = builder.zext(half, like(half, I32))
    return builder.bitcast(builder.shl(wide, constant_like(wide, 16)), like(half, F32))


def narrow_bf16(builder, value):
    """Round to the nearest bfloat16, ties to even; NaN stays NaN.

    Half a unit of the last remaining bit is added as an integer, then the low bits are dropped.
    """
    bits = builder.bitcast(value, like(value, I32))
    tie = builder.and_(builder.lshr(bits, constant_like(bits, 16)), constant_like(bits, 1))
    rounded = builder.add(builder.add(bits, tie), constant_like(bits, 0x7FFF))
    quiet = builder.or_(bits, constant_like(bits, 1 << 22))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(rounded, constant_like(bits, 16)), like(value, I16))


def widen_half(builder, bits):
    if get_lane().has_instructions("f16c"):
        return builder.fpext(builder.bitcast(bits, like(bits, F16)), like(bits, F32))
    return widen_half_anywhere(builder, bits)


def widen_half_anywhere(builder, bits):
    """Convert float16 to float32 without an instruction for it.

    At their positions in a float32, exponent and fraction give a value 2 ** 112 times too small, subnormal or not. The
    largest exponent represents infinity and NaN.
    """
    wide = builder.zext(bits, like(bits, I32))
    size = builder.and_(wide, constant_like(wide, 0x7FFF))
    number = builder.bitcast(builder.shl(size, constant_like(wide, 13)), like(bits, F32))
    number = builder.bitcast(builder.fmul(number, constant_like(number, 2.0**112)), wide.type)
    special = builder.sext(builder.icmp_signed(">", size, constant_like(wide, 0x7BFF)), wide.type)
    number = builder.or_(number, builder.and_(special, constant_like(wide, 0x7F800000)))
    sign = builder.shl(builder.xor(wide, size), constant_like(wide, 16))
    return builder.bitcast(builder.or_(number, sign), like(bits, F32))


def narrow_half(builder, value):
    """Round to the nearest float16, ties to even."""
    if get_lane().has_instructions("f16c"):
        return builder.bitcast(builder.fptrunc(value, like(value, F16)), like(value, I16))
    return narrow_half_anywhere(builder, value)


def narrow_half_anywhere(builder, value):
    """Round to float16 without an instruction for it.

    Half a unit of the last remaining bit is added as an integer; the carry may reach the exponent. Subnormal results
    are multiples of 2 ** -24, and so are floats from 1/2 to 1: adding 1/2 rounds to those.
    """
    bits = builder.bitcast(value, like(value, I32))

    def constant(scalar):
        return constant_like(bits, scalar)

    size = builder.and_(bits, constant(0x7FFFFFFF))
    tie = builder.and_(builder.lshr(size, constant(13)), constant(1))
    rounded = builder.add(builder.add(size, tie), constant(0xFFF - (112 << 23)))
    result = builder.lshr(rounded, constant(13))
    shifted = builder.fadd(builder.bitcast(size, value.type), constant_like(value, 0.5))
    subnormal = builder.sub(builder.bitcast(shifted, bits.type), constant(0x3F000000))
    result = builder.select(builder.icmp_signed("<", size, constant(113 << 23)), subnormal, result)
    result = builder.select(builder.icmp_signed(">=", size, constant(0x477FF000)), constant(0x7C00), result)  # 65520
    result = builder.select(builder.icmp_signed(">", size, constant(0x7F800000)), constant(0x7E00), result)  # NaN
    sign = builder.lshr(builder.xor(bits, size), constant(16))
    return builder.trunc(builder.or_(result, sign), like(value, I16))


def load_value(builder, address, llvm_type):
    value = builder.load(builder.inttoptr(address, llvm_type.as_pointer()), typ=llvm_type)
    value.align = 1
    return value


def make_load(result, llvm_type, convert=lambda builder, value: value):
    """Return an intrinsic (address) -> `result` that loads a value of an LLVM type.

    convert: the emitter that converts the value.
    """
    return operation(result, types.int64)(
        lambda builder, address: convert(builder, load_value(builder, address, llvm_type))
    )


def store_value(builder, address, value):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def make_store(vector):
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

    It is spread over the lanes first, because converting a scalar depends on the other lanes of a register, and waits
    for them. Rows of Q4_K took three times as long.
    """

    def emit(builder, value):
        return widen_half(builder, splat_value(builder, ir.VectorType(I16, lanes), value))

    return emit


load_splat_f16x8, load_splat_f16x16 = make_load(f32x8, I16, splat_f16(8)), make_load(f32x16, I16, splat_f16(16))
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


def mask_first_lanes(builder, count):
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    return builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))


@operation(f32x16, types.int64, types.int64)
def load_lanes_f32x16(builder, address, count):
    """Load `count` floats, followed by zeros. No memory after them is read."""
    pointer, zeros = builder.inttoptr(address, f32x16.llvm.as_pointer()), ir.Constant(f32x16.llvm, None)
    arguments = [pointer, I32(1), mask_first_lanes(builder, count), zeros]
    return llvm_call(builder, "llvm.masked.load.v16f32.p0", f32x16.llvm, arguments)


@operation(None, types.int64, f32x16, types.int64)
def store_lanes_f32x16(builder, address, value, count):
    """Store the first `count` lanes. No memory after them is written."""
    pointer = builder.inttoptr(address, f32x16.llvm.as_pointer())
    arguments = [value, pointer, I32(1), mask_first_lanes(builder, count)]
    llvm_call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


def make_narrow_store(vector, narrow):
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

    locality: 3 for all caches, 2 from the L2 on.
    """
    pointer = builder.inttoptr(address, I8.as_pointer())
    llvm_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(locality), I32(1)])


prefetch = operation(None, types.int64)(prefetch_line)
prefetch_l2 = operation(None, types.int64)(lambda builder, address: prefetch_line(builder, address, 2))
