"""Codes as 16-bit words, in the order that takes the fewest instructions to unpack from a block's bytes.

For CPUs that multiply pairs of words, but have no dot product of bytes (AVX2): see gemv_int16.py. A reader gives them
in units, each of which gets its scales at once:

- a run of 32 weights: first the even ones, then the odd ones, which shifts and masks split from each other; or
- two runs, half a group or half a chunk apart, one in each half of a register (128 bits). The even weights of the first
  16 of each run come first, then the odd ones of these; the last 16 follow in the same order. Products of both runs
  are added, converted and scaled together: 17 instructions for 64 weights of Q4_0; one run after the other takes 30.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

WORDS, FOUR = ir.VectorType(I16, 16), ir.VectorType(I32, 4)
HALF = ir.VectorType(I8, 16)
Q2, Q3, Q4, Q5, Q6 = (LAYOUTS[f"Q{bits}_K"] for bits in range(2, 7))
BYTES = ir.VectorType(I8, 32)
Codes = list[Any]  # vectors of words


class Reader(NamedTuple):
    """The functions that read a format's codes as words."""

    units: Callable[[Any, Any, int], Iterator[Codes]]  # (builder, address, runs) -> the codes of each unit
    in_pairs: bool = False  # a unit is two runs
    offset: int = 0  # what the codes are too large by
    factors: tuple[int, ...] = ()  # what they are multiples of, for each scale; none: of 1


def load_words(builder, address, offset):
    return load_value(builder, builder.add(address, I64(offset)), WORDS)


def moved(builder, words, by):
    """Return bits shifted up, or down if `by` is negative."""
    if by == 0:
        return words
    return builder.shl(words, constant_like(words, by)) if by > 0 else builder.lshr(words, constant_like(words, -by))


def masked(builder, words, mask):
    return builder.and_(words, constant_like(words, mask))


def split(builder, words) -> Codes:
    """Return the even bytes and the odd ones."""
    return [masked(builder, words, 255), moved(builder, words, -8)]


def nibbles_of(builder, words) -> Codes:
    """Return the low nibbles of even and of odd bytes, and the high ones."""
    low = [masked(builder, moved(builder, words, by), 15) for by in (0, -8)]
    return [*low, masked(builder, moved(builder, words, -4), 15), moved(builder, words, -12)]


def pairs_of_bits(builder, words, run):
    """Return the two bits of a run, of four that share 32 bytes, as bytes."""
    return masked(builder, moved(builder, words, -2 * run), 0x0303)


def q2_k(builder, address, _) -> Iterator[Codes]:
    """Yield words of Q2_K: for each half, two bits of four runs in 32 bytes, not shifted: times 1, 4, 16 and 64."""
    for half in (0, 1):
        even = load_words(builder, address, Q2.codes[0].at + 32 * half)
        odd = moved(builder, even, -8)
        for run in range(4):
            yield [masked(builder, words, 3 << 2 * run) for words in (even, odd)]


def q3_k(builder, address, _) -> Iterator[Codes]:
    """Yield words of Q3_K: two bits as in Q2_K, with bit `run` of 32 bytes that all runs share."""
    bits = load_words(builder, address, Q3.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q3.codes[0].at + run // 4 * 32)
        third = masked(builder, moved(builder, bits, 2 - run), 0x0404)
        yield split(builder, builder.or_(pairs_of_bits(builder, words, run % 4), third))


def q4_k(builder, address, _) -> Iterator[Codes]:
    """Yield words of Q4_K: of each two runs that share 32 bytes, the low nibbles, then the high nibbles."""
    for place in range(Q4.codes[0].at, Q4.codes[0].at + 128, 32):
        words = load_words(builder, address, place)
        nibbles = nibbles_of(builder, words)
        yield nibbles[:2]
        yield nibbles[2:]


def q5_k(builder, address, _) -> Iterator[Codes]:
    """Yield words of Q5_K: nibbles as in Q4_K, and a fifth bit: bit number `run` of 32 bytes for all runs."""
    bits = load_words(builder, address, Q5.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q5.codes[0].at + run // 2 * 32)
        low = masked(builder, moved(builder, words, -4 * (run % 2)), 0x0F0F)
        yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - run), 0x1010)))


def q6_k(builder, address, _) -> Iterator[Codes]:
    """Yield words of Q6_K: for each half, nibbles of two runs in 32 bytes, and two bits of four runs in 32 others."""
    for half in (0, 1):
        bits = load_words(builder, address, Q6.codes[1].at + 32 * half)
        for run in range(4):
            words = load_words(builder, address, Q6.codes[0].at + 64 * half + 32 * (run % 2))
            low = masked(builder, moved(builder, words, -4 * (run // 2)), 0x0F0F)
            yield split(builder, builder.or_(low, masked(builder, moved(builder, bits, 4 - 2 * run), 0x3030)))


def load_two(builder, address, distance):
    """Return 16 bytes and 16 others, in one register."""
    two = (load_value(builder, builder.add(address, I64(at)), HALF) for at in (0, distance))
    return shuffled(builder, *two, range(32))


def signed_bytes(builder, words) -> Codes:
    """Return the even and the odd bytes of words, sign-extended."""
    eight = constant_like(words, 8)
    return [builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)]


def low_and_high(builder, packed):
    """Return nibbles as bytes."""
    return [masked(builder, packed, 15), moved(builder, packed, -4)]


def with_fifth_bits(builder, nibbles, address, distance):
    """Add 16 to the bytes whose bit is set: of 4 bytes at an address, and of 4 others."""
    words = (load_value(builder, builder.add(address, I64(at)), I32) for at in (0, distance))
    bits = ir.Constant(ir.VectorType(I32, 8), ir.Undefined)
    for lane, word in zip((0, 4), words, strict=True):
        bits = builder.insert_element(bits, word, I32(lane))
    bits = builder.bitcast(bits, BYTES)
    flags = ir.Constant(BYTES, [1, 2, 4, 8, 16, 32, 64, -128] * 4)
    for part, codes in enumerate(nibbles):
        places = [16 * half + 2 * part + i // 8 for half in (0, 1) for i in range(16)]
        mine = builder.and_(shuffled(builder, bits, bits, places), flags)
        is_set = builder.sext(builder.icmp_signed("==", mine, flags), BYTES)
        yield builder.or_(codes, masked(builder, is_set, 16))


def make_codes(layout, distance):
    """Make a function (builder, address, bytes to the other run) -> the codes of two runs."""
    low, *high = layout.codes
    table = layout.values and ir.Constant(BYTES, [value - min(layout.values) for value in layout.values] * 2)

    def codes(builder, address) -> Codes:
        place = builder.add(address, I64(low.at))
        if layout.bits == 8:
            halves = (load_two(builder, builder.add(place, I64(at)), distance) for at in (0, 16))
            return [word for half in halves for word in signed_bytes(builder, builder.bitcast(half, WORDS))]
        packed = load_two(builder, place, distance)
        if not (high or table):
            return nibbles_of(builder, builder.bitcast(packed, WORDS))
        parts = low_and_high(builder, packed)
        if table:
            parts = [llvm_call(builder, "llvm.x86.avx2.pshuf.b", BYTES, [table, part]) for part in parts]
        else:
            parts = [*with_fifth_bits(builder, parts, builder.add(address, I64(high[0].at)), distance)]
        return [word for part in parts for word in split(builder, builder.bitcast(part, WORDS))]

    return codes


def runs_in_pairs(name, run_bytes):
    """Return the reader of a format whose runs lie `run_bytes` apart, each with its codes in natural order."""
    layout = LAYOUTS[name]

    def units(builder, address, runs) -> Iterator[Codes]:
        codes = make_codes(layout, runs // 2 * run_bytes)
        for run in range(runs // 2):
            yield codes(builder, builder.add(address, I64(run * run_bytes)))

    offset = -min(layout.values) if layout.values else 0 if layout.bits == 8 else layout.centre
    return Reader(units, True, offset)


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


BLOCKS_OF_32 = "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"
READERS = {
    "Q2_K": Reader(q2_k, factors=(1, 1, 4, 4, 16, 16, 64, 64) * 2),
    "Q3_K": Reader(q3_k, offset=4),
    "Q4_K": Reader(q4_k),
    "Q5_K": Reader(q5_k),
    "Q6_K": Reader(q6_k, offset=32),
    "IQ4_XS": runs_in_pairs("IQ4_XS", 16),
    **{name: runs_in_pairs(name, BY_NAME[name].bytes) for name in BLOCKS_OF_32},
}
