"""The k-quants and IQ4_XS: blocks of 256 weights with small integer scales.

Each scale is for 16 or 32 weights. A float16 scale for every 16 weights would cost a bit per weight. A k-quant stores a
4- to 8-bit integer instead, and one float16 factor d for all of them. Codes of fewer than 8 bits are in bit planes: a
byte has the codes of weights 32 or 64 positions apart, so one vector of bytes yields the codes of several runs of 32.
"""

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import (
    GroupFormat,
    adapt_to_cpu,
    build_two_bit_reader,
    nibble,
    planes_0,
    planes_1,
    planes_2,
    planes_3,
    split_nibbles,
)
from localllm.kernels.formats.row_pairs import IQ4_HIGH, IQ4_LOW, K_FACTORS
from localllm.quant.formats import LAYOUTS

Q2, Q3, Q4, Q5, Q6, IQ4 = (LAYOUTS[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))
Q2_D, Q2_LOW, Q3_D, Q4_LOW, Q6_D = Q2.d, Q2.low, Q3.d, Q4.low, Q6.d
Q2_CODES, Q4_CODES, Q5_CODES, Q6_CODES, IQ4_CODES = (layout.codes[0].at for layout in (Q2, Q4, Q5, Q6, IQ4))
Q3_BITS, Q5_BITS, Q6_BITS = (layout.codes[1].at for layout in (Q3, Q5, Q6))
# Offsets of the first scale.
Q3_SCALES, Q6_SCALES = (fields.locate(0)[0] for fields in (Q3.scales[0], Q6.scales[0]))


@device
def unpack_scales(address):
    """Unpack the eight 6-bit scales of Q4_K and Q5_K from the 12 bytes at an address, as f32x8."""
    low, high = simd.load_u32(address), simd.load_u32(address + 8)
    upper = (high & 0x0F0F0F0F) | (((low >> 6) & 0x03030303) << 4)
    return simd.float_u8x8(simd.split_int64((low & 0x3F3F3F3F) | (upper << 32)))


@device
def unpack_minimums(address):
    low, high = simd.load_u32(address + 4), simd.load_u32(address + 8)
    upper = ((high >> 4) & 0x0F0F0F0F) | (((low >> 6) & 0x03030303) << 4)
    return simd.float_u8x8(simd.split_int64((low & 0x3F3F3F3F) | (upper << 32)))


@device
def read_k_minimums(address):
    return -unpack_minimums(address + K_FACTORS) * simd.load_splat_f16x8(address + Q4_LOW)


# Shuffles for vector q of the striped codes: octet q of each 32 of 128 bytes, twice, because 32 bytes have two runs of
# weights, one in the low nibbles and one in the high nibbles.
runs_0, runs_1, runs_2, runs_3 = (simd.make_quads(*[4 * run + q for run in range(4) for _ in (0, 1)]) for q in range(4))
nibble_masks = simd.constant(simd.u8x64, *[0x0F] * 8, *[0xF0] * 8)
sixteenths = simd.constant(simd.f32x8, 1, 1 / 16)
odd_down_4 = simd.make_shift(simd.u8x64, False, *[0] * 4, *[4] * 4)


@device
def read_q4_k_codes(address):
    """Read the codes of Q4_K; codes from high nibbles are 16 * code, with a sixteenth of the scale."""
    v, w, mask = simd.load_u8x64(address + Q4_CODES), simd.load_u8x64(address + Q4_CODES + 64), nibble_masks()
    return runs_0(v, w) & mask, runs_1(v, w) & mask, runs_2(v, w) & mask, runs_3(v, w) & mask


@device
def read_q4_k_scales(address):
    return unpack_scales(address + K_FACTORS) * (simd.load_splat_f16x8(address) * sixteenths())


@device
def read_q4_k_small_codes(address):
    """Read the codes of Q4_K, all shifted down to 0 to 15."""
    v, w, mask = simd.load_u8x64(address + Q4_CODES), simd.load_u8x64(address + Q4_CODES + 64), nibble()
    return (
        odd_down_4(runs_0(v, w)) & mask, odd_down_4(runs_1(v, w)) & mask,
        odd_down_4(runs_2(v, w)) & mask, odd_down_4(runs_3(v, w)) & mask,
    )  # fmt: skip


add_fifth_bit = simd.make_where([1 << run for run in range(8) for _ in range(8)], 16)


@device
def read_q5_k_codes(address):
    v, w, bits = simd.load_u8x64(address + Q5_CODES), simd.load_u8x64(address + Q5_CODES + 64), address + Q5_BITS
    return (
        add_fifth_bit(odd_down_4(runs_0(v, w)) & nibble(), simd.load_splat_8(bits)),
        add_fifth_bit(odd_down_4(runs_1(v, w)) & nibble(), simd.load_splat_8(bits + 8)),
        add_fifth_bit(odd_down_4(runs_2(v, w)) & nibble(), simd.load_splat_8(bits + 16)),
        add_fifth_bit(odd_down_4(runs_3(v, w)) & nibble(), simd.load_splat_8(bits + 24)),
    )


@device
def read_q5_k_scales(address):
    return unpack_scales(address + K_FACTORS) * simd.load_splat_f16x8(address)


q4_k_small = GroupFormat("Q4_K", 32, 144, read_q4_k_small_codes, 0, 15, read_q5_k_scales, read_k_minimums)
q4_k = (  # with AVX2, one core reads 12 GB/s with small codes, 7 with the others
    q4_k_small
    if simd.needs_two_step_dot()
    else GroupFormat("Q4_K", 32, 144, read_q4_k_codes, 0, 240, read_q4_k_scales, read_k_minimums)
)


plane_masks = simd.constant(simd.u8x64, *[m for m in (3, 12, 48, 192) for _ in range(8)])
quarters = simd.constant(simd.f32x16, *[4.0**-plane for plane in range(4) for _ in (0, 1)])
low_half = simd.constant(simd.u8x16, 15)
upper_half = simd.make_shift(simd.u8x16, False, 4)


@device
def read_q2_k_codes(address):
    """Read the codes of Q2_K without shifting them: times 1, 4, 16 or 64, by which scales are divided."""
    v, mask = simd.load_u8x64(address + Q2_CODES), plane_masks()
    return planes_0(v) & mask, planes_1(v) & mask, planes_2(v) & mask, planes_3(v) & mask


@device
def read_q2_k_small_scales(address):
    return simd.float_i8x16(simd.load_u8x16(address) & low_half()) * simd.load_splat_f16x16(address + Q2_D)


@device
def read_q2_k_scales(address):
    return read_q2_k_small_scales(address) * quarters()


@device
def read_q2_k_minimums(address):
    return -simd.float_i8x16(upper_half(simd.load_u8x16(address)) & low_half()) * simd.load_splat_f16x16(
        address + Q2_LOW
    )


q3_k_low_codes = build_two_bit_reader(Q3.codes[0].at)
add_third_bit = simd.make_where([1 << run for run in range(8) for _ in range(8)], 4)


@device
def read_q3_k_codes(address):
    c0, c1, c2, c3 = q3_k_low_codes(address)
    return (
        add_third_bit(c0, simd.load_splat_8(address + Q3_BITS)),
        add_third_bit(c1, simd.load_splat_8(address + Q3_BITS + 8)),
        add_third_bit(c2, simd.load_splat_8(address + Q3_BITS + 16)),
        add_third_bit(c3, simd.load_splat_8(address + Q3_BITS + 24)),
    )


@device
def read_q3_k_scales(address):
    """Unpack the 16 scales of Q3_K, 6 bits each minus 32, times d: f32x16.

    Layout: 8 bytes with the low 4 bits of two scales each, then 4 bytes with the high 2 bits of four scales each.
    """
    low = simd.load_u32(address + Q3_SCALES) | (simd.load_u32(address + Q3_SCALES + 4) << 32)
    high = simd.load_u32(address + Q3_SCALES + 8)
    high_first, high_second = high | (high >> 2) << 32, (high >> 4) | (high >> 6) << 32
    first = (low & 0x0F0F0F0F0F0F0F0F) | ((high_first & 0x0303030303030303) << 4)
    second = ((low >> 4) & 0x0F0F0F0F0F0F0F0F) | ((high_second & 0x0303030303030303) << 4)
    codes = simd.float_i8x16(simd.concatenate_u8x16(simd.split_int64(first), simd.split_int64(second)))
    return (codes - simd.splat_f32x16(32.0)) * simd.load_splat_f16x16(address + Q3_D)


low_0, low_1, low_2, low_3 = (
    simd.make_quads(*[8 * half + 4 * (plane % 2) + q for half in (0, 1) for plane in range(4)]) for q in range(4)
)
q6_low_down = simd.make_shift(simd.u8x64, False, *[4 * (plane // 2) for plane in range(4) for _ in range(4)])
q6_high_up = simd.make_rotate(4, 2, 0, 62)  # moves the two bits of each of four planes to bits 4 and 5
bits_4_and_5 = simd.constant(simd.u8x64, 0x30)


@device
def read_q6_k_codes(address):
    v, w = simd.load_u8x64(address + Q6_CODES), simd.load_u8x64(address + Q6_CODES + 64)
    high = simd.load_u8x64(address + Q6_BITS)
    return (
        (q6_low_down(low_0(v, w)) & nibble()) | (q6_high_up(planes_0(high)) & bits_4_and_5()),
        (q6_low_down(low_1(v, w)) & nibble()) | (q6_high_up(planes_1(high)) & bits_4_and_5()),
        (q6_low_down(low_2(v, w)) & nibble()) | (q6_high_up(planes_2(high)) & bits_4_and_5()),
        (q6_low_down(low_3(v, w)) & nibble()) | (q6_high_up(planes_3(high)) & bits_4_and_5()),
    )


@device
def read_q6_k_scales(address):
    return simd.float_i8x16(simd.load_u8x16(address + Q6_SCALES)) * simd.load_splat_f16x16(address + Q6_D)


q6_k_terms = simd.make_terms(Q6.centre)


@device
def read_q6_k_integer_scales(address):
    return simd.duplicate_i8x16(simd.load_u8x16(address + Q6_SCALES))


@device
def read_q6_k_integer_terms(address):
    return q6_k_terms(simd.load_u8x16(address + Q6_SCALES), simd.load_splat_f16x16(address + Q6_D))


iq4_value = simd.make_lookup(*(value + 127 for value in IQ4.values))


@device
def read_iq4_xs_codes(address):
    c0, c1, c2, c3 = split_nibbles(simd.load_u8x64(address + IQ4_CODES), simd.load_u8x64(address + IQ4_CODES + 64))
    return iq4_value(c0), iq4_value(c1), iq4_value(c2), iq4_value(c3)


@device
def read_iq4_xs_scales(address):
    """Unpack the eight scales of IQ4_XS, 6 bits each minus 32, times d: f32x8.

    The low 4 bits are in 4 bytes, the high 2 bits in 2 bytes; both are spread over eight bytes.
    """
    low, high = simd.load_u32(address + IQ4_LOW), simd.load_u16(address + IQ4_HIGH)
    low = (low | low << 16) & 0x0000FFFF0000FFFF
    low = (low | low << 8) & 0x00FF00FF00FF00FF
    low = (low | low << 4) & 0x0F0F0F0F0F0F0F0F
    high = (high | high << 24) & 0x000000FF000000FF
    high = (high | high << 12) & 0x000F000F000F000F
    high = (high | high << 6) & 0x0303030303030303
    return (simd.float_u8x8(simd.split_int64(low | high << 4)) - simd.splat_f32x8(32.0)) * simd.load_splat_f16x8(
        address
    )


GROUPS = {
    format.name: adapt_to_cpu(format)
    for format in (
        GroupFormat("Q2_K", 16, 84, read_q2_k_codes, 0, 192, read_q2_k_scales, read_q2_k_minimums),
        GroupFormat("Q3_K", 16, 110, read_q3_k_codes, Q3.centre, 7, read_q3_k_scales),
        q4_k,
        GroupFormat("Q5_K", 32, 176, read_q5_k_codes, 0, 31, read_q5_k_scales, read_k_minimums),
        GroupFormat("Q6_K", 16, 210, read_q6_k_codes, Q6.centre, 63, read_q6_k_scales),
        GroupFormat("IQ4_XS", 32, 136, read_iq4_xs_codes, 127, 240, read_iq4_xs_scales),
    )
}

# Formats for register tiles, whose codes are not multiplied by powers of two.
SMALL_CODE_GROUPS = {
    "Q4_K": q4_k_small,
    "Q2_K": GroupFormat(
        "Q2_K", 16, 84, build_two_bit_reader(Q2_CODES), 0, 3, read_q2_k_small_scales, read_q2_k_minimums
    ),
}

# Formats for register tiles on CPUs with AVX2 only, whose integer scales are multiplied in integers.
INTEGER_SCALE_GROUPS = {
    "Q6_K": GroupFormat(
        *("Q6_K", 16, 210, read_q6_k_codes, Q6.centre, 63, read_q6_k_integer_scales, read_q6_k_integer_terms),
        has_integer_scales=True,
    )
}
