"""Codes as 16-bit words, in the order in which shifts and masks alone make them of a block's bytes.

For CPUs that multiply pairs of words, but have no dot product of bytes (AVX2): see row_words.py. Of each run of 32
weights the even ones come first, then the odd ones; a word holds two bytes of the file.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types

from localllm.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    as_tuple,
    f32x8,
    llvm_call,
    load_value,
    operation,
    shuffled,
    slice_of,
)
from localllm.kernels.simd.half import constant_like
from localllm.quant.layouts import LAYOUTS

WORDS, FOUR = ir.VectorType(I16, 16), ir.VectorType(I32, 4)
Pair = tuple[Any, Any]  # the even weights of a run, and the odd ones
Q4, Q5, Q6, IQ4 = (LAYOUTS[name] for name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))
BYTES = ir.VectorType(I8, 32)


def load_words(builder, address, offset):
    return load_value(builder, builder.add(address, I64(offset)), WORDS)


def moved(builder, words, by):
    """Return bits shifted up, or down if `by` is negative."""
    if by == 0:
        return words
    return builder.shl(words, constant_like(words, by)) if by > 0 else builder.lshr(words, constant_like(words, -by))


def masked(builder, words, mask):
    return builder.and_(words, constant_like(words, mask))


def split(builder, words) -> Pair:
    """Return the bytes of a run."""
    return masked(builder, words, 255), moved(builder, words, -8)


def q4_k(builder, address) -> Iterator[Pair]:
    """Decode runs, two of which share 32 bytes: low nibbles, high nibbles."""
    for place in range(Q4.codes[0].at, Q4.codes[0].at + 128, 32):
        words = load_words(builder, address, place)
        yield masked(builder, words, 15), masked(builder, moved(builder, words, -8), 15)
        yield masked(builder, moved(builder, words, -4), 15), moved(builder, words, -12)


def q5_k(builder, address) -> Iterator[Pair]:
    """Yield words of Q5_K: as of Q4_K, with bit `run` of 32 bytes that all runs share."""
    bits = load_words(builder, address, Q5.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q5.codes[0].at + run // 2 * 32)
        low = masked(builder, moved(builder, words, -4 * (run % 2)), 0x0F0F)
        yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - run), 0x1010)))


def q6_k(builder, address) -> Iterator[Pair]:
    """Decode of each half the nibbles of two runs in 32 bytes, and two bits of four runs in 32 others."""
    for half in (0, 1):
        bits = load_words(builder, address, Q6.codes[1].at + 32 * half)
        for run in range(4):
            words = load_words(builder, address, Q6.codes[0].at + 64 * half + 32 * (run % 2))
            low = masked(builder, moved(builder, words, -4 * (run // 2)), 0x0F0F)
            yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - 2 * run), 0x3030)))


def iq4_xs(builder, address):
    """Look up the nibbles of a run, of 16 bytes first the low ones; 127 is added, so that no value is negative."""
    table = ir.Constant(BYTES, [value + 127 for value in IQ4.values] * 2)
    for run in range(8):
        place = builder.add(address, I64(IQ4.codes[0].at + 16 * run))
        packed = load_value(builder, place, ir.VectorType(I8, 16))
        low, high = builder.and_(packed, constant_like(packed, 15)), builder.lshr(packed, constant_like(packed, 4))
        nibbles = shuffled(builder, low, high, range(32))
        values = llvm_call(builder, "llvm.x86.avx2.pshuf.b", BYTES, [table, nibbles])
        yield split(builder, builder.bitcast(values, WORDS))


@operation(types.UniTuple(f32x8, 2), types.int64)
def k_factors(builder, address):
    """Return the scales and minimums of Q4_K and Q5_K, all in one register.

    Their 12 bytes follow two factors of float16.
    """
    block = load_value(builder, address, ir.VectorType(I8, 16))
    nothing = ir.Constant(block.type, None)
    first = [*range(4, 8), *range(12, 16), *range(8, 12), *range(12, 16)]
    words = builder.bitcast(shuffled(builder, block, block, first), FOUR)
    words = builder.lshr(words, ir.Constant(FOUR, [0, 0, 0, 4]))
    words = builder.and_(words, ir.Constant(FOUR, [0x3F3F3F3F, 0x0F0F0F0F] * 2))
    upper = [*[16] * 4, *range(4, 8), *[16] * 4, *range(8, 12)]
    upper = builder.lshr(builder.bitcast(shuffled(builder, block, nothing, upper), FOUR), ir.Constant(FOUR, [2] * 4))
    words = builder.or_(words, builder.and_(upper, ir.Constant(FOUR, [0x30303030] * 4)))
    codes = builder.bitcast(words, block.type)
    halves = builder.bitcast(slice_of(builder, block, 0, 8), ir.VectorType(ir.HalfType(), 4))
    factors = builder.fpext(halves, ir.VectorType(F32, 4))
    scales, minimums = (
        builder.fmul(
            builder.uitofp(slice_of(builder, codes, 8 * i, 8 * i + 8), f32x8.llvm),
            shuffled(builder, factors, factors, [i] * 8),
        )
        for i in (0, 1)
    )
    return as_tuple(builder, [scales, builder.fneg(minimums)])


READERS: dict[str, Callable[[Any, Any], Iterator[Pair]]] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_XS": iq4_xs}
