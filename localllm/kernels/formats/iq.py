"""The i-quants, whose codes are indices of 4 or 8 weights in a codebook (grid).

Eight weights of 2 bits have 65536 patterns, most of which rarely occur. A grid keeps the 256 to 2048 patterns that
represent real weights best, so 8 to 11 bits encode 8 weights. The grids are ggml's (ggml-common.h), read from the
`gguf` package, which has them in packed form. Numba embeds them in the machine code as constants.

A block has 256 weights: 8 runs of 32, 32 octets of 8, or 64 quads of 4. Vector q of a group's codes holds octets 4 *
run + q. For the int8 kernels, tables contain the rows of a grid as grid value + offset, one byte per weight. A group
takes 32 or 64 loads from the table, which take most of the time.

IQ1 has a grid of -1, 0 and 1, shifted by 1/8 up or down; the shift replaces a minimum. The int8 kernels read the
shifted grid values in units of 1/8, plus IQ1_OFFSET. IQ2 and IQ3 have a grid of magnitudes, and signs that are stored
separately. A sign takes one bit per weight, or 7 bits for 8 weights, where the eighth sign makes the number of minus
signs even (`complete_signs`). Codes for the int8 kernels are offset + magnitude; a minus sign turns that into offset -
magnitude.
"""

from typing import Any

import numpy as np
from gguf import quants

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.formats.group_format import GroupFormat
from localllm.quant.formats import BY_NAME, LAYOUTS


def load_codebook(format: Any) -> np.ndarray:
    """Load the grid of a class of `gguf.quants`: int8 [codes, weights per code]."""
    format.init_grid()
    return format.grid.reshape(format.grid_shape).astype(np.int8)


STRIPES, RUNS = range(4), range(8)


def build_octet_shuffle(source, order):
    """Build a shuffle that copies, for each of eight octets, byte `order` of `source` to all 8 weights."""
    return simd.make_shuffle(simd.u8x64, source, [byte for byte in order for _ in range(8)])


# ---- rows of weights ------------------------------------------------------------------------------------------------


def pack_rows(codes):
    """Pack each row of a grid, [rows, 8 or 4] bytes, into one integer: int64 [rows] or int32 [rows]."""
    return np.ascontiguousarray(codes, np.uint8).view("<i8" if codes.shape[1] == 8 else "<i4").reshape(-1)


def build_octet_reader(table, row):
    """Build a function (address) that looks up a group's codes by octets: four striped u8x64.

    row(address, octet): the row of `table` for an octet of the group.
    """

    @inlined
    def read_stripe(address, q):
        return simd.u8x64_of_quads(
            table[row(address, q)], table[row(address, 4 + q)],
            table[row(address, 8 + q)], table[row(address, 12 + q)],
            table[row(address, 16 + q)], table[row(address, 20 + q)],
            table[row(address, 24 + q)], table[row(address, 28 + q)],
        )  # fmt: skip

    return device(
        lambda address: (
            read_stripe(address, 0),
            read_stripe(address, 1),
            read_stripe(address, 2),
            read_stripe(address, 3),
        )
    )


def build_quad_reader(table, row):
    """Build a function (address) that looks up a group's codes by quads: four striped u8x64.

    row(address, quad): the row of `table` for a quad of the group.
    """

    @inlined
    def read_stripe(address, q):
        i, j = 2 * q, 2 * q + 1
        return simd.u8x64_of_words(
            table[row(address, i)], table[row(address, j)],
            table[row(address, 8 + i)], table[row(address, 8 + j)],
            table[row(address, 16 + i)], table[row(address, 16 + j)],
            table[row(address, 24 + i)], table[row(address, 24 + j)],
            table[row(address, 32 + i)], table[row(address, 32 + j)],
            table[row(address, 40 + i)], table[row(address, 40 + j)],
            table[row(address, 48 + i)], table[row(address, 48 + j)],
            table[row(address, 56 + i)], table[row(address, 56 + j)],
        )  # fmt: skip

    return device(
        lambda address: (
            read_stripe(address, 0),
            read_stripe(address, 1),
            read_stripe(address, 2),
            read_stripe(address, 3),
        )
    )


IQ1_GRID = load_codebook(quants.IQ1_S)  # [2048, 8], values -1, 0, 1
IQ1_SHIFT = np.float32(0.125)


@device
def store_shifted(code, scale, negative, out):
    """Write the 8 weights of a code to `out`: scale * (grid value + 1/8), or - 1/8 if `negative` is not 0."""
    shift = -IQ1_SHIFT if negative else IQ1_SHIFT
    for i in range(8):
        simd.store_f32(out + 4 * i, scale * (np.float32(IQ1_GRID[code, i]) + shift))


@device
def read_iq1_m_d(scales):
    """Assemble the float16 d from the topmost 4 bits of each of four 16-bit integers, the lowest first."""
    bits = 0
    for n in range(4):
        bits |= (simd.load_u16(scales + 2 * n) >> 12) << (4 * n)
    return simd.float_f16(bits)


S, M = LAYOUTS["IQ1_S"], LAYOUTS["IQ1_M"]
S_CODES, S_SCALES, M_CODES, M_HIGH = (
    S.find_field("codes"),
    S.find_field("scales"),
    M.find_field("codes"),
    M.find_field("high"),
)
M_SCALES = M.find_field("scales")


@device
def unpack_iq1_s(block, out):
    for octet in range(32):
        word = simd.load_u16(block + S_SCALES + 2 * (octet // 4))
        scale = simd.load_f16(block) * np.float32(1 + 2 * (word >> 12 & 7))
        store_shifted(get_iq1_s_row(block, octet), scale, word >> 15, out + 32 * octet)


@device
def unpack_iq1_m(block, out):
    d = read_iq1_m_d(block + M_SCALES)
    for octet in range(32):
        multiple = simd.load_u16(block + M_SCALES + 2 * (octet // 8)) >> 3 * (octet // 2 % 4) & 7
        is_down = simd.load_u8(block + M_HIGH + octet // 2) >> 4 * (octet % 2) & 8
        store_shifted(get_iq1_m_row(block, octet), d * np.float32(1 + 2 * multiple), is_down, out + 32 * octet)


@device
def get_iq1_s_row(block, octet):
    high = simd.load_u16(block + S_SCALES + 2 * (octet >> 2)) << 8 >> 3 * (octet & 3)
    return simd.load_u8(block + S_CODES + octet) | high & 0x700


@device
def get_iq1_m_row(block, octet):
    return (
        simd.load_u8(block + M_CODES + octet)
        | (simd.load_u8(block + M_HIGH + (octet >> 1)) << (8 - 4 * (octet & 1))) & 0x700
    )


IQ1_OFFSET = 9
IQ1_TABLE = pack_rows(IQ1_GRID * 8 + 1 + IQ1_OFFSET)  # shifted up by 1/8; those shifted down are 2 smaller
shift_down_at_3, shift_down_at_7 = (simd.make_where([1 << bit] * 64, -2) for bit in (3, 7))
iq1_s_shifts = build_octet_shuffle(simd.u8x16, [2 * run + 1 for run in RUNS])
iq1_s_scale_bits = simd.constant(simd.u8x16, 0x70)
upper_bytes = simd.make_shuffle(simd.u8x8, simd.u8x16, range(1, 16, 2))


iq1_s_octets = build_octet_reader(IQ1_TABLE, get_iq1_s_row)


@device
def read_iq1_s_codes(address):
    (c0, c1, c2, c3), bits = iq1_s_octets(address), iq1_s_shifts(simd.load_u8x16(address + S_SCALES))
    return shift_down_at_7(c0, bits), shift_down_at_7(c1, bits), shift_down_at_7(c2, bits), shift_down_at_7(c3, bits)


@device
def read_iq1_s_scales(address):
    """Compute the 8 scales of a group in IQ1_S, d / 8 * (1 + 2 * scale): f32x8.

    A stored scale has 3 bits, bits 4 to 6 of a byte. They are read as 16 * scale, and the result is divided by 16.
    """
    scales = simd.float_u8x8(upper_bytes(simd.load_u8x16(address + S_SCALES) & iq1_s_scale_bits()))
    return (scales + simd.splat_f32x8(8.0)) * (simd.load_splat_f16x8(address) * simd.splat_f32x8(1 / 64))


iq1_m_shifts_01, iq1_m_shifts_23 = (
    build_octet_shuffle(simd.u8x16, [2 * run + pair for run in RUNS]) for pair in (0, 1)
)
alternate_pairs = simd.make_shuffle(
    simd.u8x16, simd.u8x16, [8 * half + 2 * n + i for n in range(4) for half in (0, 1) for i in (0, 1)]
)


iq1_m_octets = build_octet_reader(IQ1_TABLE, get_iq1_m_row)


@device
def read_iq1_m_codes(address):
    (c0, c1, c2, c3), bits = iq1_m_octets(address), simd.load_u8x16(address + M_HIGH)
    first, last = iq1_m_shifts_01(bits), iq1_m_shifts_23(bits)
    return shift_down_at_3(c0, first), shift_down_at_7(c1, first), shift_down_at_3(c2, last), shift_down_at_7(c3, last)


@device
def read_iq1_m_scales(address):
    """Compute the 16 scales of a group in IQ1_M, d / 8 * (1 + 2 * scale): f32x16.

    Stored in four 16-bit integers, each with four scales of 3 bits and, in the topmost bits, 4 bits of d.
    """
    words = simd.load_i64(address + M_SCALES)
    first = (words & 0x0007000700070007) | ((words & 0x0038003800380038) << 5)
    second = ((words >> 6) & 0x0007000700070007) | ((words & 0x0E000E000E000E00) >> 1)
    d = ((words >> 12) & 0xF) | ((words >> 24) & 0xF0) | ((words >> 36) & 0xF00) | ((words >> 48) & 0xF000)
    scales = simd.float_i8x16(
        alternate_pairs(simd.concatenate_u8x16(simd.split_int64(first), simd.split_int64(second)))
    )
    return (scales + simd.splat_f32x16(0.5)) * (simd.splat_f16x16(d) * simd.splat_f32x16(0.25))


IQ1_GROUPS = {
    "IQ1_S": GroupFormat("IQ1_S", 32, 50, read_iq1_s_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, read_iq1_s_scales),
    "IQ1_M": GroupFormat("IQ1_M", 16, 56, read_iq1_m_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, read_iq1_m_scales),
}
IQ1_UNPACK = {"IQ1_S": unpack_iq1_s, "IQ1_M": unpack_iq1_m}


IQ2_XXS_GRID = load_codebook(quants.IQ2_XXS)  # [256, 8], values 8, 25, 43
IQ2_XS_GRID = load_codebook(quants.IQ2_XS)  # [512, 8], the same values
IQ2_S_GRID = load_codebook(quants.IQ2_S)  # [1024, 8], the same values
IQ3_XXS_GRID = load_codebook(quants.IQ3_XXS)  # [256, 4], values 4, 12, 20 .. 52, 62
IQ3_S_GRID = load_codebook(quants.IQ3_S)  # [512, 4], values 1, 3, 5 .. 15


@device
def complete_signs(code):
    """Return the 8 sign bits of a 7-bit sign code.

    The eighth bit makes the number of ones even.
    """
    parity = code ^ code >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return code | (parity & 1) << 7


@device
def store_signed(magnitudes, code, scale, signs, out):
    """Write the weights of row `code` to `out`, times `scale`.

    Weight i is negated if bit i of `signs` is set.
    """
    for i in range(magnitudes.shape[1]):
        sign = 1 - 2 * ((signs >> i) & 1)
        simd.store_f32(out + 4 * i, scale * np.float32(magnitudes[code, i] * sign))


def build_unpacker(grid, group, row, signs, scale):
    """Build a function (block, out) that unpacks one block to float32.

    grid: [codes, 8 or 4] magnitudes; group: weights that share a scale; row(block, i): the grid's row for octet or quad
    i; signs(block, octet): 8 sign bits; scale(block, group): float32.
    """
    size = grid.shape[1]

    @device
    def unpack(block, out):
        for first in range(0, 256, group):
            factor = scale(block, first // group)
            for i in range(first, first + group, size):
                store_signed(grid, row(block, i // size), factor, signs(block, i // 8) >> i % 8, out + 4 * i)

    return unpack


def build_sign_reader(at, apart):
    """Build a function (block, octet) that reads signs from 32-bit words of four sign codes.

    apart: bytes from one word to the next.
    """
    return device(
        lambda block, octet: complete_signs(simd.load_u32(block + at + apart * (octet >> 2)) >> 7 * (octet & 3) & 127)
    )


def build_scale_reader(at, apart, factor):
    """Build a function (block, run): d * (scale + 1/2) * factor.

    The scale is in the topmost 4 bits of a 32-bit word.
    """
    half, by = np.float32(0.5), np.float32(factor)
    return device(
        lambda block, run: (
            simd.load_f16(block) * (half + np.float32(simd.load_u32(block + at + apart * run) >> 28)) * by
        )
    )


@device
def read_nibble(address, i):
    return simd.load_u8(address + i // 2) >> 4 * (i % 2) & 15


signs_0, signs_1, signs_2, signs_3 = (build_octet_shuffle(simd.u8x32, [4 * run + q for run in RUNS]) for q in STRIPES)


def build_signed_format(name, grid, row, signs, scales):
    """Build the GroupFormat of a format with magnitudes in a grid.

    signs(address): u8x32, one byte per octet.
    """
    offset = int(grid.max())
    lookup = build_octet_reader if grid.shape[1] == 8 else build_quad_reader
    magnitudes = lookup(pack_rows(offset + grid), row)
    reflect = simd.make_reflect([1 << i for i in range(8)] * 8, 2 * offset)

    @device
    def codes(address):
        (c0, c1, c2, c3), bits = magnitudes(address), signs(address)
        return (
            reflect(c0, signs_0(bits)),
            reflect(c1, signs_1(bits)),
            reflect(c2, signs_2(bits)),
            reflect(c3, signs_3(bits)),
        )

    return GroupFormat(name, LAYOUTS[name].sub_block, BY_NAME[name].bytes, codes, offset, 2 * offset, scales)


up_1, up_2, up_4 = (simd.make_shift(simd.u8x32, True, bits) for bits in (1, 2, 4))
topmost_bit = simd.constant(simd.u8x32, 128)


@device
def set_parity(signs):
    """Set the topmost bit of each byte so that its number of ones is even.

    signs: u8x32 whose topmost bits are 0. The shifts move each byte's parity up to its topmost bit. Bits that enter
    from a neighbouring byte stay below it.
    """
    twos = signs ^ up_1(signs)
    fours = twos ^ up_2(twos)
    return signs | ((fours ^ up_4(fours)) & topmost_bit())


four_sevens = simd.make_fields(7)
upper_nibbles = simd.constant(simd.u8x32, 0xF0)
topmost_bytes = simd.make_shuffle(simd.u8x8, simd.u8x32, range(3, 32, 4))


@device
def read_word_signs(words):
    return set_parity(four_sevens(words))


@device
def compute_word_scales(words, d):
    """Compute d * (scale + 1/2) for 8 scales in the topmost 4 bits of eight 32-bit words: f32x8.

    The 4 bits are read as the high half of a byte, 16 * scale; the result is divided by 16.
    """
    return (simd.float_u8x8(topmost_bytes(words & upper_nibbles())) + simd.splat_f32x8(8.0)) * (
        d * simd.splat_f32x8(1 / 16)
    )


NIBBLES = 0x0F0F0F0F0F0F0F0F
XXS2, XS2, S2, XXS3, S3 = (LAYOUTS[name] for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))
CODES = XXS2.find_field("codes")  # the same for all
XXS2_SCALES, XS2_SCALES, S2_SCALES, XXS3_SCALES, S3_SCALES = (f.find_field("scales") for f in (XXS2, XS2, S2, XXS3, S3))
S2_SIGNS, S2_HIGH, S3_SIGNS, S3_HIGH = (
    S2.find_field("signs"),
    S2.find_field("high"),
    S3.find_field("signs"),
    S3.find_field("high"),
)
alternate = simd.make_shuffle(simd.u8x16, simd.u8x16, [8 * half + i for i in range(8) for half in (0, 1)])


@device
def compute_nibble_scales(address, d):
    """Compute d * (scale + 1/2) for 16 scales of 4 bits each, 8 bytes at an address: f32x16."""
    nibbles = simd.load_i64(address)
    scales = alternate(
        simd.concatenate_u8x16(simd.split_int64(nibbles & NIBBLES), simd.split_int64((nibbles >> 4) & NIBBLES))
    )
    return (simd.float_i8x16(scales) + simd.splat_f32x16(0.5)) * d


second_words = simd.make_shuffle(simd.u8x32, simd.u8x64, [8 * run + i for run in RUNS for i in range(4, 8)])


@device
def get_iq2_xxs_row(address, octet):
    return simd.load_u8(address + CODES + 8 * (octet >> 2) + (octet & 3))


@device
def read_iq2_xxs_signs(address):
    return read_word_signs(second_words(simd.load_u8x64(address + CODES)))


@device
def read_iq2_xxs_scales(address):
    d = simd.load_splat_f16x8(address) * simd.splat_f32x8(0.25)
    return compute_word_scales(second_words(simd.load_u8x64(address + CODES)), d)


odd_bytes = simd.make_shuffle(simd.u8x32, simd.u8x64, range(1, 64, 2))
down_1 = simd.make_shift(simd.u8x32, False, 1)
seven_bits = simd.constant(simd.u8x32, 127)


@device
def get_iq2_xs_row(address, octet):
    return simd.load_u16(address + CODES + 2 * octet) & 511


@device
def read_iq2_xs_signs(address):
    return set_parity(down_1(odd_bytes(simd.load_u8x64(address + CODES))) & seven_bits())


@device
def read_iq2_xs_scales(address):
    return compute_nibble_scales(address + XS2_SCALES, simd.load_splat_f16x16(address) * simd.splat_f32x16(0.25))


@device
def get_iq2_s_row(address, octet):
    return simd.load_u8(address + CODES + octet) | (
        (simd.load_u8(address + S2_HIGH + (octet >> 2)) << (8 - 2 * (octet & 3))) & 0x300
    )


@device
def read_iq2_s_signs(address):
    return simd.load_u8x32(address + S2_SIGNS)


@device
def read_iq2_s_scales(address):
    return compute_nibble_scales(address + S2_SCALES, simd.load_splat_f16x16(address) * simd.splat_f32x16(0.25))


@device
def get_iq3_xxs_row(address, quad):
    return simd.load_u8(address + CODES + quad)


@device
def read_iq3_xxs_signs(address):
    return read_word_signs(simd.load_u8x32(address + XXS3_SCALES))


@device
def read_iq3_xxs_scales(address):
    return compute_word_scales(
        simd.load_u8x32(address + XXS3_SCALES), simd.load_splat_f16x8(address) * simd.splat_f32x8(0.5)
    )


@device
def get_iq3_s_row(address, quad):
    return simd.load_u8(address + CODES + quad) | (
        (simd.load_u8(address + S3_HIGH + (quad >> 3)) << (8 - (quad & 7))) & 0x100
    )


@device
def read_iq3_s_signs(address):
    return simd.load_u8x32(address + S3_SIGNS)


@device
def read_iq3_s_scales(address):
    """Compute the 8 scales of a group in IQ3_S, d * (1 + 2 * scale), stored in 4 bits each: f32x8."""
    nibbles = simd.load_u32(address + S3_SCALES)
    nibbles = (nibbles | nibbles << 16) & 0x0000FFFF0000FFFF
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FF00FF00FF
    nibbles = (nibbles | nibbles << 4) & NIBBLES
    return (simd.float_u8x8(simd.split_int64(nibbles)) + simd.splat_f32x8(0.5)) * (
        simd.load_splat_f16x8(address) * simd.splat_f32x8(2.0)
    )


GROUPS = IQ1_GROUPS | {
    format.name: format
    for format in (
        build_signed_format("IQ2_XXS", IQ2_XXS_GRID, get_iq2_xxs_row, read_iq2_xxs_signs, read_iq2_xxs_scales),
        build_signed_format("IQ2_XS", IQ2_XS_GRID, get_iq2_xs_row, read_iq2_xs_signs, read_iq2_xs_scales),
        build_signed_format("IQ2_S", IQ2_S_GRID, get_iq2_s_row, read_iq2_s_signs, read_iq2_s_scales),
        build_signed_format("IQ3_XXS", IQ3_XXS_GRID, get_iq3_xxs_row, read_iq3_xxs_signs, read_iq3_xxs_scales),
        build_signed_format("IQ3_S", IQ3_S_GRID, get_iq3_s_row, read_iq3_s_signs, read_iq3_s_scales),
    )
}
HALF, QUARTER = np.float32(0.5), np.float32(0.25)
xs2_scale = device(
    lambda block, group: simd.load_f16(block) * (HALF + np.float32(read_nibble(block + XS2_SCALES, group))) * QUARTER
)
s2_scale = device(
    lambda block, group: simd.load_f16(block) * (HALF + np.float32(read_nibble(block + S2_SCALES, group))) * QUARTER
)
s3_scale = device(lambda block, group: simd.load_f16(block) * np.float32(1 + 2 * read_nibble(block + S3_SCALES, group)))
xs2_octet_signs = device(lambda block, octet: complete_signs(simd.load_u16(block + CODES + 2 * octet) >> 9))
s2_octet_signs = device(lambda block, octet: simd.load_u8(block + S2_SIGNS + octet))
s3_octet_signs = device(lambda block, octet: simd.load_u8(block + S3_SIGNS + octet))
UNPACK = IQ1_UNPACK | {
    "IQ2_XXS": build_unpacker(
        IQ2_XXS_GRID, 32, get_iq2_xxs_row, build_sign_reader(XXS2_SCALES, 8), build_scale_reader(XXS2_SCALES, 8, 0.25)
    ),
    "IQ2_XS": build_unpacker(IQ2_XS_GRID, 16, get_iq2_xs_row, xs2_octet_signs, xs2_scale),
    "IQ2_S": build_unpacker(IQ2_S_GRID, 16, get_iq2_s_row, s2_octet_signs, s2_scale),
    "IQ3_XXS": build_unpacker(
        IQ3_XXS_GRID, 32, get_iq3_xxs_row, build_sign_reader(XXS3_SCALES, 4), build_scale_reader(XXS3_SCALES, 4, 0.5)
    ),
    "IQ3_S": build_unpacker(IQ3_S_GRID, 32, get_iq3_s_row, s3_octet_signs, s3_scale),
}
