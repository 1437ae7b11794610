"""Codes as words of 16 bits, in the order in which shifts and masks alone make them of a block's bytes.

For CPUs that multiply pairs of words, but have no dot product of bytes (AVX2): see row_words.py. Of each run of 32
weights the even ones come first, then the odd ones; a word holds two bytes of the file.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from localllm.kernels.simd import I64, load_value
from localllm.kernels.simd.half import constant_like
from localllm.kernels.simd.vectors import I16
from localllm.quant.layouts import LAYOUTS

WORDS = ir.VectorType(I16, 16)
Pair = tuple[Any, Any]  # the even weights of a run, and the odd ones
Q4, Q5, Q6 = (LAYOUTS[name] for name in ("Q4_K", "Q5_K", "Q6_K"))


def load_words(builder, address, offset):
    return load_value(builder, builder.add(address, I64(offset)), WORDS)


def moved(builder, words, by):
    """Bits shifted up, or down if `by` is negative."""
    if by == 0:
        return words
    return builder.shl(words, constant_like(words, by)) if by > 0 else builder.lshr(words, constant_like(words, -by))


def masked(builder, words, mask):
    return builder.and_(words, constant_like(words, mask))


def split(builder, words) -> Pair:
    """The bytes of a run."""
    return masked(builder, words, 255), moved(builder, words, -8)


def q4_k(builder, address) -> Iterator[Pair]:
    """Two runs share 32 bytes: low nibbles, high nibbles."""
    for place in range(Q4.codes[0].at, Q4.codes[0].at + 128, 32):
        words = load_words(builder, address, place)
        yield masked(builder, words, 15), masked(builder, moved(builder, words, -8), 15)
        yield masked(builder, moved(builder, words, -4), 15), moved(builder, words, -12)


def q5_k(builder, address) -> Iterator[Pair]:
    """The same, and bit number `run` of 32 bytes that are all runs'."""
    bits = load_words(builder, address, Q5.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q5.codes[0].at + run // 2 * 32)
        low = masked(builder, moved(builder, words, -4 * (run % 2)), 0x0F0F)
        yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - run), 0x1010)))


def q6_k(builder, address) -> Iterator[Pair]:
    """Of each half: the nibbles of two runs in 32 bytes, and two bits of four runs in 32 others."""
    for half in (0, 1):
        bits = load_words(builder, address, Q6.codes[1].at + 32 * half)
        for run in range(4):
            words = load_words(builder, address, Q6.codes[0].at + 64 * half + 32 * (run % 2))
            low = masked(builder, moved(builder, words, -4 * (run // 2)), 0x0F0F)
            yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - 2 * run), 0x3030)))


READERS: dict[str, Callable[[Any, Any], Iterator[Pair]]] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
