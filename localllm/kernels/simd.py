"""The vector vocabulary: vectors as Numba types, operations as LLVM instructions.

A kernel written with these reads like scalar Python and compiles to vector instructions. Loads and stores take int64
addresses of any alignment, so kernels need no array types and no bounds logic; nothing here is checked, the callers
are. Vectors are as wide as AVX-512's registers; on a smaller CPU LLVM splits them, in four for an ARM's NEON. What LLVM
cannot express in plain operations (the int8 dot product), or would call a slow function for (float16, rounding), has
variants, chosen by the features of the target CPU; the last of them is plain and works anywhere.
"""

import math
import operator

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from localllm.kernels.half import constant_like, narrow_bf16, narrow_half, widen_bf16, widen_half
from localllm.kernels.pipeline import Pipeline
from localllm.kernels.target import cpu_feature_string, cpu_features, has_instructions

# Numba links a helper into its caller after LLVM has prepared it for the machine. One of the preparations turns an
# address that is a sum of integers into an offset from either of them, "null + offset" if the caller knows that one to
# be zero, and LLVM deletes what reads from there (seen with LLVM 22: Q4_K became an empty function). This keeps sums.
llvm.set_option("localllm", "-addr-sink-using-gep=false")

if "neon" in cpu_features():  # of which LLVM alone does not tell Numba all
    config.CPU_FEATURES = cpu_feature_string()  # type: ignore[attr-defined]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INFINITY, NAN = types.float32(math.inf), types.float32(math.nan)


class Vector(types.Type):
    """`lanes` elements of one LLVM type, kept in registers."""

    def __init__(self, name: str, element: ir.Type, lanes: int):
        self.element, self.lanes, self.llvm = element, lanes, ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Numba's view of a vector: one LLVM value."""

    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


u8x8, u8x16, u8x32, u8x64 = (Vector(f"u8x{lanes}", I8, lanes) for lanes in (8, 16, 32, 64))
i32x16 = Vector("i32x16", I32, 16)
f32x2, f32x8, f32x16 = (Vector(f"f32x{lanes}", F32, lanes) for lanes in (2, 8, 16))


def llvm_call(builder, name, result, arguments):
    """Call the LLVM intrinsic or C function `name`."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def splat_value(builder, vector_type, scalar):
    """A vector with `scalar` in every lane."""
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, vector_type.count), None))


def slice_of(builder, value, start, stop, step=1):
    """The lanes value[start:stop:step]."""
    lanes = [*range(start, stop, step)]
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def shuffled(builder, x, y, order):
    """The lanes `order` of two vectors."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), [*order]))


# Instructions for whole vectors: the feature that brings them, into how many parts 64 bytes go, LLVM's name
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
MIXED_DOT = "i8mm", 4, "llvm.aarch64.neon.usdot.v4i32.v16i8"
SIGNED_DOT = "dotprod", 4, "llvm.aarch64.neon.sdot.v4i32.v16i8"


def widest(variants):
    """The first variant that the CPU has; None if it has none."""
    return next((variant for variant in variants if variant[0] in cpu_features()), None)


def call_in_parts(builder, variant, result, arguments):
    """Call a variant of an instruction on vectors of 64 bytes; `result`: LLVM's type of the whole result."""
    _, parts, name = variant
    part = ir.VectorType(result.element, result.count // parts)
    return in_parts(builder, lambda builder, *values: llvm_call(builder, name, part, values), parts, arguments)


def in_parts(builder, emit, parts, arguments):
    """What `emit` makes of so many parts of the arguments, one after the other in a vector."""
    pieces = []
    for i in range(parts):
        sizes = [value.type.count // parts for value in arguments]
        ends = [(i * size, (i + 1) * size) for size in sizes]
        pieces.append(
            emit(builder, *(slice_of(builder, value, *end) for value, end in zip(arguments, ends, strict=True)))
        )
    while len(pieces) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * pieces[0].type.count), [*range(2 * pieces[0].type.count)])
        pieces = [builder.shuffle_vector(low, high, lanes) for low, high in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def elements(builder, value):
    """The members of a tuple that are all of one type."""
    return [builder.extract_value(value, i) for i in range(value.type.count)]


def as_tuple(builder, values):
    """Values of one type as a tuple."""
    result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        result = builder.insert_value(result, value, i)
    return result


def operation(result, *arguments):
    """Turn `emit(builder, *values) -> value` into an intrinsic with this signature (None: no result)."""

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


# ---- memory ---------------------------------------------------------------------------------------------------------


def load_value(builder, address, llvm_type):
    """An unaligned load."""
    value = builder.load(builder.inttoptr(address, llvm_type.as_pointer()), typ=llvm_type)
    value.align = 1
    return value


def make_load(result, llvm_type, convert=lambda builder, value: value):
    """An intrinsic address -> `result` that loads `llvm_type` and converts it."""
    return operation(result, types.int64)(
        lambda builder, address: convert(builder, load_value(builder, address, llvm_type))
    )


def store_value(builder, address, value):
    """An unaligned store."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def make_store(vector):
    """An intrinsic (address, value) that stores."""
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
    """An emitter that spreads a float16, as bits, over a vector and converts it there.

    A scalar conversion would start in a register whose other lanes are somebody else's, and wait for those: rows of
    Q4_K took three times as long.
    """

    def emit(builder, value):
        return widen_half(builder, splat_value(builder, ir.VectorType(I16, lanes), value))

    return emit


load_splat_f16x8, load_splat_f16x16 = make_load(f32x8, I16, splat_f16(8)), make_load(f32x16, I16, splat_f16(16))
load_splat_4 = make_load(
    u8x64, I32, lambda builder, value: builder.bitcast(splat_value(builder, i32x16.llvm, value), u8x64.llvm)
)
store_f32, store_f32x16 = make_store(types.float32), make_store(f32x16)
store_f32x8 = make_store(f32x8)
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
    """A mask of the first `count` of 16 lanes."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    return builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))


@operation(f32x16, types.int64, types.int64)
def load_lanes_f32x16(builder, address, count):
    """So many floats, and zeros; no other memory is touched."""
    pointer, zeros = builder.inttoptr(address, f32x16.llvm.as_pointer()), ir.Constant(f32x16.llvm, None)
    arguments = [pointer, I32(1), first_lanes(builder, count), zeros]
    return llvm_call(builder, "llvm.masked.load.v16f32.p0", f32x16.llvm, arguments)


@operation(None, types.int64, f32x16, types.int64)
def store_lanes_f32x16(builder, address, value, count):
    """The first `count` lanes; no other memory is touched."""
    pointer = builder.inttoptr(address, f32x16.llvm.as_pointer())
    arguments = [value, pointer, I32(1), first_lanes(builder, count)]
    llvm_call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)


def make_narrow_store(vector, narrow):
    """An intrinsic (address, value) that rounds to 16 bits and stores."""
    return operation(None, types.int64, vector)(
        lambda builder, address, value: store_value(builder, address, narrow(builder, value))
    )


store_f16, store_f16x16 = make_narrow_store(types.float32, narrow_half), make_narrow_store(f32x16, narrow_half)
store_bf16x16 = make_narrow_store(f32x16, narrow_bf16)
store_words_i32x16 = make_narrow_store(
    i32x16, lambda builder, value: builder.trunc(value, ir.VectorType(I16, value.type.count))
)


def prefetch_line(builder, address, locality=3):
    """Ask for the cache line at an address, which may lie outside of everything: into all caches, or slower ones."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    llvm_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(locality), I32(1)])


prefetch = operation(None, types.int64)(prefetch_line)
prefetch_l2 = operation(None, types.int64)(lambda builder, address: prefetch_line(builder, address, 2))


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def make_elementwise(vector, instruction):
    return operation(vector, vector, vector)(lambda builder, x, y: getattr(builder, instruction)(x, y))


def overload_operator(function, instructions):
    """Give vectors a Python operator: `instructions` maps the vector type to LLVM's instruction."""
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


def make_constant(vector, scalar):
    return operation(vector)(lambda builder: ir.Constant(vector.llvm, [scalar] * vector.lanes))


zero_i32x16, zero_f32x16, zero_f32x8 = make_constant(i32x16, 0), make_constant(f32x16, 0.0), make_constant(f32x8, 0.0)


def constant_u8(vector, *values):
    """An intrinsic () -> vector of bytes that repeats `values`."""
    return operation(vector)(lambda builder: ir.Constant(vector.llvm, list(values) * (vector.lanes // len(values))))


def constant_f32(vector, *values):
    """An intrinsic () -> vector of floats that repeats `values`."""
    return operation(vector)(lambda builder: ir.Constant(vector.llvm, list(values) * (vector.lanes // len(values))))


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
    """A float16, given as the low 16 bits of an integer, in all lanes."""
    return splat_f16(16)(builder, builder.trunc(bits, I16))


@operation(types.float32, types.int64)
def float_f16(builder, bits):
    """A float16, given as the low 16 bits of an integer."""
    return widen_half(builder, builder.trunc(bits, I16))


def multiply_add(builder, x, y, z):
    """x * y + z, rounded once if the CPU has an instruction for it ("llvm.fma" would call a function if not)."""
    return llvm_call(builder, f"llvm.fmuladd.v{x.type.count}f32", x.type, [x, y, z])


fma_f32x16, fma_f32x8 = (operation(vector, *[vector] * 3)(multiply_add) for vector in (f32x16, f32x8))


@operation(f32x16, f32x16, f32x16)
def max_f32x16(builder, x, y):
    """The larger number in each lane; y if one is NaN, as in x86's instructions."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(f32x16, f32x16, f32x16)
def min_f32x16(builder, x, y):
    """The smaller number in each lane; y if one is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@operation(f32x16, f32x16)
def abs_f32x16(builder, x):
    return llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [x])


def larger_size(builder, x, y):
    """The larger of two floats without sign in each lane; NaN if one is: as integers, NaN comes behind infinity."""
    integers = ir.VectorType(I32, x.type.count)
    above = builder.icmp_signed(">", builder.bitcast(x, integers), builder.bitcast(y, integers))
    return builder.select(above, x, y)


@operation(types.float32, f32x16, f32x16)
def largest_size_f32x16(builder, x, y):
    """The largest size of all numbers in x and y; NaN if one of them is."""
    x, y = (llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [value]) for value in (x, y))
    sizes = builder.bitcast(larger_size(builder, x, y), i32x16.llvm)
    return builder.bitcast(llvm_call(builder, "llvm.vector.reduce.smax.v16i32", I32, [sizes]), F32)


@operation(f32x16, f32x16, types.float32)
def keep_below_f32x16(builder, x, limit):
    """NaN where the size of x is not below the limit."""
    size = llvm_call(builder, "llvm.fabs.v16f32", f32x16.llvm, [x])
    below = builder.fcmp_ordered("<", size, splat_value(builder, f32x16.llvm, limit))
    return builder.select(below, x, constant_like(x, math.nan))


@operation(f32x16, f32x16)
def round_f32x16(builder, x):
    """To the nearest integer, ties to even; for numbers up to 2 ** 22.

    Without an instruction for it: floats from 2 ** 23 to 2 ** 24 are whole numbers, so adding 1.5 * 2 ** 23 rounds.
    """
    if has_instructions("sse4.1"):
        return llvm_call(builder, "llvm.nearbyint.v16f32", f32x16.llvm, [x])
    large = constant_like(x, 1.5 * 2**23)
    return builder.fsub(builder.fadd(x, large), large)


def reduce_add(builder, value):
    """The sum of a vector's floats, in any order."""
    function = ir.FunctionType(F32, [F32, value.type])
    name = f"llvm.vector.reduce.fadd.v{value.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(function, [ir.Constant(F32, 0.0), value], fastmath=("reassoc",))


sum_f32x16, sum_f32x8 = (operation(types.float32, vector)(reduce_add) for vector in (f32x16, f32x8))


@operation(types.float32, f32x16)
def largest_f32x16(builder, value):
    for distance in (8, 4, 2, 1):
        lanes = ir.Constant(ir.VectorType(I32, 16), [(lane + distance) % 16 for lane in range(16)])
        other = builder.shuffle_vector(value, value, lanes)
        value = builder.select(builder.fcmp_ordered(">", value, other), value, other)
    return builder.extract_element(value, I32(0))


@operation(types.boolean, f32x16, f32x16)
def any_above_f32x16(builder, x, y):
    """Whether a lane of x is larger than the same of y."""
    above = builder.fcmp_ordered(">", x, y)
    if "neon" in cpu_features():  # which has no masks of one bit a lane
        return llvm_call(builder, "llvm.vector.reduce.or.v16i1", ir.IntType(1), [above])
    return builder.icmp_unsigned("!=", builder.bitcast(above, I16), I16(0))


@operation(types.int64, i32x16)
def sum_i32x16(builder, value):
    return builder.sext(llvm_call(builder, "llvm.vector.reduce.add.v16i32", I32, [value]), I64)


@operation(f32x16, i32x16)
def float_i32x16(builder, value):
    return builder.sitofp(value, f32x16.llvm)


@operation(i32x16, f32x16)
def int_f32x16(builder, value):
    """Towards zero."""
    return builder.fptosi(value, i32x16.llvm)


def make_shift_i32(left, amount):
    """An intrinsic that shifts each lane: left, or right with its sign."""

    def shift(builder, value):
        counts = ir.Constant(i32x16.llvm, [amount] * 16)
        return builder.shl(value, counts) if left else builder.ashr(value, counts)

    return operation(i32x16, i32x16)(shift)


@operation(u8x16, i32x16)
def bytes_i32x16(builder, value):
    """The low byte of each lane."""
    return builder.trunc(value, u8x16.llvm)


@operation(f32x8, u8x8)
def float_u8x8(builder, value):
    return builder.uitofp(value, f32x8.llvm)


@operation(f32x16, u8x16)
def float_i8x16(builder, value):
    """Signed bytes to floats."""
    return builder.sitofp(value, f32x16.llvm)


@operation(f32x16, u8x16, types.int64, f32x16, f32x16)
def nibbles_f32x16(builder, codes, bit, scale, minimum):
    """scale * code + minimum, rounded once, of the codes that are four bits of each byte, from number `bit` on.

    AVX-512 looks them up among the 16 that there are, by the lowest four bits of a lane.
    """
    codes = builder.zext(codes, i32x16.llvm)
    codes = builder.lshr(codes, splat_value(builder, i32x16.llvm, builder.trunc(bit, I32)))
    if "avx512f" in cpu_features():
        table = multiply_add(builder, ir.Constant(f32x16.llvm, [float(code) for code in range(16)]), scale, minimum)
        return llvm_call(builder, "llvm.x86.avx512.permvar.sf.512", f32x16.llvm, [table, codes])
    codes = builder.and_(codes, constant_like(codes, 15))
    return multiply_add(builder, builder.sitofp(codes, f32x16.llvm), scale, minimum)


@operation(None, types.int64, i32x16, i32x16)
def store_nibbles(builder, address, low, high):
    """16 bytes, each of four bits of one lane and, above, four of the other."""
    both = builder.or_(low, builder.shl(high, constant_like(high, 4)))
    store_value(builder, address, builder.trunc(both, u8x16.llvm))


def make_butterfly(distance):
    """An intrinsic: of lanes so far apart, the sum becomes the first one, the difference the second."""
    lanes = range(16)
    signs = [-1.0 if lane & distance else 1.0 for lane in lanes]

    def butterfly(builder, x):
        other = shuffled(builder, x, x, [lane ^ distance for lane in lanes])
        return multiply_add(builder, x, ir.Constant(f32x16.llvm, signs), other)

    return operation(f32x16, f32x16)(butterfly)


@operation(f32x16, f32x16)
def two_to_the(builder, value):
    """2 ** value for whole numbers from -126 to 127, by writing the exponent bits; -127 gives 0 and 128 infinity."""
    whole = builder.fptosi(value, i32x16.llvm)
    biased = builder.add(whole, ir.Constant(i32x16.llvm, [127] * 16))
    return builder.bitcast(builder.shl(biased, ir.Constant(i32x16.llvm, [23] * 16)), f32x16.llvm)


@operation(f32x16, f32x16)
def reciprocal_f32x16(builder, value):
    """1 / x, correctly rounded."""
    return builder.fdiv(ir.Constant(f32x16.llvm, [1.0] * 16), value)


@njit(nogil=True, pipeline_class=Pipeline)
def clamp_f32x16(x, low, high):
    """x, raised to `low` and lowered to `high`; NaN, which max and min return in their second argument, stays."""
    return min_f32x16(splat_f32x16(high), max_f32x16(splat_f32x16(low), x))


@njit(nogil=True, pipeline_class=Pipeline)
def exp_f32x16(x):
    """e ** x within 2 units in the last place for x from -87 to 88; 0 below -87.7, infinity above 88.4, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, so that r is exact); e ** r by its series to r ** 7 / 7!.
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
    return p * two_to_the(n)


@njit(nogil=True, pipeline_class=Pipeline)
def exp2_f32x16(x):
    """2 ** x to a relative error of 2e-7 for x from -126 to 127.5; 0 below -126.5, infinity above, NaN for NaN.

    x = n + r with |r| <= 1/2; 2 ** r by the polynomial that meets it in the 6 Chebyshev nodes, wrong by 1e-7 at most.
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
    return p * two_to_the(n)


@operation(f32x16, f32x16, f32x16)
def copy_sign(builder, value, sign):
    """`value`, which is not negative, with the sign of `sign`."""
    return llvm_call(builder, "llvm.copysign.v16f32", f32x16.llvm, [value, sign])


@njit(nogil=True, pipeline_class=Pipeline)
def tanh_f32x16(x):
    """tanh x = (1 - e ** -2|x|) / (1 + e ** -2|x|), with the sign of x; wrong by 2e-7 at most."""
    e = exp_f32x16(abs_f32x16(x) * splat_f32x16(-2.0))
    one = splat_f32x16(1.0)
    return copy_sign((one - e) * reciprocal_f32x16(one + e), x)


@njit(nogil=True, pipeline_class=Pipeline)
def if_finite_f32x16(y, x):
    """y, but NaN where x is not finite: a function whose values are bounded would hide what a broken weight made."""
    return fma_f32x16(x, zero_f32x16(), y)


@njit(nogil=True, pipeline_class=Pipeline)
def sigmoid_f32x16(x):
    """1 / (1 + e ** -x), NaN for infinity."""
    return if_finite_f32x16(reciprocal_f32x16(splat_f32x16(1.0) + exp_f32x16(-x)), x)


@njit(nogil=True, pipeline_class=Pipeline)
def softplus_f32x16(x):
    """log(1 + e ** x) = max(x, 0) + log(1 + u) with u = e ** -|x|, wrong by 2e-7 of it at most; NaN for infinity.

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
    return if_finite_f32x16(fma_f32x16(p, s, max_f32x16(zero_f32x16(), x)), x)


# ---- moving bytes ---------------------------------------------------------------------------------------------------


def make_shuffle(result, source, order):
    """An intrinsic that takes lane order[i] of `source` to lane i."""

    def shuffle(builder, value):
        return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    return operation(result, source)(shuffle)


def make_shift(vector, left, *amounts):
    """An intrinsic that shifts bytes, pair by pair: `amounts` holds one for each pair (repeated).

    It shifts words of 16 bits, for which there are instructions (shifting bytes takes seven): bits that leave a byte
    enter its neighbour, so mask them before or after.
    """

    def shift(builder, value):
        words = ir.VectorType(I16, vector.lanes // 2)
        counts = ir.Constant(words, list(amounts) * (words.count // len(amounts)))
        value = builder.bitcast(value, words)
        return builder.bitcast(builder.shl(value, counts) if left else builder.lshr(value, counts), vector.llvm)

    return operation(vector, vector)(shift)


def make_concatenate(result, part):
    """An intrinsic (low, high) -> one vector."""
    order = ir.Constant(ir.VectorType(I32, result.lanes), list(range(result.lanes)))
    return operation(result, part, part)(lambda builder, low, high: builder.shuffle_vector(low, high, order))


concatenate_u8x16 = make_concatenate(u8x16, u8x8)
concatenate_u8x32, concatenate_u8x64 = make_concatenate(u8x32, u8x16), make_concatenate(u8x64, u8x32)
concatenate_f32x16 = make_concatenate(f32x16, f32x8)
twice_u8x32 = make_shuffle(u8x64, u8x32, [*range(32)] * 2)


@operation(u8x8, types.int64)
def bytes_of(builder, value):
    """The 8 bytes of an integer, lowest first."""
    return builder.bitcast(value, u8x8.llvm)


def make_gather_f16(stride):
    """An intrinsic address -> f32x8: the float16 numbers at address, address + stride, ... address + 7 * stride."""

    def gather(builder, address):
        halves = ir.Constant(ir.VectorType(I16, 8), None)  # not undefined: that may wait for any register's last value
        for lane in range(8):
            half = load_value(builder, builder.add(address, I64(lane * stride)), I16)
            halves = builder.insert_element(halves, half, I32(lane))
        return widen_half(builder, halves)

    return operation(f32x8, types.int64)(gather)


def make_gather_planes(stride):
    """An intrinsic address -> four integers: byte q of the 4-byte numbers at address, address + stride, ... (8)."""

    def gather(builder, address):
        words = ir.Constant(ir.VectorType(I32, 8), ir.Undefined)
        for lane in range(8):
            word = load_value(builder, builder.add(address, I64(lane * stride)), I32)
            words = builder.insert_element(words, word, I32(lane))
        words = builder.bitcast(words, u8x32.llvm)
        order = ir.Constant(ir.VectorType(I32, 32), [4 * lane + q for q in range(4) for lane in range(8)])
        planes = builder.bitcast(builder.shuffle_vector(words, words, order), ir.VectorType(I64, 4))
        return as_tuple(builder, [builder.extract_element(planes, I32(q)) for q in range(4)])

    return operation(types.UniTuple(types.int64, 4), types.int64)(gather)


def make_gather_powers(stride, bias):
    """An intrinsic address -> f32x8: 2 ** (byte - bias) for the bytes at address, address + stride, ...

    Of two factors, since 2 ** -128 has no exponent of its own.
    """

    def gather(builder, address):
        codes = ir.Constant(ir.VectorType(I8, 8), None)
        for lane in range(8):
            code = load_value(builder, builder.add(address, I64(lane * stride)), I8)
            codes = builder.insert_element(codes, code, I32(lane))
        words = ir.VectorType(I32, 8)

        def constant(value):
            return ir.Constant(words, [value] * 8)

        codes = builder.zext(codes, words)
        half = builder.lshr(codes, constant(1))
        exponents = (half, builder.sub(builder.sub(codes, half), constant(bias - 128)))
        factors = (builder.shl(builder.add(exponent, constant(63)), constant(23)) for exponent in exponents)
        return builder.fmul(*(builder.bitcast(factor, f32x8.llvm) for factor in factors))

    return operation(f32x8, types.int64)(gather)


@operation(f32x2, types.float32, types.float32)
def pair_f32x2(builder, x, y):
    pair = builder.insert_element(ir.Constant(f32x2.llvm, ir.Undefined), x, I32(0))
    return builder.insert_element(pair, y, I32(1))


@operation(f32x8, types.float32, types.float32)
def alternating_f32x8(builder, x, y):
    """x, y, x, y, ..."""
    pair = ir.Constant(ir.VectorType(F32, 2), ir.Undefined)
    for lane, scalar in enumerate((x, y)):
        pair = builder.insert_element(pair, scalar, I32(lane))
    return builder.shuffle_vector(pair, pair, ir.Constant(ir.VectorType(I32, 8), [0, 1] * 4))


def make_quads(*order):
    """An intrinsic (x, y) -> vector of the 8 quads (of 8 bytes) with these indices; those of y are 8 to 15."""

    def permute(builder, x, y):
        quads = ir.VectorType(I64, 8)
        order_ = ir.Constant(ir.VectorType(I32, 8), list(order))
        x, y = builder.bitcast(x, quads), builder.bitcast(y, quads)
        return builder.bitcast(builder.shuffle_vector(x, y, order_), u8x64.llvm)

    return operation(u8x64, u8x64, u8x64)(permute)


def make_rotate(*amounts):
    """An intrinsic that rotates quads of bytes to the left, each by its amount (repeated)."""

    def rotate(builder, value):
        quads = ir.VectorType(I64, 8)
        value, counts = builder.bitcast(value, quads), ir.Constant(quads, list(amounts) * (8 // len(amounts)))
        return builder.bitcast(llvm_call(builder, "llvm.fshl.v8i64", quads, [value, value, counts]), u8x64.llvm)

    return operation(u8x64, u8x64)(rotate)


def make_where(masks, value):
    """An intrinsic (codes, bits) -> codes + value where `bits` has a bit of `masks`."""

    def add_where(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        chosen = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(chosen, builder.add(codes, ir.Constant(u8x64.llvm, [value] * 64)), codes)

    return operation(u8x64, u8x64, u8x64)(add_where)


def make_reflect(masks, total):
    """An intrinsic (codes, bits) -> total - codes where `bits` has a bit of `masks`, else codes."""

    def reflect(builder, codes, bits):
        zero = ir.Constant(u8x64.llvm, None)
        chosen = builder.icmp_unsigned("!=", builder.and_(bits, ir.Constant(u8x64.llvm, list(masks))), zero)
        return builder.select(chosen, builder.sub(ir.Constant(u8x64.llvm, [total] * 64), codes), codes)

    return operation(u8x64, u8x64, u8x64)(reflect)


def make_fields(width):
    """An intrinsic that spreads the lowest four fields of `width` bits of each 4-byte word over its bytes."""

    def fields(builder, value):
        words = ir.VectorType(I32, 8)
        value, result = builder.bitcast(value, words), ir.Constant(words, None)
        for field in range(4):
            moved = builder.shl(value, ir.Constant(words, [(8 - width) * field] * 8))
            mask = ir.Constant(words, [((1 << width) - 1) << (8 * field)] * 8)
            result = builder.or_(result, builder.and_(moved, mask))
        return builder.bitcast(result, u8x32.llvm)

    return operation(u8x32, u8x32)(fields)


def make_trits(*digits):
    """An intrinsic that reads bytes as fractions of 256 in base three and takes a digit of each, 0 being the first.

    Multiplying by 3 moves a digit in front of the point, so the first digit of x is 1 from 86 on, and 2 from 171 on.
    """

    def trits(builder, value):
        def constant(values):
            return ir.Constant(u8x64.llvm, list(values))

        value = builder.mul(value, constant(3**digit for digit in digits))
        one, two = (builder.icmp_unsigned(">=", value, constant([least] * 64)) for least in (86, 171))
        return builder.add(builder.zext(one, u8x64.llvm), builder.zext(two, u8x64.llvm))

    return operation(u8x64, u8x64)(trits)


def u8x64_of(scalar, element):
    """An intrinsic that makes a vector of integers, lowest first."""
    lanes = 512 // element.width

    def of(builder, *values):
        vector = ir.Constant(ir.VectorType(element, lanes), ir.Undefined)
        for lane, value in enumerate(values):
            vector = builder.insert_element(vector, value, I32(lane))
        return builder.bitcast(vector, u8x64.llvm)

    return operation(u8x64, *[scalar] * lanes)(of)


u8x64_of_quads, u8x64_of_words = u8x64_of(types.int64, I64), u8x64_of(types.int32, I32)


def make_flags(value):
    """An intrinsic that turns the 64 bits of an integer into 64 bytes: `value` where the bit is set, else 0."""

    def flags(builder, bits):
        zero, values = (ir.Constant(u8x64.llvm, [number] * 64) for number in (0, value))
        if "neon" in cpu_features():  # which has no masks of one bit a lane
            each = [lane // 8 for lane in range(64)]
            eight = builder.bitcast(bits, u8x8.llvm)
            place = ir.Constant(u8x64.llvm, [1 << lane % 8 for lane in range(64)])
            found = builder.and_(shuffled(builder, eight, eight, each), place)
            return builder.select(builder.icmp_unsigned("!=", found, zero), values, zero)
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
        return builder.select(mask, values, zero)

    return operation(u8x64, types.int64)(flags)


def make_transpose(row):
    """An intrinsic (source, stride, target): 16 rows of 64 bytes, `stride` bytes apart, become columns without gaps.

    `row`: LLVM's type of one, of 16 elements or 8. Four rounds of pairwise interleaving (the butterfly of a matrix
    transpose), all in registers.
    """
    half = row.count // 2
    low = ir.Constant(ir.VectorType(I32, row.count), [lane // 2 + lane % 2 * row.count for lane in range(row.count)])
    high = ir.Constant(low.type, [half + lane // 2 + lane % 2 * row.count for lane in range(row.count)])

    @operation(None, types.int64, types.int64, types.int64)
    def transpose(builder, source, stride, target):
        rows = [load_value(builder, builder.add(source, builder.mul(stride, I64(i))), row) for i in range(16)]
        for _ in range(4):
            pairs = [(rows[i], rows[i + 8]) for i in range(8)]
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        for i, value in enumerate(rows):
            store_value(builder, builder.add(target, I64(i * 64)), value)

    return transpose


transpose_f32 = make_transpose(f32x16.llvm)  # 16 columns of 16 words of 4 bytes
transpose_quads = make_transpose(ir.VectorType(I64, 8))  # 8 columns of 16 words of 8 bytes


@operation(f32x16, f32x16, types.int64, types.float32)
def keep_lanes(builder, value, count, other):
    """The first `count` lanes of `value` (none if negative), `other` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    kept = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(kept, value, splat_value(builder, f32x16.llvm, other))


@operation(f32x16, f32x16, types.int64, types.float32)
def skip_lanes(builder, value, count, other):
    """`other` in the first `count` lanes (none if negative), `value` in the rest."""
    lanes = ir.Constant(i32x16.llvm, list(range(16)))
    skipped = builder.icmp_signed("<", lanes, splat_value(builder, i32x16.llvm, builder.trunc(count, I32)))
    return builder.select(skipped, splat_value(builder, f32x16.llvm, other), value)


# ---- the int8 dot product -------------------------------------------------------------------------------------------


def dot_vnni_512(builder, accumulator, unsigned, signed):
    return llvm_call(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, [accumulator, unsigned, signed])


def dot_words_vnni_512(builder, accumulator, x, y):
    """Adds 2 products of signed words of 16 bits to each lane; x and y are given as bytes."""
    x, y = (builder.bitcast(value, ir.VectorType(I16, 32)) for value in (x, y))
    return llvm_call(builder, "llvm.x86.avx512.vpdpwssd.512", i32x16.llvm, [accumulator, x, y])


def dot_vnni_256(builder, accumulator, unsigned, signed):
    variant = "avxvnni", 2, "llvm.x86.avx512.vpdpbusd.256"  # LLVM's name for AVX-VNNI's instruction, too
    return call_in_parts(builder, variant, i32x16.llvm, [accumulator, unsigned, signed])


def dot_bytes(builder, accumulator, unsigned, signed):
    """Pairs of bytes are multiplied and added to words of 16 bits, then pairs of words to 32.

    The words would saturate, so the highest bits of the unsigned bytes go their own way (-128 * 128 * 2 just fits).
    LLVM leaves out the multiplication with what it knows to be zero: see `splits_dot`.
    """
    for mask in (0x7F, 0x80):
        masked = builder.and_(unsigned, ir.Constant(u8x64.llvm, [mask] * 64))
        words = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [masked, signed])
        accumulator = builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))
    return accumulator


def dot_signed_bytes(builder, accumulator, x, y):
    """The same for signed bytes, those of y above -128, in half the work: sizes of x times y with the signs of x."""
    sizes = llvm_call(builder, "llvm.abs.v64i8", u8x64.llvm, [x, ir.IntType(1)(0)])
    y = call_in_parts(builder, widest(SIGN_BYTES), u8x64.llvm, [y, x])
    pairs = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [sizes, y])
    return builder.add(accumulator, multiply_words(builder, pairs, constant_like(pairs, 1)))


def dot_generic(builder, accumulator, unsigned, signed):
    """The even bytes and the odd ones as words of 16 bits, pairs of which are multiplied and added."""
    words = ir.VectorType(I16, 32)
    x, y, eight = builder.bitcast(unsigned, words), builder.bitcast(signed, words), ir.Constant(words, [8] * 32)
    even = builder.and_(x, constant_like(x, 255)), builder.ashr(builder.shl(y, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(y, eight)
    sums = builder.add(multiply_words(builder, *even), multiply_words(builder, *odd))
    return builder.add(accumulator, sums)


def dot_neon_mixed(builder, accumulator, unsigned, signed):
    return call_in_parts(builder, MIXED_DOT, i32x16.llvm, [accumulator, unsigned, signed])


def dot_neon_signed(builder, accumulator, x, y):
    """Of signed bytes."""
    if "dotprod" in cpu_features():
        return call_in_parts(builder, SIGNED_DOT, i32x16.llvm, [accumulator, x, y])
    return in_parts(builder, dot_neon_16, 4, [accumulator, x, y])


def dot_neon_16(builder, accumulator, x, y):
    """Of 16 signed bytes, without an instruction for it: products of 16 bits are added by twos, and again."""
    sums = []
    for start in (0, 8):
        halves = [slice_of(builder, value, start, start + 8) for value in (x, y)]
        products = llvm_call(builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), halves)
        sums.append(llvm_call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", accumulator.type, [products]))
    return builder.add(accumulator, llvm_call(builder, "llvm.aarch64.neon.addp.v4i32", accumulator.type, sums))


def dot_neon_unsigned(builder, accumulator, unsigned, signed):
    """Unsigned bytes less 128 are signed ones; 128 times the others, which many rows share, are added again."""
    less = builder.xor(unsigned, constant_like(unsigned, 128))
    others = dot_neon_signed(builder, constant_like(accumulator, 0), constant_like(signed, 1), signed)
    bias = builder.shl(others, constant_like(others, 7))
    return builder.add(dot_neon_signed(builder, accumulator, less, signed), bias)


def multiply_words(builder, x, y):
    """x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1] of 32 signed words: i32x16."""
    if widest(MULTIPLY_WORDS):
        return call_in_parts(builder, widest(MULTIPLY_WORDS), i32x16.llvm, [x, y])

    def every_second(value, first):
        return builder.sext(slice_of(builder, value, first, 32, 2), i32x16.llvm)

    return builder.add(*(builder.mul(every_second(x, first), every_second(y, first)) for first in (0, 1)))


def dot_variant(largest=255):
    """The emitter for the target CPU, for unsigned bytes up to `largest`, if it helps to know that."""
    features = cpu_features()
    if "neon" in features:
        return dot_neon_mixed if "i8mm" in features else dot_neon_signed if largest < 128 else dot_neon_unsigned
    if {"avx512vnni", "avx512bw"} <= features:
        return dot_vnni_512
    if "avxvnni" in features:
        return dot_vnni_256
    return dot_bytes if widest(MULTIPLY_BYTES) else dot_generic


def splits_dot():
    """Whether a dot product comes in two parts, of which one would do for signed bytes, or unsigned ones below 128."""
    return dot_variant() in (dot_bytes, dot_neon_unsigned)


def wants_signed_codes():
    """Whether unsigned bytes are best made signed ones when they are unpacked."""
    return dot_variant() is dot_neon_unsigned


def signed_dot_variant():
    """The emitter of the dot product of signed bytes, those of the second above -128; None if it is not worth using."""
    if "neon" in cpu_features():
        return dot_neon_signed
    return dot_signed_bytes if splits_dot() else None


def make_dot(largest):
    """An intrinsic (accumulator, x, y) that adds 4 products of bytes to each lane: x up to `largest`, y signed."""
    return operation(i32x16, i32x16, u8x64, u8x64)(dot_variant(largest))


# ---- looking up ------------------------------------------------------------------------------------------------------


def lookup_bytes(builder, table, codes):
    """table[code] for vectors of bytes, codes 0 to 15."""
    if widest(SHUFFLE_BYTES):
        tables = ir.Constant(u8x64.llvm, table * 4)
        return call_in_parts(builder, widest(SHUFFLE_BYTES), u8x64.llvm, [tables, codes])
    result = ir.Constant(u8x64.llvm, [table[0]] * 64)
    for code, value in enumerate(table[1:], 1):
        found = builder.icmp_unsigned("==", codes, ir.Constant(u8x64.llvm, [code] * 64))
        result = builder.select(found, ir.Constant(u8x64.llvm, [value] * 64), result)
    return result


def make_lookup(*table):
    """An intrinsic that replaces codes 0 to 15 by the bytes in `table`."""
    return operation(u8x64, u8x64)(lambda builder, codes: lookup_bytes(builder, list(table), codes))


# ---- threads --------------------------------------------------------------------------------------------------------


@operation(types.int64, types.int64)
def atomic_load(builder, address):
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8, typ=I64)


@operation(None, types.int64, types.int64)
def atomic_store(builder, address, value):
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@operation(types.int64, types.int64, types.int64)
def atomic_add(builder, address, value):
    """Add; return what was there before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@operation(types.boolean, types.int64, types.int64, types.int64)
def atomic_replace(builder, address, expected, value):
    """Store `value` if `expected` is there; tell whether it was."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@operation(None)
def cpu_pause(builder):
    """Tell the core that this is a waiting loop; an ARM takes its time for a barrier, and none for what is a hint."""
    if "sse2" in cpu_features():
        llvm_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    if "neon" in cpu_features():
        llvm_call(builder, "llvm.aarch64.isb", ir.VoidType(), [I32(15)])


@operation(types.int64)
def cycles(builder):
    """The time stamp counter, which runs at a constant rate; 0 where programs may not read one."""
    if "sse2" in cpu_features():
        return llvm_call(builder, "llvm.readcyclecounter", I64, [])
    return read_register(builder, "cntvct_el0") if "neon" in cpu_features() else I64(0)


def read_register(builder, name):
    """A system register of an ARM."""
    function_type = ir.FunctionType(I64, [ir.MetaDataType()])
    read = cgutils.get_or_insert_function(builder.module, function_type, "llvm.read_volatile_register.i64")
    return builder.call(read, [builder.module.add_metadata([name])])


@operation(types.int64)
def slice_cycles(builder):
    """Cycles that a thread runs before it offers its processor: 1 to 2 ms, less than a time slice.

    Beside a busy process, decode of a 1.2 B model keeps 0.65 of its speed with this and 0.57 without. An ARM counts
    in a clock of its own, 24 MHz to 1 GHz.
    """
    if "neon" in cpu_features():
        return builder.udiv(read_register(builder, "cntfrq_el0"), I64(700))
    return I64(4_000_000)


@operation(None, types.int64)
def call_address(builder, function):
    """Call void function(void) by its address."""
    builder.call(builder.inttoptr(function, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@operation(None, types.int64, types.int64, types.int64, types.int64, types.int64)
def call_kernel(builder, function, arguments, part, parts, thread):
    """Call a kernel by its address."""
    kernel = ir.FunctionType(ir.VoidType(), [I64] * 4)
    builder.call(builder.inttoptr(function, kernel.as_pointer()), [arguments, part, parts, thread])
