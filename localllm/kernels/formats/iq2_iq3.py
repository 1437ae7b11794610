"""The IQ2 and IQ3 formats: a grid of magnitudes, and signs that are stored apart.

A sign takes one bit per weight, or 7 bits for 8 weights, where the eighth sign makes the number of minus signs even
(`eight_signs`). Codes for the int8 kernels are offset + magnitude; a minus sign turns that into offset - magnitude.
"""

import numpy as np
from gguf import quants

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.grids import RUNS, STRIPES, codebook, for_octets, octets, packed, quads
from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.simd import (
    bytes_of,
    concatenate_u8x16,
    constant_u8,
    float_i8x16,
    float_u8x8,
    load_f16,
    load_i64,
    load_splat_f16x8,
    load_splat_f16x16,
    load_u8,
    load_u8x32,
    load_u8x64,
    load_u16,
    load_u32,
    make_fields,
    make_reflect,
    make_shift,
    make_shuffle,
    splat_f32x8,
    splat_f32x16,
    store_f32,
    u8x8,
    u8x16,
    u8x32,
    u8x64,
)
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

IQ2_XXS_GRID = codebook(quants.IQ2_XXS)  # [256, 8], values 8, 25, 43
IQ2_XS_GRID = codebook(quants.IQ2_XS)  # [512, 8], the same values
IQ2_S_GRID = codebook(quants.IQ2_S)  # [1024, 8], the same values
IQ3_XXS_GRID = codebook(quants.IQ3_XXS)  # [256, 4], values 4, 12, 20 .. 52, 62
IQ3_S_GRID = codebook(quants.IQ3_S)  # [512, 4], values 1, 3, 5 .. 15


@device
def eight_signs(code):
    """Return the 8 sign bits of a 7-bit sign code: its bits, and an eighth that makes the number of ones even."""
    parity = code ^ code >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return code | (parity & 1) << 7


@device
def store_signed(magnitudes, code, scale, signs, out):
    """Write the weights of row `code` of the grid `magnitudes` to `out`, times `scale`.

    Weight i is negated if bit i of `signs` is set.
    """
    for i in range(magnitudes.shape[1]):
        sign = 1 - 2 * ((signs >> i) & 1)
        store_f32(out + 4 * i, scale * np.float32(magnitudes[code, i] * sign))


def unpacker(grid, group, row, signs, scale):
    """Make a function (block, out) that unpacks one block to float32.

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


def word_signs(at, apart):
    """Make a function (block, octet) that reads the signs of an octet from a 32-bit word with four 7-bit sign codes.

    at: the byte of the first word; apart: bytes from word to word.
    """
    return device(
        lambda block, octet: eight_signs(load_u32(block + at + apart * (octet >> 2)) >> 7 * (octet & 3) & 127)
    )


def word_scales(at, apart, factor):
    """Make a function (block, run) that computes a run's scale, d * (scale + 1/2) * factor.

    The stored scale is the topmost 4 bits of a 32-bit word; at: the byte of the first word; apart: bytes from word to
    word.
    """
    half, by = np.float32(0.5), np.float32(factor)
    return device(
        lambda block, run: load_f16(block) * (half + np.float32(load_u32(block + at + apart * run) >> 28)) * by
    )


@device
def nibble_at(address, i):
    """Return number i of the 4-bit numbers at an address, two in a byte, the low half first."""
    return load_u8(address + i // 2) >> 4 * (i % 2) & 15


signs_0, signs_1, signs_2, signs_3 = (for_octets(u8x32, [4 * run + q for run in RUNS]) for q in STRIPES)


def signed(name, grid, row, signs, scales):
    """Return the GroupFormat of a format with magnitudes in a grid.

    row: the grid's row for each octet or quad (grids.py); signs(address): u8x32, one byte of signs per octet; scales:
    see GroupFormat.
    """
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

    return GroupFormat(name, LAYOUTS[name].sub_block, BY_NAME[name].bytes, codes, offset, 2 * offset, scales)


up_1, up_2, up_4 = (make_shift(u8x32, True, bits) for bits in (1, 2, 4))
topmost_bit = constant_u8(u8x32, 128)


@device
def evened(signs):
    """Set the topmost bit of each byte so that its number of ones is even. `signs`: u8x32 whose topmost bits are 0.

    The shifts move each byte's parity up to its topmost bit. Bits that enter from a neighbouring byte stay below it.
    """
    twos = signs ^ up_1(signs)
    fours = twos ^ up_2(twos)
    return signs | ((fours ^ up_4(fours)) & topmost_bit())


four_sevens = make_fields(7)
upper_nibbles = constant_u8(u8x32, 0xF0)
topmost_bytes = make_shuffle(u8x8, u8x32, range(3, 32, 4))


@device
def signs_of_words(words):
    """Return the signs of a group from eight 32-bit words, each with four 7-bit sign codes: u8x32, a byte per octet."""
    return evened(four_sevens(words))


@device
def scales_of_words(words, d):
    """Compute d * (scale + 1/2) for 8 scales, stored in the topmost 4 bits of eight 32-bit words: f32x8.

    The 4 bits are read as the high half of a byte, 16 * scale; the result is divided by 16.
    """
    return (float_u8x8(topmost_bytes(words & upper_nibbles())) + splat_f32x8(8.0)) * (d * splat_f32x8(1 / 16))


NIBBLES = 0x0F0F0F0F0F0F0F0F
XXS2, XS2, S2, XXS3, S3 = (LAYOUTS[name] for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))
CODES = XXS2.part("codes")  # the same for all
XXS2_SCALES, XS2_SCALES, S2_SCALES, XXS3_SCALES, S3_SCALES = (f.part("scales") for f in (XXS2, XS2, S2, XXS3, S3))
S2_SIGNS, S2_HIGH, S3_SIGNS, S3_HIGH = S2.part("signs"), S2.part("high"), S3.part("signs"), S3.part("high")
alternate = make_shuffle(u8x16, u8x16, [8 * half + i for i in range(8) for half in (0, 1)])


@device
def scales_of_nibbles(address, d):
    """Compute d * (scale + 1/2) for 16 scales of 4 bits each, 8 bytes at an address: f32x16."""
    nibbles = load_i64(address)
    scales = alternate(concatenate_u8x16(bytes_of(nibbles & NIBBLES), bytes_of((nibbles >> 4) & NIBBLES)))
    return (float_i8x16(scales) + splat_f32x16(0.5)) * d


second_words = make_shuffle(u8x32, u8x64, [8 * run + i for run in RUNS for i in range(4, 8)])


@device
def iq2_xxs_row(address, octet):
    return load_u8(address + CODES + 8 * (octet >> 2) + (octet & 3))


@device
def iq2_xxs_signs(address):
    return signs_of_words(second_words(load_u8x64(address + CODES)))


@device
def iq2_xxs_scales(address):
    d = load_splat_f16x8(address) * splat_f32x8(0.25)
    return scales_of_words(second_words(load_u8x64(address + CODES)), d)


odd_bytes = make_shuffle(u8x32, u8x64, range(1, 64, 2))
down_1 = make_shift(u8x32, False, 1)
seven_bits = constant_u8(u8x32, 127)


@device
def iq2_xs_row(address, octet):
    return load_u16(address + CODES + 2 * octet) & 511


@device
def iq2_xs_signs(address):
    return evened(down_1(odd_bytes(load_u8x64(address + CODES))) & seven_bits())


@device
def iq2_xs_scales(address):
    return scales_of_nibbles(address + XS2_SCALES, load_splat_f16x16(address) * splat_f32x16(0.25))


@device
def iq2_s_row(address, octet):
    return load_u8(address + CODES + octet) | (
        (load_u8(address + S2_HIGH + (octet >> 2)) << (8 - 2 * (octet & 3))) & 0x300
    )


@device
def iq2_s_signs(address):
    return load_u8x32(address + S2_SIGNS)


@device
def iq2_s_scales(address):
    return scales_of_nibbles(address + S2_SCALES, load_splat_f16x16(address) * splat_f32x16(0.25))


@device
def iq3_xxs_row(address, quad):
    return load_u8(address + CODES + quad)


@device
def iq3_xxs_signs(address):
    return signs_of_words(load_u8x32(address + XXS3_SCALES))


@device
def iq3_xxs_scales(address):
    return scales_of_words(load_u8x32(address + XXS3_SCALES), load_splat_f16x8(address) * splat_f32x8(0.5))


@device
def iq3_s_row(address, quad):
    return load_u8(address + CODES + quad) | ((load_u8(address + S3_HIGH + (quad >> 3)) << (8 - (quad & 7))) & 0x100)


@device
def iq3_s_signs(address):
    return load_u8x32(address + S3_SIGNS)


@device
def iq3_s_scales(address):
    """Compute the 8 scales of a group in IQ3_S, d * (1 + 2 * scale), stored in 4 bits each: f32x8."""
    nibbles = load_u32(address + S3_SCALES)
    nibbles = (nibbles | nibbles << 16) & 0x0000FFFF0000FFFF
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FF00FF00FF
    nibbles = (nibbles | nibbles << 4) & NIBBLES
    return (float_u8x8(bytes_of(nibbles)) + splat_f32x8(0.5)) * (load_splat_f16x8(address) * splat_f32x8(2.0))


GROUPS = {
    format.name: format
    for format in (
        signed("IQ2_XXS", IQ2_XXS_GRID, iq2_xxs_row, iq2_xxs_signs, iq2_xxs_scales),
        signed("IQ2_XS", IQ2_XS_GRID, iq2_xs_row, iq2_xs_signs, iq2_xs_scales),
        signed("IQ2_S", IQ2_S_GRID, iq2_s_row, iq2_s_signs, iq2_s_scales),
        signed("IQ3_XXS", IQ3_XXS_GRID, iq3_xxs_row, iq3_xxs_signs, iq3_xxs_scales),
        signed("IQ3_S", IQ3_S_GRID, iq3_s_row, iq3_s_signs, iq3_s_scales),
    )
}
HALF, QUARTER = np.float32(0.5), np.float32(0.25)
xs2_scale = device(
    lambda block, group: load_f16(block) * (HALF + np.float32(nibble_at(block + XS2_SCALES, group))) * QUARTER
)
s2_scale = device(
    lambda block, group: load_f16(block) * (HALF + np.float32(nibble_at(block + S2_SCALES, group))) * QUARTER
)
s3_scale = device(lambda block, group: load_f16(block) * np.float32(1 + 2 * nibble_at(block + S3_SCALES, group)))
xs2_octet_signs = device(lambda block, octet: eight_signs(load_u16(block + CODES + 2 * octet) >> 9))
s2_octet_signs = device(lambda block, octet: load_u8(block + S2_SIGNS + octet))
s3_octet_signs = device(lambda block, octet: load_u8(block + S3_SIGNS + octet))
UNPACK = {
    "IQ2_XXS": unpacker(IQ2_XXS_GRID, 32, iq2_xxs_row, word_signs(XXS2_SCALES, 8), word_scales(XXS2_SCALES, 8, 0.25)),
    "IQ2_XS": unpacker(IQ2_XS_GRID, 16, iq2_xs_row, xs2_octet_signs, xs2_scale),
    "IQ2_S": unpacker(IQ2_S_GRID, 16, iq2_s_row, s2_octet_signs, s2_scale),
    "IQ3_XXS": unpacker(IQ3_XXS_GRID, 32, iq3_xxs_row, word_signs(XXS3_SCALES, 4), word_scales(XXS3_SCALES, 4, 0.5)),
    "IQ3_S": unpacker(IQ3_S_GRID, 32, iq3_s_row, s3_octet_signs, s3_scale),
}
