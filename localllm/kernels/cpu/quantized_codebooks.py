"""How the formats that name several weights at once yield them to the int8 kernels.

The i-quants' rows of 8 or 4 weights ("octets", "quads") come ready from tables: grid value + offset, a byte each. A
minus sign reflects a code at the offset. That is 32 or 64 loads for a group, which take most of the time. TQ1_0 has
five weights to a byte; those are computed.

Layouts: see blocks_iq.py and blocks_simple.py; group_format.py says what is asked for. Octets and quads are counted
through the group, so that vector q of the codes holds octets 4 * run + q.
"""

import numpy as np

from localllm.kernels.cpu.blocks_iq import (
    IQ1_GRID,
    IQ2_S_GRID,
    IQ2_XS_GRID,
    IQ2_XXS_GRID,
    IQ3_S_GRID,
    IQ3_XXS_GRID,
)
from localllm.kernels.cpu.group_format import GroupFormat
from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.simd import (
    bytes_of,
    concatenate_u8x16,
    concatenate_u8x64,
    constant_u8,
    float_i8x16,
    float_u8x8,
    load_i64,
    load_splat_f16x8,
    load_splat_f16x16,
    load_u8,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    load_u16,
    load_u32,
    make_fields,
    make_reflect,
    make_shift,
    make_shuffle,
    make_trits,
    make_where,
    splat_f16x16,
    splat_f32x8,
    splat_f32x16,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
    u8x64_of_quads,
    u8x64_of_words,
)

STRIPES, RUNS = range(4), range(8)


def for_octets(source, order):
    """A shuffle that gives eight octets a byte of `source` each, for all their weights."""
    return make_shuffle(u8x64, source, [byte for byte in order for _ in range(8)])


# ---- rows of weights ------------------------------------------------------------------------------------------------


def packed(codes):
    """A table of codes with each row as one integer: int64 [rows] for rows of eight, int32 for rows of four."""
    return np.ascontiguousarray(codes, np.uint8).view("<i8" if codes.shape[1] == 8 else "<i4").reshape(-1)


def octets(table, row):
    """The codes of a group by octets: `row(address, octet)` of the table."""

    @inlined
    def stripe(address, q):
        return u8x64_of_quads(
            table[row(address, q)], table[row(address, 4 + q)],
            table[row(address, 8 + q)], table[row(address, 12 + q)],
            table[row(address, 16 + q)], table[row(address, 20 + q)],
            table[row(address, 24 + q)], table[row(address, 28 + q)],
        )  # fmt: skip

    return device(lambda address: (stripe(address, 0), stripe(address, 1), stripe(address, 2), stripe(address, 3)))


def quads(table, row):
    """The codes of a group by quads: `row(address, quad)` of the table."""

    @inlined
    def stripe(address, q):
        i, j = 2 * q, 2 * q + 1
        return u8x64_of_words(
            table[row(address, i)], table[row(address, j)],
            table[row(address, 8 + i)], table[row(address, 8 + j)],
            table[row(address, 16 + i)], table[row(address, 16 + j)],
            table[row(address, 24 + i)], table[row(address, 24 + j)],
            table[row(address, 32 + i)], table[row(address, 32 + j)],
            table[row(address, 40 + i)], table[row(address, 40 + j)],
            table[row(address, 48 + i)], table[row(address, 48 + j)],
            table[row(address, 56 + i)], table[row(address, 56 + j)],
        )  # fmt: skip

    return device(lambda address: (stripe(address, 0), stripe(address, 1), stripe(address, 2), stripe(address, 3)))


# ---- IQ2 and IQ3: magnitudes with signs -----------------------------------------------------------------------------

signs_0, signs_1, signs_2, signs_3 = (for_octets(u8x32, [4 * run + q for run in RUNS]) for q in STRIPES)


def signed(name, sub_block, group_bytes, grid, row, signs, scales):
    """A format with a row of `grid` for each octet or quad; the bits of `signs(address)`, u8x32, negate weights."""
    offset = int(grid.max())
    lookup = octets if grid.shape[1] == 8 else quads
    magnitudes, reflect = lookup(packed(offset + grid), row), make_reflect([1 << i for i in range(8)] * 8, 2 * offset)

    @device
    def codes(address):
        (c0, c1, c2, c3), bits = magnitudes(address), signs(address)
        return (
            reflect(c0, signs_0(bits)),
            reflect(c1, signs_1(bits)),
            reflect(c2, signs_2(bits)),
            reflect(c3, signs_3(bits)),
        )

    return GroupFormat(name, sub_block, group_bytes, codes, offset, 2 * offset, scales)


up_1, up_2, up_4 = (make_shift(u8x32, True, bits) for bits in (1, 2, 4))
topmost_bit = constant_u8(u8x32, 128)


@device
def evened(signs):
    """Bytes of 7 bits get an eighth that makes the number of ones even.

    Its sum of bits, modulo 2, gathers in a byte's topmost bit; what shifts bring from its neighbour stays below.
    """
    twos = signs ^ up_1(signs)
    fours = twos ^ up_2(twos)
    return signs | ((fours ^ up_4(fours)) & topmost_bit())


four_sevens = make_fields(7)
upper_nibbles = constant_u8(u8x32, 0xF0)
topmost_bytes = make_shuffle(u8x8, u8x32, range(3, 32, 4))


@device
def signs_of_words(words):
    """Four sign codes in each of eight words."""
    return evened(four_sevens(words))


@device
def scales_of_words(words, d):
    """d * (scale + 1/2), with the scales in the topmost nibbles of eight words: of bytes, they count 16 times."""
    return (float_u8x8(topmost_bytes(words & upper_nibbles())) + splat_f32x8(8.0)) * (d * splat_f32x8(1 / 16))


NIBBLES = 0x0F0F0F0F0F0F0F0F
alternate = make_shuffle(u8x16, u8x16, [8 * half + i for i in range(8) for half in (0, 1)])


@device
def scales_of_nibbles(address, d):
    """d * (scale + 1/2), with the scales in 16 nibbles."""
    nibbles = load_i64(address)
    scales = alternate(concatenate_u8x16(bytes_of(nibbles & NIBBLES), bytes_of((nibbles >> 4) & NIBBLES)))
    return (float_i8x16(scales) + splat_f32x16(0.5)) * d


second_words = make_shuffle(u8x32, u8x64, [8 * run + i for run in RUNS for i in range(4, 8)])


@device
def iq2_xxs_row(address, octet):
    return load_u8(address + 2 + 8 * (octet >> 2) + (octet & 3))


@device
def iq2_xxs_signs(address):
    return signs_of_words(second_words(load_u8x64(address + 2)))


@device
def iq2_xxs_scales(address):
    d = load_splat_f16x8(address) * splat_f32x8(0.25)
    return scales_of_words(second_words(load_u8x64(address + 2)), d)


odd_bytes = make_shuffle(u8x32, u8x64, range(1, 64, 2))
down_1 = make_shift(u8x32, False, 1)
seven_bits = constant_u8(u8x32, 127)


@device
def iq2_xs_row(address, octet):
    return load_u16(address + 2 + 2 * octet) & 511


@device
def iq2_xs_signs(address):
    return evened(down_1(odd_bytes(load_u8x64(address + 2))) & seven_bits())


@device
def iq2_xs_scales(address):
    return scales_of_nibbles(address + 66, load_splat_f16x16(address) * splat_f32x16(0.25))


@device
def iq2_s_row(address, octet):
    return load_u8(address + 2 + octet) | ((load_u8(address + 66 + (octet >> 2)) << (8 - 2 * (octet & 3))) & 0x300)


@device
def iq2_s_signs(address):
    return load_u8x32(address + 34)


@device
def iq2_s_scales(address):
    return scales_of_nibbles(address + 74, load_splat_f16x16(address) * splat_f32x16(0.25))


@device
def iq3_xxs_row(address, quad):
    return load_u8(address + 2 + quad)


@device
def iq3_xxs_signs(address):
    return signs_of_words(load_u8x32(address + 66))


@device
def iq3_xxs_scales(address):
    return scales_of_words(load_u8x32(address + 66), load_splat_f16x8(address) * splat_f32x8(0.5))


@device
def iq3_s_row(address, quad):
    return load_u8(address + 2 + quad) | ((load_u8(address + 66 + (quad >> 3)) << (8 - (quad & 7))) & 0x100)


@device
def iq3_s_signs(address):
    return load_u8x32(address + 74)


@device
def iq3_s_scales(address):
    """2 * d * (scale + 1/2), with the scales in eight nibbles, spread over eight bytes."""
    nibbles = load_u32(address + 106)
    nibbles = (nibbles | nibbles << 16) & 0x0000FFFF0000FFFF
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FF00FF00FF
    nibbles = (nibbles | nibbles << 4) & NIBBLES
    return (float_u8x8(bytes_of(nibbles)) + splat_f32x8(0.5)) * (load_splat_f16x8(address) * splat_f32x8(2.0))


# ---- IQ1: -1, 0, 1 with a shift of 1/8, in eighths ------------------------------------------------------------------

IQ1_OFFSET = 9
IQ1_TABLE = packed(IQ1_GRID * 8 + 1 + IQ1_OFFSET)  # shifted up; codes that are shifted down are smaller by 2
shift_down_at_3, shift_down_at_7 = (make_where([1 << bit] * 64, -2) for bit in (3, 7))
iq1_s_shifts = for_octets(u8x16, [2 * run + 1 for run in RUNS])
iq1_s_scale_bits, upper_bytes = constant_u8(u8x16, 0x70), make_shuffle(u8x8, u8x16, range(1, 16, 2))


@device
def iq1_s_row(address, octet):
    return load_u8(address + 2 + octet) | ((load_u16(address + 34 + 2 * (octet >> 2)) << 8 >> 3 * (octet & 3)) & 0x700)


iq1_s_octets = octets(IQ1_TABLE, iq1_s_row)


@device
def iq1_s_codes(address):
    (c0, c1, c2, c3), bits = iq1_s_octets(address), iq1_s_shifts(load_u8x16(address + 34))
    return shift_down_at_7(c0, bits), shift_down_at_7(c1, bits), shift_down_at_7(c2, bits), shift_down_at_7(c3, bits)


@device
def iq1_s_scales(address):
    """d / 8 * (1 + 2 * scale); in their bytes, the scales count 16 times."""
    scales = float_u8x8(upper_bytes(load_u8x16(address + 34) & iq1_s_scale_bits()))
    return (scales + splat_f32x8(8.0)) * (load_splat_f16x8(address) * splat_f32x8(1 / 64))


iq1_m_shifts_01, iq1_m_shifts_23 = (for_octets(u8x16, [2 * run + pair for run in RUNS]) for pair in (0, 1))
alternate_pairs = make_shuffle(
    u8x16, u8x16, [8 * half + 2 * n + i for n in range(4) for half in (0, 1) for i in (0, 1)]
)


@device
def iq1_m_row(address, octet):
    return load_u8(address + octet) | ((load_u8(address + 32 + (octet >> 1)) << (8 - 4 * (octet & 1))) & 0x700)


iq1_m_octets = octets(IQ1_TABLE, iq1_m_row)


@device
def iq1_m_codes(address):
    (c0, c1, c2, c3), bits = iq1_m_octets(address), load_u8x16(address + 32)
    first, last = iq1_m_shifts_01(bits), iq1_m_shifts_23(bits)
    return shift_down_at_3(c0, first), shift_down_at_7(c1, first), shift_down_at_3(c2, last), shift_down_at_7(c3, last)


@device
def iq1_m_scales(address):
    """d / 8 * (1 + 2 * scale); four 16-bit integers hold four scales of 3 bits each and, on top, 4 bits of d."""
    words = load_i64(address + 48)
    first = (words & 0x0007000700070007) | ((words & 0x0038003800380038) << 5)
    second = ((words >> 6) & 0x0007000700070007) | ((words & 0x0E000E000E000E00) >> 1)
    d = ((words >> 12) & 0xF) | ((words >> 24) & 0xF0) | ((words >> 36) & 0xF00) | ((words >> 48) & 0xF000)
    scales = float_i8x16(alternate_pairs(concatenate_u8x16(bytes_of(first), bytes_of(second))))
    return (scales + splat_f32x16(0.5)) * (splat_f16x16(d) * splat_f32x16(0.25))


# ---- TQ1_0 ----------------------------------------------------------------------------------------------------------

TQ1_0_PARTS = [(240, 48, 4), (160, 32, 16), (0, 0, 32)]  # first weight, first byte, bytes


def tq1_0_place(weight):
    """Its (byte, digit) in the group."""
    first, byte, count = next(part for part in TQ1_0_PARTS if weight >= part[0])
    return byte + (weight - first) % count, (weight - first) // count


def tq1_0_stripe(q):
    """How vector q comes from a group's bytes, of which 22 to 31 are there twice."""
    places = [tq1_0_place(32 * run + 8 * q + i) for run in RUNS for i in range(8)]
    order = [byte if byte < 32 else byte + 10 for byte, _ in places]
    return make_shuffle(u8x64, u8x64, order), make_trits(*(digit for _, digit in places))


(bytes_0, trits_0), (bytes_1, trits_1), (bytes_2, trits_2), (bytes_3, trits_3) = (tq1_0_stripe(q) for q in STRIPES)


@device
def tq1_0_codes(address):
    v = concatenate_u8x64(load_u8x32(address), load_u8x32(address + 22))  # a group has 54 bytes
    return trits_0(bytes_0(v)), trits_1(bytes_1(v)), trits_2(bytes_2(v)), trits_3(bytes_3(v))


@device
def tq1_0_scales(address):
    return load_splat_f16x8(address + 52)


CODEBOOKS = [
    GroupFormat("IQ1_S", 32, 50, iq1_s_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_s_scales),
    GroupFormat("IQ1_M", 16, 56, iq1_m_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_m_scales),
    signed("IQ2_XXS", 32, 66, IQ2_XXS_GRID, iq2_xxs_row, iq2_xxs_signs, iq2_xxs_scales),
    signed("IQ2_XS", 16, 74, IQ2_XS_GRID, iq2_xs_row, iq2_xs_signs, iq2_xs_scales),
    signed("IQ2_S", 16, 82, IQ2_S_GRID, iq2_s_row, iq2_s_signs, iq2_s_scales),
    signed("IQ3_XXS", 32, 98, IQ3_XXS_GRID, iq3_xxs_row, iq3_xxs_signs, iq3_xxs_scales),
    signed("IQ3_S", 32, 110, IQ3_S_GRID, iq3_s_row, iq3_s_signs, iq3_s_scales),
    GroupFormat("TQ1_0", 32, 54, tq1_0_codes, 1, 2, tq1_0_scales),
]
