"""Load units of 32 weights from planes (planes.py), for products and for unpacking.

Each format has a function (row, units, unit) -> (codes, scales, minimums); row: address of a row of `units` units;
unit: index of the unit. Codes are 8 words of 4 signed bytes, in order. There are two scales and two minimums, for the
first 16 weights and for the last:

    weight = scale * code + minimum

Codes that are centred on zero are moved to the high bits of their bytes, where flipping the topmost bit makes them
signed; their scales are divided by the same power of two.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import float32, int32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.matmul.planes import PLANES, offset, units_shift
from localllm.quant.formats import LAYOUTS

NOTHING = float32(0)
SIGNS = 0x80808080
QUARTER, THIRTY_SECOND, HUNDRED_AND_28 = (float32(n) for n in (1 / 4, 1 / 32, 128))


@gpu.device
def number_of(integer):
    """Convert an integer to float32, by way of int32.

    From int64, the type of Numba's integers, the conversion takes several instructions.
    """
    return float32(int32(integer))


@gpu.device
def nibbles(q, shift, mask, flipped):
    """Split 4 words into 8: the low halves of their bytes, then the high halves.

    High halves are shifted right by `shift`, low halves by shift - 4 (left if negative), masked, and xored with
    `flipped`.
    """
    low = shift - 4
    return (
        gpu.bits(q[0], low, mask) ^ flipped,
        gpu.bits(q[1], low, mask) ^ flipped,
        gpu.bits(q[2], low, mask) ^ flipped,
        gpu.bits(q[3], low, mask) ^ flipped,
        gpu.bits(q[0], shift, mask) ^ flipped,
        gpu.bits(q[1], shift, mask) ^ flipped,
        gpu.bits(q[2], shift, mask) ^ flipped,
        gpu.bits(q[3], shift, mask) ^ flipped,
    )


@gpu.device
def pairs(q, place, flipped):
    """Split 2 words into 8, each with two bits of every byte.

    place: their lower bit's index in the byte of the result (0 to 6); flipped: is xored with each word.
    """
    mask = 0x03030303 << place
    return (
        gpu.bits(q[0], -place, mask) ^ flipped,
        gpu.bits(q[0], 2 - place, mask) ^ flipped,
        gpu.bits(q[0], 4 - place, mask) ^ flipped,
        gpu.bits(q[0], 6 - place, mask) ^ flipped,
        gpu.bits(q[1], -place, mask) ^ flipped,
        gpu.bits(q[1], 2 - place, mask) ^ flipped,
        gpu.bits(q[1], 4 - place, mask) ^ flipped,
        gpu.bits(q[1], 6 - place, mask) ^ flipped,
    )


@gpu.device
def with_bits(codes, q, place):
    """Xor each code with its bit in the word q, moved to bit `place`.

    codes: 8 words.
    """
    mask = 0x01010101 << place
    return (
        codes[0] ^ gpu.bits(q, -place, mask),
        codes[1] ^ gpu.bits(q, 1 - place, mask),
        codes[2] ^ gpu.bits(q, 2 - place, mask),
        codes[3] ^ gpu.bits(q, 3 - place, mask),
        codes[4] ^ gpu.bits(q, 4 - place, mask),
        codes[5] ^ gpu.bits(q, 5 - place, mask),
        codes[6] ^ gpu.bits(q, 6 - place, mask),
        codes[7] ^ gpu.bits(q, 7 - place, mask),
    )


@gpu.device
def joined(a, b):
    return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3], a[4] ^ b[4], a[5] ^ b[5], a[6] ^ b[6], a[7] ^ b[7]


def looked_up(values):
    """Build a function (4 words) -> 8 words that looks up 4-bit codes in a table of 16 signed bytes."""
    data = [int.from_bytes(bytes(value & 0xFF for value in values[i : i + 4]), "little") for i in range(0, 16, 4)]
    a, b, c, d = data

    @gpu.device
    def four(codes, upper):
        """Look up 4 codes by their low 3 bits.

        upper: a byte selector for the lower or upper half of the table.
        """
        return gpu.permute(gpu.permute(a, b, codes), gpu.permute(c, d, codes), upper)

    @gpu.device
    def table(q):
        p, r = gpu.bits(q[0], 0, 0x77777777), gpu.bits(q[0], 1, 0x44444444) | 0x32103210
        s, t = gpu.bits(q[1], 0, 0x77777777), gpu.bits(q[1], 1, 0x44444444) | 0x32103210
        v, w = gpu.bits(q[2], 0, 0x77777777), gpu.bits(q[2], 1, 0x44444444) | 0x32103210
        x, y = gpu.bits(q[3], 0, 0x77777777), gpu.bits(q[3], 1, 0x44444444) | 0x32103210
        return (
            four(p, r),
            four(s, t),
            four(v, w),
            four(x, y),
            four(gpu.bits(p, 16, 0xFFFF), gpu.bits(r, 16, 0xFFFF)),
            four(gpu.bits(s, 16, 0xFFFF), gpu.bits(t, 16, 0xFFFF)),
            four(gpu.bits(v, 16, 0xFFFF), gpu.bits(w, 16, 0xFFFF)),
            four(gpu.bits(x, 16, 0xFFFF), gpu.bits(y, 16, 0xFFFF)),
        )

    return table


def finder(name, plane):
    start, field_plane = offset(name, plane, 256), next(field for field in PLANES[name] if field.name == plane)
    size, shift = field_plane.bytes, units_shift(field_plane)

    @gpu.device
    def find(row, units, unit):
        return row + (units * start >> 3) + size * (unit >> shift)

    return find


def float_of(name):
    find = finder(name, "d")

    @gpu.device
    def value(row, units, unit):
        return gpu.f16_value(gpu.load_u16(find(row, units, unit)))

    return value


def floats_of(name):
    find = finder(name, "d_low")

    @gpu.device
    def values(row, units, unit):
        both = gpu.load_i32(find(row, units, unit))
        return gpu.f16_value(both & 0xFFFF), gpu.f16_value(gpu.bits(both, 16, 0xFFFF))

    return values


class Unit(NamedTuple):
    """The function that reads a format's units, and the factors that a unit has."""

    read: Callable
    two_scales: bool = False  # whether the two scales differ
    minimums: bool = False  # whether minimums can be other than 0


def make_codes(name, place, flipped):
    """Build a function (row, units, unit) that reads codes.

    The codes are moved left by `place` bits and xored with `flipped`.
    """
    layout, names = LAYOUTS[name], [plane.name for plane in PLANES[name]]
    first = nothing_but_bits
    if names[0] == "bytes":
        return make_bytes(name)
    if names[0] == "table":
        table = looked_up(layout.values)
        return gpu.device(lambda row, units, unit: table(gpu.stream_4i32(row + 16 * unit)))
    if names[0] == "nibbles":
        mask = 0x0F0F0F0F << place
        first = gpu.device(lambda row, units, unit: nibbles(gpu.stream_4i32(row + 16 * unit), 4 - place, mask, flipped))
    elif names[0] == "pairs":
        first = gpu.device(lambda row, units, unit: pairs(gpu.stream_2i32(row + 8 * unit), place, flipped))
    if "bits" not in names:
        return first
    find, at = finder(name, "bits"), place + layout.bits - 1
    return gpu.device(
        lambda row, units, unit: with_bits(first(row, units, unit), gpu.load_i32(find(row, units, unit)), at)
    )


@gpu.device
def nothing_but_bits(row, units, unit):
    """Return 8 words of zero: the first codes of a format whose codes are in the plane "bits" alone."""
    return 0, 0, 0, 0, 0, 0, 0, 0


def make_bytes(name):
    last = finder(name, "last_bytes")

    @gpu.device
    def codes(row, units, unit):
        a, b = gpu.stream_4i32(row + 16 * unit), gpu.stream_4i32(last(row, units, unit))
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

    return codes


@gpu.device
def half_of_e8m0(exponent):
    return gpu.f32_value(exponent - 1 << 23 if exponent > 1 else 0x200000 << exponent)  # 2^(exponent - 128)


@gpu.device
def half_of_ue4m3(byte):
    """Decode half of a UE4M3 scale; 127 (NaN) counts as zero.

    Shifted left by 7, its exponent and mantissa are those of a float16 that is 2^8 times too small, subnormal or not.
    """
    return gpu.f16_value((byte & 127) << 7) * HUNDRED_AND_28 if byte != 127 else NOTHING


SCALES = {"e8m0": half_of_e8m0, "ue4m3": half_of_ue4m3}


def make_factors(name, factor, centre):
    """Build a function (row, units, unit) that reads scales, times `factor`, and minimums.

    centre: the code for zero.
    """
    layout = LAYOUTS[name]
    if layout.low is not None:
        both_of = floats_of(name)

        @gpu.device
        def both(row, units, unit):
            scale, minimum = both_of(row, units, unit)
            return (scale, scale), (minimum, minimum)

        return both
    if layout.scales:
        find, value, apart = finder(name, "scales"), SCALES[layout.scale_type], 1 if layout.group == 16 else 0

        @gpu.device
        def scales(row, units, unit):
            at = find(row, units, unit)
            return (value(gpu.load_u8(at)), value(gpu.load_u8(at + apart))), (NOTHING, NOTHING)

        return scales
    d_of, scale_factor, minimum_factor = float_of(name), float32(factor), float32(-centre)

    @gpu.device
    def factors(row, units, unit):
        d = d_of(row, units, unit)
        scale, minimum = d * scale_factor, d * minimum_factor if centre else NOTHING
        return (scale, scale), (minimum, minimum)

    return factors


def derived(name):
    """Build the Unit of a format from its layout.

    Codes are centred on zero if the code for zero is in the middle.
    """
    layout = LAYOUTS[name]
    is_centred = layout.centre > 0 and layout.centre == 1 << layout.bits - 1 and layout.step == 1
    place = 8 - layout.bits if is_centred else 0
    codes = make_codes(name, place, SIGNS if is_centred else 0)
    centre = 0 if is_centred else layout.centre
    factors = make_factors(name, layout.step / (1 << place), centre)

    @gpu.device
    def read(row, units, unit):
        scales, minimums = factors(row, units, unit)
        return codes(row, units, unit), scales, minimums

    return Unit(read, layout.group == 16, layout.low is not None or centre > 0)


q2_k_d, q2_k_scales = floats_of("Q2_K"), finder("Q2_K", "scales")


@gpu.device
def q2_k(row, units, unit):
    codes = pairs(gpu.stream_2i32(row + 8 * unit), 0, 0)
    d, dmin = q2_k_d(row, units, unit)
    packed = gpu.load_u16(q2_k_scales(row, units, unit))
    scales = d * number_of(packed & 15), d * number_of(packed >> 8 & 15)
    return codes, scales, (-dmin * number_of(packed >> 4 & 15), -dmin * number_of(packed >> 12))


q3_k_bits, q3_k_high = finder("Q3_K", "bits"), finder("Q3_K", "high")
q3_k_d, q3_k_scales = float_of("Q3_K"), finder("Q3_K", "scales")


@gpu.device
def q3_k(row, units, unit):
    codes = pairs(gpu.stream_2i32(row + 8 * unit), 5, SIGNS)
    codes = with_bits(codes, gpu.load_i32(q3_k_bits(row, units, unit)), 7)
    low = gpu.load_u8(q3_k_scales(row, units, unit))
    high = gpu.bits(gpu.load_i32(q3_k_high(row, units, unit)), (unit & 7) << 2, 15)
    d = q3_k_d(row, units, unit) * THIRTY_SECOND
    first, second = low & 15 | (high & 3) << 4, low >> 4 | high >> 2 << 4
    return codes, (d * number_of(first - 32), d * number_of(second - 32)), (NOTHING, NOTHING)


@gpu.device
def k_factors(header, unit):
    """Return the scale and the minimum of a unit from the header of its block of Q4_K or Q5_K."""
    h, number = gpu.load_4i32(header), unit & 7
    scale = gpu.bits(h[1], number << 2, 15) | gpu.bits(h[3], number << 1, 3) << 4
    minimum = gpu.bits(h[2], number << 2, 15) | gpu.bits(h[3], (number << 1) + 16, 3) << 4
    d, dmin = gpu.f16_value(h[0] & 0xFFFF), gpu.f16_value(gpu.bits(h[0], 16, 0xFFFF))
    return d * number_of(scale), -dmin * number_of(minimum)


q4_k_header, q5_k_header = finder("Q4_K", "header"), finder("Q5_K", "header")
q5_k_bits = finder("Q5_K", "bits")


@gpu.device
def q4_k(row, units, unit):
    codes = nibbles(gpu.stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = k_factors(q4_k_header(row, units, unit), unit)
    return codes, (scale, scale), (minimum, minimum)


@gpu.device
def q5_k(row, units, unit):
    codes = nibbles(gpu.stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = k_factors(q5_k_header(row, units, unit), unit)
    return with_bits(codes, gpu.load_i32(q5_k_bits(row, units, unit)), 4), (scale, scale), (minimum, minimum)


q6_k_pairs, q6_k_scales = finder("Q6_K", "pairs"), finder("Q6_K", "scales")
q6_k_d = float_of("Q6_K")


@gpu.device
def q6_k(row, units, unit):
    low = nibbles(gpu.stream_4i32(row + 16 * unit), 2, 0x3C3C3C3C, SIGNS)
    codes = joined(low, pairs(gpu.stream_2i32(q6_k_pairs(row, units, unit)), 6, 0))
    packed, d = gpu.load_u16(q6_k_scales(row, units, unit)), q6_k_d(row, units, unit) * QUARTER
    scales = d * float32(gpu.signed_byte(packed, 0)), d * float32(gpu.signed_byte(packed, 1))
    return codes, scales, (NOTHING, NOTHING)


iq4_table, iq4_xs_header = looked_up(LAYOUTS["IQ4_XS"].values), finder("IQ4_XS", "header")


@gpu.device
def iq4_xs(row, units, unit):
    header, number = gpu.load_2i32(iq4_xs_header(row, units, unit)), unit & 7
    scale = gpu.bits(header[1], number << 2, 15) | gpu.bits(header[0], (number << 1) + 16, 3) << 4
    scale = gpu.f16_value(header[0] & 0xFFFF) * number_of(scale - 32)
    return iq4_table(gpu.stream_4i32(row + 16 * unit)), (scale, scale), (NOTHING, NOTHING)


OF_THEIR_OWN = {
    "Q2_K": Unit(q2_k, two_scales=True, minimums=True),
    "Q3_K": Unit(q3_k, two_scales=True),
    "Q4_K": Unit(q4_k, minimums=True),
    "Q5_K": Unit(q5_k, minimums=True),
    "Q6_K": Unit(q6_k, two_scales=True),
    "IQ4_XS": Unit(iq4_xs),
}
UNITS = {name: OF_THEIR_OWN.get(name) or derived(name) for name in PLANES}
