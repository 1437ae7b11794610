"""Vector types for Numba, and helpers that emit LLVM instructions on them."""

import math

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from localllm.kernels.machine import this_lane

# Numba links a helper into its caller after LLVM has prepared it for the machine. One of the preparations turns an
# address that is a sum of integers into an offset from either of them, "null + offset" if the caller knows that one to
# be zero, and LLVM deletes what reads from there (seen with LLVM 22: Q4_K became an empty function). This keeps sums.
llvm.set_option("localllm", "-addr-sink-using-gep=false")

if "neon" in this_lane().features:  # LLVM does not report all features of an ARM to Numba
    config.CPU_FEATURES = this_lane().feature_string  # type: ignore[attr-defined]

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
    """Numba's representation of a vector: one LLVM value."""

    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


u8x8, u8x16, u8x32, u8x64 = (Vector(f"u8x{lanes}", I8, lanes) for lanes in (8, 16, 32, 64))
i32x16 = Vector("i32x16", I32, 16)
f32x2, f32x8, f32x16 = (Vector(f"f32x{lanes}", F32, lanes) for lanes in (2, 8, 16))


def llvm_call(builder, name, result, arguments):
    """Emit a call of the LLVM intrinsic or C function `name`; result: its LLVM type."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def splat_value(builder, vector_type, scalar):
    """Return a vector with `scalar` in every lane."""
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, vector_type.count), None))


def slice_of(builder, value, start, stop, step=1):
    """Return the lanes value[start:stop:step] of a vector."""
    lanes = [*range(start, stop, step)]
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def shuffled(builder, x, y, order):
    """Return the lanes `order` of two vectors of n lanes each: 0 to n - 1 are those of x, n to 2 n - 1 those of y."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), [*order]))


# Variants of vector instructions: the CPU feature, the number of parts that 64 bytes are split into, LLVM's name.
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


def widest(variants):
    """Return the first of `variants` that the CPU has; None if it has none."""
    return next((variant for variant in variants if variant[0] in this_lane().features), None)


def call_in_parts(builder, variant, result, arguments):
    """Call a variant of an instruction on vectors of 64 bytes, part by part.

    variant: see MULTIPLY_BYTES; result: LLVM's type of the whole result.
    """
    _, parts, name = variant
    part = ir.VectorType(result.element, result.count // parts)
    return in_parts(builder, lambda builder, *values: llvm_call(builder, name, part, values), parts, arguments)


def in_parts(builder, emit, parts, arguments):
    """Split the arguments into `parts` parts, apply `emit` to each, and concatenate the results in a vector."""
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
    """Return the members of a tuple whose members have one type."""
    return [builder.extract_value(value, i) for i in range(value.type.count)]


def as_tuple(builder, values):
    """Make a tuple of values of one type."""
    result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        result = builder.insert_value(result, value, i)
    return result


def operation(result, *arguments):
    """Decorate an emitter, emit(builder, *values) -> value, to make it an intrinsic.

    result, arguments: its Numba types; None: no result.
    """

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
