"""The IQ2 and IQ3 formats: a grid of magnitudes, with signs beside it.

There is one sign bit for each weight, or 7 bits for 8 weights where the number of minus signs is made even (see
`eight_signs`). For the int8 kernels a minus sign reflects a code at the offset.
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
    """The 8 sign bits that a 7-bit code stands for: the code, and an eighth bit that makes the number of ones even."""
    parity = code ^ code >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return code | (parity & 1) << 7


@device
def store_signed(magnitudes, code, scale, signs, out):
    """Writes scale * row `code` of the grid `magnitudes`, negated where the bit in `signs` is set (lowest first)."""
    for i in range(magnitudes.shape[1]):
        sign = 1 - 2 * ((signs >> i) & 1)
        store_f32(out + 4 * i, scale * np.float32(magnitudes[code, i] * sign))


@device
def unpack_iq2_xxs(block, out):
    """IQ2_XXS: 256 weights in 66 bytes (2.06 bits each). A run of 32 weights is 8 bytes.

    0 .. 1    d, float16
    2 .. 65   8 runs: 4 bytes with the grid codes of 4 octets; then 32 bits: sign codes of 7 bits for the 4 octets, from
              the lowest bits up, and a 4-bit scale on top

    weight = d * (scale + 0.5) / 4 * IQ2_XXS_GRID[code] * sign
    """
    d = load_f16(block)
    for run in range(8):
        codes = block + 2 + 8 * run
        signs_and_scale = load_u32(codes + 4)
        scale = d * (np.float32(0.5) + np.float32(signs_and_scale >> 28)) * np.float32(0.25)
        for octet in range(4):
            signs = eight_signs((signs_and_scale >> (7 * octet)) & 127)
            store_signed(IQ2_XXS_GRID, load_u8(codes + octet), scale, signs, out + 4 * (32 * run + 8 * octet))


@device
def unpack_iq2_xs(block, out):
    """IQ2_XS: 256 weights in 74 bytes (2.31 bits each).

    0 .. 1    d, float16
    2 .. 65   32 octets, 16 bits each: a 9-bit grid code in the low bits, a 7-bit sign code on top
    66 .. 73  4-bit scales of 16 weights each, two to a byte, the low half first

    weight = d * (scale + 0.5) / 4 * IQ2_XS_GRID[code] * sign
    """
    d = load_f16(block)
    for octet in range(32):
        integer_scale = (load_u8(block + 66 + octet // 4) >> (4 * (octet // 2 % 2))) & 15
        scale = d * (np.float32(0.5) + np.float32(integer_scale)) * np.float32(0.25)
        packed = load_u16(block + 2 + 2 * octet)
        store_signed(IQ2_XS_GRID, packed & 511, scale, eight_signs(packed >> 9), out + 4 * (8 * octet))


@device
def unpack_iq2_s(block, out):
    """IQ2_S: 256 weights in 82 bytes (2.56 bits each), with all 8 signs of an octet stored.

    0 .. 1    d, float16
    2 .. 33   the low 8 bits of the grid codes of 32 octets
    34 .. 65  the signs of 32 octets
    66 .. 73  the high 2 bits of the grid codes, four to a byte, the lowest bits first
    74 .. 81  4-bit scales of 16 weights each, two to a byte, the low half first

    weight = d * (scale + 0.5) / 4 * IQ2_S_GRID[code] * sign
    """
    d = load_f16(block)
    for octet in range(32):
        integer_scale = (load_u8(block + 74 + octet // 4) >> (4 * (octet // 2 % 2))) & 15
        scale = d * (np.float32(0.5) + np.float32(integer_scale)) * np.float32(0.25)
        high = (load_u8(block + 66 + octet // 4) >> (2 * (octet % 4))) & 3
        code = load_u8(block + 2 + octet) | high << 8
        store_signed(IQ2_S_GRID, code, scale, load_u8(block + 34 + octet), out + 4 * (8 * octet))


@device
def unpack_iq3_xxs(block, out):
    """IQ3_XXS: 256 weights in 98 bytes (3.06 bits each).

    0 .. 1    d, float16
    2 .. 65   the grid codes of 64 quads
    66 .. 97  32 bits for each run of 32 weights: sign codes of 7 bits for its 4 octets, from the lowest bits up, and a
              4-bit scale on top

    weight = d * (scale + 0.5) / 2 * IQ3_XXS_GRID[code] * sign
    """
    d = load_f16(block)
    for run in range(8):
        signs_and_scale = load_u32(block + 66 + 4 * run)
        scale = d * (np.float32(0.5) + np.float32(signs_and_scale >> 28)) * np.float32(0.5)
        for quad in range(8):
            signs = eight_signs((signs_and_scale >> (7 * (quad // 2))) & 127) >> (4 * (quad % 2))
            code = load_u8(block + 2 + 8 * run + quad)
            store_signed(IQ3_XXS_GRID, code, scale, signs, out + 4 * (32 * run + 4 * quad))


@device
def unpack_iq3_s(block, out):
    """IQ3_S: 256 weights in 110 bytes (3.44 bits each), with all signs stored.

    0 .. 1     d, float16
    2 .. 65    the low 8 bits of the grid codes of 64 quads
    66 .. 73   the ninth bits of the grid codes, eight to a byte, the lowest bit first
    74 .. 105  the signs, eight to a byte, the lowest bit first
    106 .. 109 4-bit scales of 32 weights each, two to a byte, the low half first

    weight = d * (1 + 2 * scale) * IQ3_S_GRID[code] * sign
    """
    d = load_f16(block)
    for run in range(8):
        integer_scale = (load_u8(block + 106 + run // 2) >> (4 * (run % 2))) & 15
        scale = d * np.float32(1 + 2 * integer_scale)
        high_bits = load_u8(block + 66 + run)
        for quad in range(8):
            code = load_u8(block + 2 + 8 * run + quad) | ((high_bits >> quad) & 1) << 8
            signs = load_u8(block + 74 + 4 * run + quad // 2) >> (4 * (quad % 2))
            store_signed(IQ3_S_GRID, code, scale, signs, out + 4 * (32 * run + 4 * quad))


signs_0, signs_1, signs_2, signs_3 = (for_octets(u8x32, [4 * run + q for run in RUNS]) for q in STRIPES)


def signed(name, grid, row, signs, scales):
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

    return GroupFormat(name, LAYOUTS[name].sub_block, BY_NAME[name].bytes, codes, offset, 2 * offset, scales)


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
UNPACK = {
    "IQ2_XXS": unpack_iq2_xxs,
    "IQ2_XS": unpack_iq2_xs,
    "IQ2_S": unpack_iq2_s,
    "IQ3_XXS": unpack_iq3_xxs,
    "IQ3_S": unpack_iq3_s,
}
