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
from localllm.kernels.cuda.matmul.planes import PLANES, compute_plane_offset, compute_unit_shift
from localllm.quant.formats import LAYOUTS

NOTHING = float32(0)
SIGNS = 0x80808080
QUARTER, THIRTY_SECOND, HUNDRED_AND_28 = (float32(n) for n in (1 / 4, 1 / 32, 128))


@gpu.device
def to_float(integer):
    """Convert an integer to float32, by way of int32.

    From int64, the type of Numba's integers, the conversion takes several instructions.
    """
    return float32(int32(integer))


@gpu.device
def split_nibbles(q, shift, mask, flipped):
    """Split 4 words into 8: the low halves of their bytes, then the high halves.

    High halves are shifted right by `shift`, low halves by shift - 4 (left if negative), masked, and xored with
    `flipped`.
    """
    low = shift - 4
    return (
        gpu.shift_and_mask(q[0], low, mask) ^ flipped,
        gpu.shift_and_mask(q[1], low, mask) ^ flipped,
        gpu.shift_and_mask(q[2], low, mask) ^ flipped,
        gpu.shift_and_mask(q[3], low, mask) ^ flipped,
        gpu.shift_and_mask(q[0], shift, mask) ^ flipped,
        gpu.shift_and_mask(q[1], shift, mask) ^ flipped,
        gpu.shift_and_mask(q[2], shift, mask) ^ flipped,
        gpu.shift_and_mask(q[3], shift, mask) ^ flipped,
    )


@gpu.device
def split_pairs(q, place, flipped):
    """Split 2 words into 8, each with two bits of every byte.

    place: their lower bit's index in the byte of the result (0 to 6); flipped: is xored with each word.
    """
    mask = 0x03030303 << place
    return (
        gpu.shift_and_mask(q[0], -place, mask) ^ flipped,
        gpu.shift_and_mask(q[0], 2 - place, mask) ^ flipped,
        gpu.shift_and_mask(q[0], 4 - place, mask) ^ flipped,
        gpu.shift_and_mask(q[0], 6 - place, mask) ^ flipped,
        gpu.shift_and_mask(q[1], -place, mask) ^ flipped,
        gpu.shift_and_mask(q[1], 2 - place, mask) ^ flipped,
        gpu.shift_and_mask(q[1], 4 - place, mask) ^ flipped,
        gpu.shift_and_mask(q[1], 6 - place, mask) ^ flipped,
    )


@gpu.device
def add_bits(codes, q, place):
    """Xor each code with its bit in the word q, moved to bit `place`.

    codes: 8 words.
    """
    mask = 0x01010101 << place
    return (
        codes[0] ^ gpu.shift_and_mask(q, -place, mask),
        codes[1] ^ gpu.shift_and_mask(q, 1 - place, mask),
        codes[2] ^ gpu.shift_and_mask(q, 2 - place, mask),
        codes[3] ^ gpu.shift_and_mask(q, 3 - place, mask),
        codes[4] ^ gpu.shift_and_mask(q, 4 - place, mask),
        codes[5] ^ gpu.shift_and_mask(q, 5 - place, mask),
        codes[6] ^ gpu.shift_and_mask(q, 6 - place, mask),
        codes[7] ^ gpu.shift_and_mask(q, 7 - place, mask),
    )


@gpu.device
def xor_words(a, b):
    return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3], a[4] ^ b[4], a[5] ^ b[5], a[6] ^ b[6], a[7] ^ b[7]


def make_lookup(values):
    """Build a function (4 words) -> 8 words that looks up 4-bit codes in a table of 16 signed bytes."""
    data = [int.from_bytes(bytes(value & 0xFF for value in values[i : i + 4]), "little") for i in range(0, 16, 4)]
    a, b, c, d = data

    @gpu.device
    def look_up_four(codes, upper):
        """Look up 4 codes by their low 3 bits.

        upper: a byte selector for the lower or upper half of the table.
        """
        return gpu.permute(gpu.permute(a, b, codes), gpu.permute(c, d, codes), upper)

    @gpu.device
    def look_up(q):
        p, r = gpu.shift_and_mask(q[0], 0, 0x77777777), gpu.shift_and_mask(q[0], 1, 0x44444444) | 0x32103210
        s, t = gpu.shift_and_mask(q[1], 0, 0x77777777), gpu.shift_and_mask(q[1], 1, 0x44444444) | 0x32103210
        v, w = gpu.shift_and_mask(q[2], 0, 0x77777777), gpu.shift_and_mask(q[2], 1, 0x44444444) | 0x32103210
        x, y = gpu.shift_and_mask(q[3], 0, 0x77777777), gpu.shift_and_mask(q[3], 1, 0x44444444) | 0x32103210
        return (
            look_up_four(p, r),
            look_up_four(s, t),
            look_up_four(v, w),
            look_up_four(x, y),
            look_up_four(gpu.shift_and_mask(p, 16, 0xFFFF), gpu.shift_and_mask(r, 16, 0xFFFF)),
            look_up_four(gpu.shift_and_mask(s, 16, 0xFFFF), gpu.shift_and_mask(t, 16, 0xFFFF)),
            look_up_four(gpu.shift_and_mask(v, 16, 0xFFFF), gpu.shift_and_mask(w, 16, 0xFFFF)),
            look_up_four(gpu.shift_and_mask(x, 16, 0xFFFF), gpu.shift_and_mask(y, 16, 0xFFFF)),
        )

    return look_up


def make_find(name, plane):
    start, field_plane = (
        compute_plane_offset(name, plane, 256),
        next(field for field in PLANES[name] if field.name == plane),
    )
    size, shift = field_plane.bytes, compute_unit_shift(field_plane)

    @gpu.device
    def find(row, units, unit):
        return row + (units * start >> 3) + size * (unit >> shift)

    return find


def make_load_float(name):
    find = make_find(name, "d")

    @gpu.device
    def load_value(row, units, unit):
        return gpu.decode_f16(gpu.load_u16(find(row, units, unit)))

    return load_value


def make_load_floats(name):
    find = make_find(name, "d_low")

    @gpu.device
    def load_values(row, units, unit):
        both = gpu.load_i32(find(row, units, unit))
        return gpu.decode_f16(both & 0xFFFF), gpu.decode_f16(gpu.shift_and_mask(both, 16, 0xFFFF))

    return load_values


class UnitReader(NamedTuple):
    """The function that reads a format's units, and the factors that a unit has."""

    read: Callable
    two_scales: bool = False  # whether the two scales differ
    minimums: bool = False  # whether minimums can be other than 0


def make_codes(name, place, flipped):
    """Build a function (row, units, unit) that reads codes.

    The codes are moved left by `place` bits and xored with `flipped`.
    """
    layout, names = LAYOUTS[name], [plane.name for plane in PLANES[name]]
    first = create_zero_codes
    if names[0] == "bytes":
        return make_bytes(name)
    if names[0] == "table":
        table = make_lookup(layout.values)
        return gpu.device(lambda row, units, unit: table(gpu.stream_4i32(row + 16 * unit)))
    if names[0] == "nibbles":
        mask = 0x0F0F0F0F << place
        first = gpu.device(
            lambda row, units, unit: split_nibbles(gpu.stream_4i32(row + 16 * unit), 4 - place, mask, flipped)
        )
    elif names[0] == "pairs":
        first = gpu.device(lambda row, units, unit: split_pairs(gpu.stream_2i32(row + 8 * unit), place, flipped))
    if "bits" not in names:
        return first
    find, at = make_find(name, "bits"), place + layout.bits - 1
    return gpu.device(
        lambda row, units, unit: add_bits(first(row, units, unit), gpu.load_i32(find(row, units, unit)), at)
    )


@gpu.device
def create_zero_codes(row, units, unit):
    """Return 8 words of zero: the first codes of a format whose codes are in the plane "bits" alone."""
    return 0, 0, 0, 0, 0, 0, 0, 0


def make_bytes(name):
    last = make_find(name, "last_bytes")

    @gpu.device
    def load_codes(row, units, unit):
        a, b = gpu.stream_4i32(row + 16 * unit), gpu.stream_4i32(last(row, units, unit))
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

    return load_codes


@gpu.device
def decode_half_e8m0(exponent):
    return gpu.decode_f32(exponent - 1 << 23 if exponent > 1 else 0x200000 << exponent)  # 2^(exponent - 128)


@gpu.device
def decode_half_ue4m3(byte):
    """Decode half of a UE4M3 scale; 127 (NaN) counts as zero.

    Shifted left by 7, its exponent and mantissa are those of a float16 that is 2^8 times too small, subnormal or not.
    """
    return gpu.decode_f16((byte & 127) << 7) * HUNDRED_AND_28 if byte != 127 else NOTHING


SCALES = {"e8m0": decode_half_e8m0, "ue4m3": decode_half_ue4m3}


def make_factors(name, factor, centre):
    """Build a function (row, units, unit) that reads scales, times `factor`, and minimums.

    centre: the code for zero.
    """
    layout = LAYOUTS[name]
    if layout.low is not None:
        both_of = make_load_floats(name)

        @gpu.device
        def load_both(row, units, unit):
            scale, minimum = both_of(row, units, unit)
            return (scale, scale), (minimum, minimum)

        return load_both
    if layout.scales:
        find, value, apart = make_find(name, "scales"), SCALES[layout.scale_type], 1 if layout.group == 16 else 0

        @gpu.device
        def load_scales(row, units, unit):
            at = find(row, units, unit)
            return (value(gpu.load_u8(at)), value(gpu.load_u8(at + apart))), (NOTHING, NOTHING)

        return load_scales
    d_of, scale_factor, minimum_factor = make_load_float(name), float32(factor), float32(-centre)

    @gpu.device
    def load_factors(row, units, unit):
        d = d_of(row, units, unit)
        scale, minimum = d * scale_factor, d * minimum_factor if centre else NOTHING
        return (scale, scale), (minimum, minimum)

    return load_factors


def make_unit(name):
    """Build the UnitReader of a format from its layout.

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

    return UnitReader(read, layout.group == 16, layout.low is not None or centre > 0)


q2_k_d, q2_k_scales = make_load_floats("Q2_K"), make_find("Q2_K", "scales")


@gpu.device
def load_q2_k(row, units, unit):
    codes = split_pairs(gpu.stream_2i32(row + 8 * unit), 0, 0)
    d, dmin = q2_k_d(row, units, unit)
    packed = gpu.load_u16(q2_k_scales(row, units, unit))
    scales = d * to_float(packed & 15), d * to_float(packed >> 8 & 15)
    return codes, scales, (-dmin * to_float(packed >> 4 & 15), -dmin * to_float(packed >> 12))


q3_k_bits, q3_k_high = make_find("Q3_K", "bits"), make_find("Q3_K", "high")
q3_k_d, q3_k_scales = make_load_float("Q3_K"), make_find("Q3_K", "scales")


@gpu.device
def load_q3_k(row, units, unit):
    codes = split_pairs(gpu.stream_2i32(row + 8 * unit), 5, SIGNS)
    codes = add_bits(codes, gpu.load_i32(q3_k_bits(row, units, unit)), 7)
    low = gpu.load_u8(q3_k_scales(row, units, unit))
    high = gpu.shift_and_mask(gpu.load_i32(q3_k_high(row, units, unit)), (unit & 7) << 2, 15)
    d = q3_k_d(row, units, unit) * THIRTY_SECOND
    first, second = low & 15 | (high & 3) << 4, low >> 4 | high >> 2 << 4
    return codes, (d * to_float(first - 32), d * to_float(second - 32)), (NOTHING, NOTHING)


@gpu.device
def compute_k_factors(header, unit):
    """Return the scale and the minimum of a unit from the header of its block of Q4_K or Q5_K."""
    h, number = gpu.load_4i32(header), unit & 7
    scale = gpu.shift_and_mask(h[1], number << 2, 15) | gpu.shift_and_mask(h[3], number << 1, 3) << 4
    minimum = gpu.shift_and_mask(h[2], number << 2, 15) | gpu.shift_and_mask(h[3], (number << 1) + 16, 3) << 4
    d, dmin = gpu.decode_f16(h[0] & 0xFFFF), gpu.decode_f16(gpu.shift_and_mask(h[0], 16, 0xFFFF))
    return d * to_float(scale), -dmin * to_float(minimum)


q4_k_header, q5_k_header = make_find("Q4_K", "header"), make_find("Q5_K", "header")
q5_k_bits = make_find("Q5_K", "bits")


@gpu.device
def load_q4_k(row, units, unit):
    codes = split_nibbles(gpu.stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = compute_k_factors(q4_k_header(row, units, unit), unit)
    return codes, (scale, scale), (minimum, minimum)


@gpu.device
def load_q5_k(row, units, unit):
    codes = split_nibbles(gpu.stream_4i32(row + 16 * unit), 4, 0x0F0F0F0F, 0)
    scale, minimum = compute_k_factors(q5_k_header(row, units, unit), unit)
    return add_bits(codes, gpu.load_i32(q5_k_bits(row, units, unit)), 4), (scale, scale), (minimum, minimum)


q6_k_pairs, q6_k_scales = make_find("Q6_K", "pairs"), make_find("Q6_K", "scales")
q6_k_d = make_load_float("Q6_K")


@gpu.device
def load_q6_k(row, units, unit):
    low = split_nibbles(gpu.stream_4i32(row + 16 * unit), 2, 0x3C3C3C3C, SIGNS)
    codes = xor_words(low, split_pairs(gpu.stream_2i32(q6_k_pairs(row, units, unit)), 6, 0))
    packed, d = gpu.load_u16(q6_k_scales(row, units, unit)), q6_k_d(row, units, unit) * QUARTER
    scales = d * float32(gpu.extract_byte(packed, 0)), d * float32(gpu.extract_byte(packed, 1))
    return codes, scales, (NOTHING, NOTHING)


iq4_table, iq4_xs_header = make_lookup(LAYOUTS["IQ4_XS"].values), make_find("IQ4_XS", "header")


@gpu.device
def load_iq4_xs(row, units, unit):
    header, number = gpu.load_2i32(iq4_xs_header(row, units, unit)), unit & 7
    scale = gpu.shift_and_mask(header[1], number << 2, 15) | gpu.shift_and_mask(header[0], (number << 1) + 16, 3) << 4
    scale = gpu.decode_f16(header[0] & 0xFFFF) * to_float(scale - 32)
    return iq4_table(gpu.stream_4i32(row + 16 * unit)), (scale, scale), (NOTHING, NOTHING)


SPECIAL_UNITS = {
    "Q2_K": UnitReader(load_q2_k, two_scales=True, minimums=True),
    "Q3_K": UnitReader(load_q3_k, two_scales=True),
    "Q4_K": UnitReader(load_q4_k, minimums=True),
    "Q5_K": UnitReader(load_q5_k, minimums=True),
    "Q6_K": UnitReader(load_q6_k, two_scales=True),
    "IQ4_XS": UnitReader(load_iq4_xs),
}
UNITS = {name: SPECIAL_UNITS.get(name) or make_unit(name) for name in PLANES}
