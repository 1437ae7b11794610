"""From planes (planes.py) to what products and unpacking need of a unit of 32 weights.

For each format a function (row, units, unit) -> codes, scales, minimums: of the unit's number `unit` in a row of
`units`. Codes are 8 words of 4 signed bytes, in order; scales and minimums are of the first 16 weights and the others:

    weight = scale * code + minimum

Codes that are centred on zero are in the high bits of their bytes, where the sign is free: the topmost bit flipped. The
scales are smaller by as much, a power of two.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import float32, int32

from localllm.kernels.cuda.device import (
    bits,
    device,
    f16_value,
    f32_value,
    load_2i32,
    load_4i32,
    load_i32,
    load_u8,
    load_u16,
    permute,
    signed_byte,
    stream_2i32,
    stream_4i32,
)
from localllm.kernels.cuda.planes import offset

NOTHING = float32(0)
SIGNS = 0x80808080
QUARTER, EIGHTH, SIXTEENTH, THIRTY_SECOND = (float32(1 / n) for n in (4, 8, 16, 32))


@device
def number_of(integer):
    """As float32; conversions from int64, which Numba makes of all integers, take several instructions."""
    return float32(int32(integer))


@device
def nibbles(q, shift, mask, flipped):
    """8 words out of 4: the low halves of their bytes, then the high ones, shifted right by `shift`, or left by -shift,
    when they come from the high halves, by 4 less from the low ones."""
    low = shift - 4
    return (
        bits(q[0], low, mask) ^ flipped,
        bits(q[1], low, mask) ^ flipped,
        bits(q[2], low, mask) ^ flipped,
        bits(q[3], low, mask) ^ flipped,
        bits(q[0], shift, mask) ^ flipped,
        bits(q[1], shift, mask) ^ flipped,
        bits(q[2], shift, mask) ^ flipped,
        bits(q[3], shift, mask) ^ flipped,
    )


@device
def pairs(q, place, flipped):
    """8 words out of 2, each with 2 bits of every byte, at `place` (0 to 6)."""
    mask = 0x03030303 << place
    return (
        bits(q[0], -place, mask) ^ flipped,
        bits(q[0], 2 - place, mask) ^ flipped,
        bits(q[0], 4 - place, mask) ^ flipped,
        bits(q[0], 6 - place, mask) ^ flipped,
        bits(q[1], -place, mask) ^ flipped,
        bits(q[1], 2 - place, mask) ^ flipped,
        bits(q[1], 4 - place, mask) ^ flipped,
        bits(q[1], 6 - place, mask) ^ flipped,
    )


@device
def with_bits(codes, q, place):
    """A bit of q for each code, at `place` of its byte."""
    mask = 0x01010101 << place
    return (
        codes[0] ^ bits(q, -place, mask),
        codes[1] ^ bits(q, 1 - place, mask),
        codes[2] ^ bits(q, 2 - place, mask),
        codes[3] ^ bits(q, 3 - place, mask),
        codes[4] ^ bits(q, 4 - place, mask),
        codes[5] ^ bits(q, 5 - place, mask),
        codes[6] ^ bits(q, 6 - place, mask),
        codes[7] ^ bits(q, 7 - place, mask),
    )


@device
def joined(a, b):
    """Codes of which each has some bits in a and others in b."""
    return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3], a[4] ^ b[4], a[5] ^ b[5], a[6] ^ b[6], a[7] ^ b[7]


def looked_up(values):
    """A function that makes 8 words out of 4 with codes in table order: for each code one of 16 values."""
    data = [int.from_bytes(bytes(value & 0xFF for value in values[i : i + 4]), "little") for i in range(0, 16, 4)]
    a, b, c, d = data

    @device
    def four(codes, upper):
        """Those of the low 4 codes; upper: which half of the table, for each."""
        return permute(permute(a, b, codes), permute(c, d, codes), upper)

    @device
    def table(q):
        p, r = bits(q[0], 0, 0x77777777), bits(q[0], 1, 0x44444444) | 0x32103210
        s, t = bits(q[1], 0, 0x77777777), bits(q[1], 1, 0x44444444) | 0x32103210
        v, w = bits(q[2], 0, 0x77777777), bits(q[2], 1, 0x44444444) | 0x32103210
        x, y = bits(q[3], 0, 0x77777777), bits(q[3], 1, 0x44444444) | 0x32103210
        return (
            four(p, r),
            four(s, t),
            four(v, w),
            four(x, y),
            four(bits(p, 16, 0xFFFF), bits(r, 16, 0xFFFF)),
            four(bits(s, 16, 0xFFFF), bits(t, 16, 0xFFFF)),
            four(bits(v, 16, 0xFFFF), bits(w, 16, 0xFFFF)),
            four(bits(x, 16, 0xFFFF), bits(y, 16, 0xFFFF)),
        )

    return table


def finder(name, plane, size, of_block=False):
    """A function that finds a unit's part of a plane."""
    start, shift = offset(name, plane, 256), 3 if of_block else 0

    @device
    def find(row, units, unit):
        return row + (units * start >> 3) + size * (unit >> shift)

    return find


def float_of(name, plane="d", size=2, of_block=False):
    """A function that reads a float16 of a plane."""
    find = finder(name, plane, size, of_block)

    @device
    def value(row, units, unit):
        return f16_value(load_u16(find(row, units, unit)))

    return value


def floats_of(name, plane, of_block=False):
    """A function that reads two float16 of a plane."""
    find = finder(name, plane, 4, of_block)

    @device
    def values(row, units, unit):
        both = load_i32(find(row, units, unit))
        return f16_value(both & 0xFFFF), f16_value(bits(both, 16, 0xFFFF))

    return values


q4_0_d, q4_1_d, q5_0_d, q5_1_d = (
    float_of("Q4_0"),
    floats_of("Q4_1", "d_minimum"),
    float_of("Q5_0"),
    floats_of("Q5_1", "d_minimum"),
)
q5_0_bits, q5_1_bits = finder("Q5_0", "bits", 4), finder("Q5_1", "bits", 4)


@device
def q4_0(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 0, 0xF0F0F0F0, SIGNS)
    scale = q4_0_d(row, units, unit) * SIXTEENTH
    return codes, (scale, scale), (NOTHING, NOTHING)


@device
def q4_1(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = q4_1_d(row, units, unit)
    return codes, (scale, scale), (minimum, minimum)


@device
def q5_0(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 1, 0x78787878, SIGNS)
    scale = q5_0_d(row, units, unit) * EIGHTH
    return with_bits(codes, load_i32(q5_0_bits(row, units, unit)), 7), (scale, scale), (NOTHING, NOTHING)


@device
def q5_1(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = q5_1_d(row, units, unit)
    return with_bits(codes, load_i32(q5_1_bits(row, units, unit)), 4), (scale, scale), (minimum, minimum)


q8_0_last, q8_0_d = finder("Q8_0", "last_bytes", 16), float_of("Q8_0")


@device
def q8_0(row, units, unit):
    a, b = stream_4i32(row + 16 * unit), stream_4i32(q8_0_last(row, units, unit))
    scale = q8_0_d(row, units, unit)
    return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]), (scale, scale), (NOTHING, NOTHING)


q2_k_d, q2_k_scales = floats_of("Q2_K", "d_dmin", of_block=True), finder("Q2_K", "scales", 2)


@device
def q2_k(row, units, unit):
    codes = pairs(stream_2i32(row + 8 * unit), 0, 0)
    d, dmin = q2_k_d(row, units, unit)
    packed = load_u16(q2_k_scales(row, units, unit))
    scales = d * number_of(packed & 15), d * number_of(packed >> 8 & 15)
    return codes, scales, (-dmin * number_of(packed >> 4 & 15), -dmin * number_of(packed >> 12))


q3_k_bits, q3_k_high = finder("Q3_K", "bits", 4), finder("Q3_K", "high", 4, of_block=True)
q3_k_d, q3_k_scales = float_of("Q3_K", of_block=True), finder("Q3_K", "scales", 1)


@device
def q3_k(row, units, unit):
    codes = pairs(stream_2i32(row + 8 * unit), 5, SIGNS)
    codes = with_bits(codes, load_i32(q3_k_bits(row, units, unit)), 7)
    low, high = load_u8(q3_k_scales(row, units, unit)), bits(load_i32(q3_k_high(row, units, unit)), (unit & 7) << 2, 15)
    d = q3_k_d(row, units, unit) * THIRTY_SECOND
    first, second = low & 15 | (high & 3) << 4, low >> 4 | high >> 2 << 4
    return codes, (d * number_of(first - 32), d * number_of(second - 32)), (NOTHING, NOTHING)


@device
def k_factors(header, unit):
    """Scale and minimum of a unit from a header of Q4_K or Q5_K."""
    h, number = load_4i32(header), unit & 7
    scale = bits(h[1], number << 2, 15) | bits(h[3], number << 1, 3) << 4
    minimum = bits(h[2], number << 2, 15) | bits(h[3], (number << 1) + 16, 3) << 4
    d, dmin = f16_value(h[0] & 0xFFFF), f16_value(bits(h[0], 16, 0xFFFF))
    return d * number_of(scale), -dmin * number_of(minimum)


q4_k_header, q5_k_header = finder("Q4_K", "header", 16, of_block=True), finder("Q5_K", "header", 16, of_block=True)
q5_k_bits = finder("Q5_K", "bits", 4)


@device
def q4_k(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = k_factors(q4_k_header(row, units, unit), unit)
    return codes, (scale, scale), (minimum, minimum)


@device
def q5_k(row, units, unit):
    codes = nibbles(stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = k_factors(q5_k_header(row, units, unit), unit)
    return with_bits(codes, load_i32(q5_k_bits(row, units, unit)), 4), (scale, scale), (minimum, minimum)


q6_k_pairs, q6_k_scales = finder("Q6_K", "pairs", 8), finder("Q6_K", "scales", 2)
q6_k_d = float_of("Q6_K", of_block=True)


@device
def q6_k(row, units, unit):
    low = nibbles(stream_4i32(row + 16 * unit), 2, 0x3C3C3C3C, SIGNS)
    codes = joined(low, pairs(stream_2i32(q6_k_pairs(row, units, unit)), 6, 0))
    packed, d = load_u16(q6_k_scales(row, units, unit)), q6_k_d(row, units, unit) * QUARTER
    scales = d * float32(signed_byte(packed, 0)), d * float32(signed_byte(packed, 1))
    return codes, scales, (NOTHING, NOTHING)


iq4_table = looked_up((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
float_table = looked_up((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))  # twice as much as they are
iq4_nl_d, iq4_xs_header, mxfp4_exponent = (
    float_of("IQ4_NL"),
    finder("IQ4_XS", "header", 8, of_block=True),
    finder("MXFP4", "exponent", 1),
)


@device
def iq4_nl(row, units, unit):
    scale = iq4_nl_d(row, units, unit)
    return iq4_table(stream_4i32(row + 16 * unit)), (scale, scale), (NOTHING, NOTHING)


@device
def iq4_xs(row, units, unit):
    header, number = load_2i32(iq4_xs_header(row, units, unit)), unit & 7
    scale = bits(header[1], number << 2, 15) | bits(header[0], (number << 1) + 16, 3) << 4
    scale = f16_value(header[0] & 0xFFFF) * number_of(scale - 32)
    return iq4_table(stream_4i32(row + 16 * unit)), (scale, scale), (NOTHING, NOTHING)


@device
def mxfp4(row, units, unit):
    exponent = load_u8(mxfp4_exponent(row, units, unit))
    scale = f32_value(exponent - 1 << 23 if exponent > 1 else 0x200000 << exponent)  # 2^(exponent - 128)
    return float_table(stream_4i32(row + 16 * unit)), (scale, scale), (NOTHING, NOTHING)


class Unit(NamedTuple):
    """How a format's units are read, and what has to be reckoned with."""

    read: Callable
    two_scales: bool = False  # of 16 weights each
    minimums: bool = False


UNITS = {
    "Q4_0": Unit(q4_0),
    "Q4_1": Unit(q4_1, minimums=True),
    "Q5_0": Unit(q5_0),
    "Q5_1": Unit(q5_1, minimums=True),
    "Q8_0": Unit(q8_0),
    "Q2_K": Unit(q2_k, two_scales=True, minimums=True),
    "Q3_K": Unit(q3_k, two_scales=True),
    "Q4_K": Unit(q4_k, minimums=True),
    "Q5_K": Unit(q5_k, minimums=True),
    "Q6_K": Unit(q6_k, two_scales=True),
    "IQ4_NL": Unit(iq4_nl),
    "IQ4_XS": Unit(iq4_xs),
    "MXFP4": Unit(mxfp4),
}
