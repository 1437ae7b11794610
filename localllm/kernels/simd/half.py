"""Conversion between 16-bit and 32-bit floats, as LLVM instructions: of a scalar, or of each lane of a vector.

The 16 bits are passed as integers. Most CPUs have instructions for float16; on the others LLVM would call functions
that do not exist when kernels are loaded, so there are replacements.
"""

from llvmlite import ir

from localllm.kernels.machine import this_lane

I16, I32, F16, F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


def like(value, element):
    """Return the type of `value` with another element type: a vector of as many elements, or a scalar."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def constant_like(value, scalar):
    """Return the constant `scalar` in the type of `value`, in every lane."""
    return ir.Constant(value.type, [scalar] * value.type.count if isinstance(value.type, ir.VectorType) else scalar)


def widen_bf16(builder, half):
    """Convert bfloat16, which is the upper half of a float32, to float32."""
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
    """Convert float16 to float32."""
    if this_lane().has_instructions("f16c"):
        return builder.fpext(builder.bitcast(bits, like(bits, F16)), like(bits, F32))
    return widen_half_anywhere(builder, bits)


def widen_half_anywhere(builder, bits):
    """Convert float16 to float32 without an instruction for it.

    Moved to their positions in a float32, exponent and fraction give a number 2 ** 112 times too small, subnormal or
    not. The largest exponent stands for infinity and NaN.
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
    if this_lane().has_instructions("f16c"):
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
