"""The dot product of bytes, by the best instructions that the CPU has."""

from functools import reduce

from llvmlite import ir

from localllm.kernels.machine import this_lane
from localllm.kernels.simd.half import constant_like
from localllm.kernels.simd.vectors import (
    I16,
    I32,
    MIXED_DOT,
    MULTIPLY_BYTES,
    MULTIPLY_WORDS,
    SIGN_BYTES,
    SIGNED_DOT,
    call_in_parts,
    i32x16,
    in_parts,
    llvm_call,
    operation,
    slice_of,
    u8x64,
    widest,
)


def dot_vnni_512(builder, accumulator, unsigned, signed):
    return llvm_call(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, [accumulator, unsigned, signed])


def dot_words_vnni_512(builder, accumulator, x, y):
    """Add 2 products of signed words of 16 bits to each lane; x and y are given as bytes."""
    x, y = (builder.bitcast(value, ir.VectorType(I16, 32)) for value in (x, y))
    return llvm_call(builder, "llvm.x86.avx512.vpdpwssd.512", i32x16.llvm, [accumulator, x, y])


def dot_vnni_256(builder, accumulator, unsigned, signed):
    variant = "avxvnni", 2, "llvm.x86.avx512.vpdpbusd.256"  # LLVM's name for AVX-VNNI's instruction, too
    return call_in_parts(builder, variant, i32x16.llvm, [accumulator, unsigned, signed])


def dot_bytes(builder, accumulator, unsigned, signed):
    """Multiply pairs of bytes and add them to words of 16 bits, then pairs of words to 32.

    The words would saturate, so the top bits of the unsigned bytes are multiplied separately (-128 * 128 * 2 just
    fits). LLVM leaves out the multiplication with what it knows to be zero: see `splits_dot`.
    """
    for mask in (0x7F, 0x80):
        masked = builder.and_(unsigned, ir.Constant(u8x64.llvm, [mask] * 64))
        words = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [masked, signed])
        accumulator = builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))
    return accumulator


def dots_in_words(builder, accumulator, pairs, largest):
    """Compute several dot products at once, of unsigned bytes up to `largest` and signed ones.

    If words of 16 bits can hold the sums of all pairs of bytes, they are added before they become 32.
    """
    dot = dot_variant(largest)
    if dot is not dot_bytes or 2 * 128 * largest * len(pairs) > 0x7FFF:
        for unsigned, signed in pairs:
            accumulator = dot(builder, accumulator, unsigned, signed)
        return accumulator
    products = [call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [*pair]) for pair in pairs]
    words = reduce(builder.add, products)
    return builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))


def dot_signed_bytes(builder, accumulator, x, y):
    """Compute dot products of signed bytes, y above -128, with half the work.

    The magnitudes of x are multiplied by y with the signs of x.
    """
    sizes = llvm_call(builder, "llvm.abs.v64i8", u8x64.llvm, [x, ir.IntType(1)(0)])
    y = call_in_parts(builder, widest(SIGN_BYTES), u8x64.llvm, [y, x])
    pairs = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [sizes, y])
    return builder.add(accumulator, multiply_words(builder, pairs, constant_like(pairs, 1)))


def dot_generic(builder, accumulator, unsigned, signed):
    """Compute dot products by words of 16 bits: first the even bytes, then the odd ones."""
    words = ir.VectorType(I16, 32)
    x, y, eight = builder.bitcast(unsigned, words), builder.bitcast(signed, words), ir.Constant(words, [8] * 32)
    even = builder.and_(x, constant_like(x, 255)), builder.ashr(builder.shl(y, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(y, eight)
    sums = builder.add(multiply_words(builder, *even), multiply_words(builder, *odd))
    return builder.add(accumulator, sums)


def dot_neon_mixed(builder, accumulator, unsigned, signed):
    return call_in_parts(builder, MIXED_DOT, i32x16.llvm, [accumulator, unsigned, signed])


def dot_neon_signed(builder, accumulator, x, y):
    """Compute the dot product of signed bytes."""
    if "dotprod" in this_lane().features:
        return call_in_parts(builder, SIGNED_DOT, i32x16.llvm, [accumulator, x, y])
    return in_parts(builder, dot_neon_16, 4, [accumulator, x, y])


def dot_neon_16(builder, accumulator, x, y):
    """Multiply 16 signed bytes without a dot instruction: 16-bit products are added in pairs, then these sums."""
    sums = []
    for start in (0, 8):
        halves = [slice_of(builder, value, start, start + 8) for value in (x, y)]
        products = llvm_call(builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), halves)
        sums.append(llvm_call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", accumulator.type, [products]))
    return builder.add(accumulator, llvm_call(builder, "llvm.aarch64.neon.addp.v4i32", accumulator.type, sums))


def dot_neon_unsigned(builder, accumulator, unsigned, signed):
    """Multiply unsigned bytes less 128 as signed ones.

    128 times the sum of the signed ones, which many rows share, is added again.
    """
    less = builder.xor(unsigned, constant_like(unsigned, 128))
    others = dot_neon_signed(builder, constant_like(accumulator, 0), constant_like(signed, 1), signed)
    bias = builder.shl(others, constant_like(others, 7))
    return builder.add(dot_neon_signed(builder, accumulator, less, signed), bias)


def multiply_words(builder, x, y):
    """Compute x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1] of 32 signed words: i32x16."""
    if widest(MULTIPLY_WORDS):
        return call_in_parts(builder, widest(MULTIPLY_WORDS), i32x16.llvm, [x, y])

    def every_second(value, first):
        return builder.sext(slice_of(builder, value, first, 32, 2), i32x16.llvm)

    return builder.add(*(builder.mul(every_second(x, first), every_second(y, first)) for first in (0, 1)))


def multiply_pairs(builder, x, y):
    """Multiply 16 words by 16 others, and add neighbouring products: 8 sums."""
    return llvm_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [x, y])


def multiplies_words():
    """Return whether words are what the CPU multiplies fastest: it has AVX2, but no dot product of bytes."""
    return dot_variant() is dot_bytes and {"avx2", "f16c"} <= this_lane().features


def dot_variant(largest=255):
    """Return the emitter for the target CPU, for unsigned bytes up to `largest`, if it helps to know that."""
    features = this_lane().features
    if "neon" in features:
        return dot_neon_mixed if "i8mm" in features else dot_neon_signed if largest < 128 else dot_neon_unsigned
    if {"avx512vnni", "avx512bw"} <= features:
        return dot_vnni_512
    if "avxvnni" in features:
        return dot_vnni_256
    return dot_bytes if widest(MULTIPLY_BYTES) else dot_generic


def splits_dot():
    """Return whether a dot product comes in two parts, one of which suffices for signed bytes or unsigned below 128."""
    return dot_variant() in (dot_bytes, dot_neon_unsigned)


def wants_signed_codes():
    """Return whether unsigned bytes are best made signed ones when they are unpacked."""
    return dot_variant() is dot_neon_unsigned


def signed_dot_variant():
    """Return the emitter of the dot product of signed bytes, the second operand's above -128.

    None if it is not worth using.
    """
    if "neon" in this_lane().features:
        return dot_neon_signed
    return dot_signed_bytes if splits_dot() else None


def make_dot(largest):
    """Return an intrinsic (accumulator, x, y) that adds 4 products of bytes to each lane.

    x is unsigned and at most `largest`, y is signed.
    """
    return operation(i32x16, i32x16, u8x64, u8x64)(dot_variant(largest))
