"""Readers of codes as 16-bit words, in the order that takes the fewest instructions to unpack.

For CPUs that multiply pairs of 16-bit words but have no dot product of bytes (AVX2), see gemv_int16.py. A reader yields
a row's codes in units. All codes of a unit are scaled together:

- a run of 32 weights, as two vectors: the even weights, then the odd ones (a mask and a shift separate them); or
- a pair of runs, which are half a group or half a chunk apart, as four vectors: even and odd weights of the first 16,
  then even and odd weights of the last 16; the low 128 bits are of the first run, the high 128 bits of the second.
  Products of both runs are added, converted and scaled together: 17 instructions for 64 weights of Q4_0, where one run
  after the other takes 30.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from localllm.kernels import simd
from localllm.quant.formats import BY_NAME, LAYOUTS

WORDS, FOUR = ir.VectorType(simd.I16, 16), ir.VectorType(simd.I32, 4)
HALF = ir.VectorType(simd.I8, 16)
Q2, Q3, Q4, Q5, Q6 = (LAYOUTS[f"Q{bits}_K"] for bits in range(2, 7))
BYTES = ir.VectorType(simd.I8, 32)
Codes = list[Any]  # vectors of sixteen 16-bit words


class WordReader(NamedTuple):
    """The reader of a format's codes as 16-bit words."""

    units: Callable[[Any, Any, int], Iterator[Codes]]  # (builder, address, runs) -> the codes of each unit
    in_pairs: bool = False  # whether a unit is a pair of runs
    offset: int = 0  # the code that represents zero
    factors: tuple[int, ...] = ()  # the powers of two that codes are multiplied by, for each scale; (): none


def load_words(builder, address, offset):
    return simd.load_value(builder, builder.add(address, simd.I64(offset)), WORDS)


def shift_words(builder, words, by):
    if by == 0:
        return words
    return (
        builder.shl(words, simd.constant_like(words, by))
        if by > 0
        else builder.lshr(words, simd.constant_like(words, -by))
    )


def mask_words(builder, words, mask):
    return builder.and_(words, simd.constant_like(words, mask))


def split_bytes(builder, words) -> Codes:
    return [mask_words(builder, words, 255), shift_words(builder, words, -8)]


def split_nibbles(builder, words) -> Codes:
    """Split words into four vectors of nibbles, as words.

    The first two are the low nibbles of even and of odd bytes, the others the high nibbles.
    """
    low = [mask_words(builder, shift_words(builder, words, by), 15) for by in (0, -8)]
    return [*low, mask_words(builder, shift_words(builder, words, -4), 15), shift_words(builder, words, -12)]


def extract_two_bits(builder, words, run):
    """Return the 2-bit codes of run `run` (0 to 3) as bytes; words: 32 bytes that four runs share."""
    return mask_words(builder, shift_words(builder, words, -2 * run), 0x0303)


def emit_q2_k(builder, address, _) -> Iterator[Codes]:
    """Yield the codes of a group in Q2_K, run by run, times 1, 4, 16 and 64.

    32 bytes have the codes of four runs.
    """
    for half in (0, 1):
        even = load_words(builder, address, Q2.codes[0].at + 32 * half)
        odd = shift_words(builder, even, -8)
        for run in range(4):
            yield [mask_words(builder, words, 3 << 2 * run) for words in (even, odd)]


def emit_q3_k(builder, address, _) -> Iterator[Codes]:
    """Yield the codes of Q3_K: two low bits as in Q2_K, shifted down, and bit `run` of 32 bytes."""
    bits = load_words(builder, address, Q3.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q3.codes[0].at + run // 4 * 32)
        third = mask_words(builder, shift_words(builder, bits, 2 - run), 0x0404)
        yield split_bytes(builder, builder.or_(extract_two_bits(builder, words, run % 4), third))


def emit_q4_k(builder, address, _) -> Iterator[Codes]:
    """Yield the codes of Q4_K; in 32 bytes, the low nibbles are one run and the high nibbles the next."""
    for place in range(Q4.codes[0].at, Q4.codes[0].at + 128, 32):
        words = load_words(builder, address, place)
        nibbles = split_nibbles(builder, words)
        yield nibbles[:2]
        yield nibbles[2:]


def emit_q5_k(builder, address, _) -> Iterator[Codes]:
    """Yield the codes of Q5_K: nibbles as in Q4_K, and bit `run` of 32 bytes."""
    bits = load_words(builder, address, Q5.codes[1].at)
    for run in range(8):
        words = load_words(builder, address, Q5.codes[0].at + run // 2 * 32)
        low = mask_words(builder, shift_words(builder, words, -4 * (run % 2)), 0x0F0F)
        yield split_bytes(builder, builder.or_(low, mask_words(builder, shift_words(builder, bits, 4 - run), 0x1010)))


def emit_q6_k(builder, address, _) -> Iterator[Codes]:
    """Yield the codes of Q6_K; each half of the group has 4 runs.

    64 bytes have their low 4 bits, two runs in every 32 bytes, and 32 bytes the high 2 bits of all four.
    """
    for half in (0, 1):
        bits = load_words(builder, address, Q6.codes[1].at + 32 * half)
        for run in range(4):
            words = load_words(builder, address, Q6.codes[0].at + 64 * half + 32 * (run % 2))
            low = mask_words(builder, shift_words(builder, words, -4 * (run // 2)), 0x0F0F)
            yield split_bytes(
                builder, builder.or_(low, mask_words(builder, shift_words(builder, bits, 4 - 2 * run), 0x3030))
            )


def load_two(builder, address, distance):
    """Load 16 bytes at an address and 16 that are `distance` bytes later, as one register."""
    two = (simd.load_value(builder, builder.add(address, simd.I64(at)), HALF) for at in (0, distance))
    return simd.shuffle_lanes(builder, *two, range(32))


def split_signed_bytes(builder, words) -> Codes:
    eight = simd.constant_like(words, 8)
    return [builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)]


def split_halves(builder, packed):
    return [mask_words(builder, packed, 15), shift_words(builder, packed, -4)]


def add_fifth_bits(builder, nibbles, address, distance):
    """Yield `nibbles` plus 16 where the fifth bit is set: 4 bytes at an address and 4 `distance` later."""
    words = (simd.load_value(builder, builder.add(address, simd.I64(at)), simd.I32) for at in (0, distance))
    bits = ir.Constant(ir.VectorType(simd.I32, 8), ir.Undefined)
    for lane, word in zip((0, 4), words, strict=True):
        bits = builder.insert_element(bits, word, simd.I32(lane))
    bits = builder.bitcast(bits, BYTES)
    flags = ir.Constant(BYTES, [1, 2, 4, 8, 16, 32, 64, -128] * 4)
    for part, codes in enumerate(nibbles):
        places = [16 * half + 2 * part + i // 8 for half in (0, 1) for i in range(16)]
        own_bits = builder.and_(simd.shuffle_lanes(builder, bits, bits, places), flags)
        is_set = builder.sext(builder.icmp_signed("==", own_bits, flags), BYTES)
        yield builder.or_(codes, mask_words(builder, is_set, 16))


def build_code_emitter(layout, distance):
    low, *high = layout.codes
    table = layout.values and ir.Constant(BYTES, [value - min(layout.values) for value in layout.values] * 2)

    def codes(builder, address) -> Codes:
        place = builder.add(address, simd.I64(low.at))
        if layout.bits == 8:
            halves = (load_two(builder, builder.add(place, simd.I64(at)), distance) for at in (0, 16))
            return [word for half in halves for word in split_signed_bytes(builder, builder.bitcast(half, WORDS))]
        packed = load_two(builder, place, distance)
        if not (high or table):
            return split_nibbles(builder, builder.bitcast(packed, WORDS))
        parts = split_halves(builder, packed)
        if table:
            parts = [simd.llvm_call(builder, "llvm.x86.avx2.pshuf.b", BYTES, [table, part]) for part in parts]
        else:
            parts = [*add_fifth_bits(builder, parts, builder.add(address, simd.I64(high[0].at)), distance)]
        return [word for part in parts for word in split_bytes(builder, builder.bitcast(part, WORDS))]

    return codes


def build_pair_reader(name, run_bytes):
    """Build the reader of a format whose runs are `run_bytes` apart, each with its codes in natural order."""
    layout = LAYOUTS[name]

    def units(builder, address, runs) -> Iterator[Codes]:
        codes = build_code_emitter(layout, runs // 2 * run_bytes)
        for run in range(runs // 2):
            yield codes(builder, builder.add(address, simd.I64(run * run_bytes)))

    offset = -min(layout.values) if layout.values else 0 if layout.bits == 8 else layout.centre
    return WordReader(units, True, offset)


@simd.operation(types.UniTuple(simd.f32x8, 2), types.int64)
def load_k_factors(builder, address):
    """Return the scales and minimums of Q4_K or Q5_K, times their float16 factors.

    They are unpacked together, to two f32x8.
    """
    block = simd.load_value(builder, address, ir.VectorType(simd.I8, 16))
    nothing = ir.Constant(block.type, None)
    first = [*range(4, 8), *range(12, 16), *range(8, 12), *range(12, 16)]
    words = builder.bitcast(simd.shuffle_lanes(builder, block, block, first), FOUR)
    words = builder.lshr(words, ir.Constant(FOUR, [0, 0, 0, 4]))
    words = builder.and_(words, ir.Constant(FOUR, [0x3F3F3F3F, 0x0F0F0F0F] * 2))
    upper = [*[16] * 4, *range(4, 8), *[16] * 4, *range(8, 12)]
    upper = builder.lshr(
        builder.bitcast(simd.shuffle_lanes(builder, block, nothing, upper), FOUR), ir.Constant(FOUR, [2] * 4)
    )
    words = builder.or_(words, builder.and_(upper, ir.Constant(FOUR, [0x30303030] * 4)))
    codes = builder.bitcast(words, block.type)
    halves = builder.bitcast(simd.slice_lanes(builder, block, 0, 8), ir.VectorType(ir.HalfType(), 4))
    factors = builder.fpext(halves, ir.VectorType(simd.F32, 4))
    scales, minimums = (
        builder.fmul(
            builder.uitofp(simd.slice_lanes(builder, codes, 8 * i, 8 * i + 8), simd.f32x8.llvm),
            simd.shuffle_lanes(builder, factors, factors, [i] * 8),
        )
        for i in (0, 1)
    )
    return simd.as_tuple(builder, [scales, builder.fneg(minimums)])


READERS = {
    "Q2_K": WordReader(emit_q2_k, factors=(1, 1, 4, 4, 16, 16, 64, 64) * 2),
    "Q3_K": WordReader(emit_q3_k, offset=4),
    "Q4_K": WordReader(emit_q4_k),
    "Q5_K": WordReader(emit_q5_k),
    "Q6_K": WordReader(emit_q6_k, offset=32),
    "IQ4_XS": build_pair_reader("IQ4_XS", 16),
    **{name: build_pair_reader(name, each.bytes) for name, each in BY_NAME.items() if each.family == "blocks_of_32"},
}
