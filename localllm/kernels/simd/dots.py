"""The dot product of bytes, by the best instructions that the target CPU has.

An emitter adds 4 products of bytes to each lane of an i32x16: accumulator[i] += the sum of x[4 i + k] * y[4 i + k].
`dot_variant` chooses the emitter. "Words" here are 16-bit integers.
"""

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
    """Add 4 products of an unsigned and a signed byte to each lane, by AVX512-VNNI."""
    return llvm_call(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, [accumulator, unsigned, signed])


def dot_words_vnni_512(builder, accumulator, x, y):
    """Add 2 products of signed 16-bit words to each lane, by AVX512-VNNI. x and y have the type u8x64."""
    x, y = (builder.bitcast(value, ir.VectorType(I16, 32)) for value in (x, y))
    return llvm_call(builder, "llvm.x86.avx512.vpdpwssd.512", i32x16.llvm, [accumulator, x, y])


def dot_vnni_256(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane, by AVX-VNNI."""
    variant = "avxvnni", 2, "llvm.x86.avx512.vpdpbusd.256"  # LLVM's name for AVX-VNNI's instruction, too
    return call_in_parts(builder, variant, i32x16.llvm, [accumulator, unsigned, signed])


def dot_bytes(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane, without a dot product instruction (AVX2, SSSE3).

    One instruction adds pairs of products into words, another adds pairs of words into 32 bits. Words would saturate,
    so the top bits of the unsigned bytes are multiplied separately (-128 * 128 * 2 just fits). LLVM omits one of the
    two multiplications if it knows that the masked bytes are zero: see `splits_dot`.
    """
    for mask in (0x7F, 0x80):
        masked = builder.and_(unsigned, ir.Constant(u8x64.llvm, [mask] * 64))
        words = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [masked, signed])
        accumulator = builder.add(accumulator, multiply_words(builder, words, constant_like(words, 1)))
    return accumulator


def dots_in_words(builder, accumulator, pairs, largest):
    """Add the dot products of several pairs (unsigned, signed) of vectors; largest: of the unsigned bytes.

    If 16-bit words can hold the sums over all pairs, the products are added there and widened to 32 bits only once.
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
    """Add 4 products of signed bytes to each lane, with half the instructions of `dot_bytes`; y must be above -128.

    x| is multiplied by y with the sign of x.
    """
    sizes = llvm_call(builder, "llvm.abs.v64i8", u8x64.llvm, [x, ir.IntType(1)(0)])
    y = call_in_parts(builder, widest(SIGN_BYTES), u8x64.llvm, [y, x])
    pairs = call_in_parts(builder, widest(MULTIPLY_BYTES), ir.VectorType(I16, 32), [sizes, y])
    return builder.add(accumulator, multiply_words(builder, pairs, constant_like(pairs, 1)))


def dot_generic(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane by plain instructions: even bytes, then odd ones."""
    words = ir.VectorType(I16, 32)
    x, y, eight = builder.bitcast(unsigned, words), builder.bitcast(signed, words), ir.Constant(words, [8] * 32)
    even = builder.and_(x, constant_like(x, 255)), builder.ashr(builder.shl(y, eight), eight)
    odd = builder.lshr(x, eight), builder.ashr(y, eight)
    sums = builder.add(multiply_words(builder, *even), multiply_words(builder, *odd))
    return builder.add(accumulator, sums)


def dot_neon_mixed(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane, on an ARM with i8mm."""
    return call_in_parts(builder, MIXED_DOT, i32x16.llvm, [accumulator, unsigned, signed])


def dot_neon_signed(builder, accumulator, x, y):
    """Add 4 products of signed bytes to each lane, on an ARM."""
    if "dotprod" in this_lane().features:
        return call_in_parts(builder, SIGNED_DOT, i32x16.llvm, [accumulator, x, y])
    return in_parts(builder, dot_neon_16, 4, [accumulator, x, y])


def dot_neon_16(builder, accumulator, x, y):
    """Add the products of 16 signed bytes to 4 lanes, on an ARM without a dot product instruction."""
    sums = []
    for start in (0, 8):
        halves = [slice_of(builder, value, start, start + 8) for value in (x, y)]
        products = llvm_call(builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), halves)
        sums.append(llvm_call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", accumulator.type, [products]))
    return builder.add(accumulator, llvm_call(builder, "llvm.aarch64.neon.addp.v4i32", accumulator.type, sums))


def dot_neon_unsigned(builder, accumulator, unsigned, signed):
    """Add 4 products of an unsigned and a signed byte to each lane, on an ARM that multiplies signed bytes only.

    128 is subtracted from the unsigned bytes, and 128 times the sum of the signed bytes is added. Many rows share that
    sum.
    """
    centred = builder.xor(unsigned, constant_like(unsigned, 128))
    sums = dot_neon_signed(builder, constant_like(accumulator, 0), constant_like(signed, 1), signed)
    bias = builder.shl(sums, constant_like(sums, 7))
    return builder.add(dot_neon_signed(builder, accumulator, centred, signed), bias)


def multiply_words(builder, x, y):
    """Compute x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1] of 32 signed 16-bit words each, as i32x16."""
    if widest(MULTIPLY_WORDS):
        return call_in_parts(builder, widest(MULTIPLY_WORDS), i32x16.llvm, [x, y])

    def every_second(value, first):
        return builder.sext(slice_of(builder, value, first, 32, 2), i32x16.llvm)

    return builder.add(*(builder.mul(every_second(x, first), every_second(y, first)) for first in (0, 1)))


def multiply_pairs(builder, x, y):
    """Multiply two vectors of 16 signed 16-bit words, and add neighbouring products: 8 sums of 32 bits. For AVX2."""
    return llvm_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [x, y])


def multiplies_words():
    """Return whether 16-bit words are what this CPU multiplies fastest: AVX2 without a dot product of bytes."""
    return dot_variant() is dot_bytes and {"avx2", "f16c"} <= this_lane().features


def dot_variant(largest=255):
    """Choose the emitter of the dot product for this CPU.

    largest: the largest unsigned byte, which may allow a faster one.
    """
    features = this_lane().features
    if "neon" in features:
        return dot_neon_mixed if "i8mm" in features else dot_neon_signed if largest < 128 else dot_neon_unsigned
    if {"avx512vnni", "avx512bw"} <= features:
        return dot_vnni_512
    if "avxvnni" in features:
        return dot_vnni_256
    return dot_bytes if widest(MULTIPLY_BYTES) else dot_generic


def splits_dot():
    """Return whether the dot product takes two steps, of which bytes below 128, or signed ones, need only one."""
    return dot_variant() in (dot_bytes, dot_neon_unsigned)


def wants_signed_codes():
    """Return whether codes should be unpacked to signed bytes, because this CPU multiplies only those."""
    return dot_variant() is dot_neon_unsigned


def signed_dot_variant():
    """Choose the emitter of the dot product of signed bytes for this CPU. The second operand must be above -128.

    Return None if `dot_variant` is as fast.
    """
    if "neon" in this_lane().features:
        return dot_neon_signed
    return dot_signed_bytes if splits_dot() else None


def make_dot(largest):
    """Return an intrinsic (accumulator, x, y) that adds 4 products of bytes to each lane.

    x: unsigned, at most `largest`; y: signed.
    """
    return operation(i32x16, i32x16, u8x64, u8x64)(dot_variant(largest))
