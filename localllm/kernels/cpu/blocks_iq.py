"""The i-quants with codebooks: a code names 4 or 8 weights at once.

Eight weights of 2 bits have 65536 patterns, most of which never matter. A codebook ("grid") keeps the 256 to 2048 that
represent real weights best, so 8 to 11 bits name 8 weights. In the IQ2 and IQ3 formats the grid holds magnitudes, and
signs are stored beside it: one bit a weight, or 7 bits for 8 weights where the number of minus signs is made even (see
`eight_signs`). In the IQ1 formats the grid holds -1, 0, 1, and a small shift takes the place of a minimum.

The grids are ggml's (ggml-common.h), read from the `gguf` package, which carries them packed. Numba embeds them in the
machine code as constants. All blocks have 256 weights, counted here in runs of 32, octets of 8 and quads of 4. `blocks`
says what all of these functions have in common.
"""

from typing import Any

import numpy as np
from gguf import quants

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import float_f16, load_f16, load_u8, load_u16, load_u32, store_f32


def codebook(format: Any) -> np.ndarray:
    """The grid of one of the classes in `gguf.quants`: int8 [codes, weights per code]."""
    format.init_grid()
    return format.grid.reshape(format.grid_shape).astype(np.int8)


IQ1_GRID = codebook(quants.IQ1_S)  # [2048, 8], values -1, 0, 1
IQ2_XXS_GRID = codebook(quants.IQ2_XXS)  # [256, 8], values 8, 25, 43
IQ2_XS_GRID = codebook(quants.IQ2_XS)  # [512, 8], the same values
IQ2_S_GRID = codebook(quants.IQ2_S)  # [1024, 8], the same values
IQ3_XXS_GRID = codebook(quants.IQ3_XXS)  # [256, 4], values 4, 12, 20 .. 52, 62
IQ3_S_GRID = codebook(quants.IQ3_S)  # [512, 4], values 1, 3, 5 .. 15

IQ1_SHIFT = np.float32(0.125)


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


@device
def store_shifted(code, scale, negative, out):
    """Writes scale * (row `code` of the IQ1 grid + 1/8), or - 1/8 where `negative` is not zero."""
    shift = -IQ1_SHIFT if negative else IQ1_SHIFT
    for i in range(8):
        store_f32(out + 4 * i, scale * (np.float32(IQ1_GRID[code, i]) + shift))


@device
def unpack_iq1_s(block, out):
    """IQ1_S: 256 weights in 50 bytes (1.56 bits each).

    0 .. 1    d, float16
    2 .. 33   the low 8 bits of the grid codes of 32 octets
    34 .. 49  16 bits for each run of 32 weights: the high 3 bits of its 4 grid codes, from the lowest bits up, a 3-bit
              scale, and on top the sign of the shift (set: minus)

    weight = d * (1 + 2 * scale) * (IQ1_GRID[code] ± 1/8)
    """
    d = load_f16(block)
    for run in range(8):
        packed = load_u16(block + 34 + 2 * run)
        scale = d * np.float32(1 + 2 * ((packed >> 12) & 7))
        for octet in range(4):
            code = load_u8(block + 2 + 4 * run + octet) | ((packed >> (3 * octet)) & 7) << 8
            store_shifted(code, scale, packed >> 15, out + 4 * (32 * run + 8 * octet))


@device
def iq1_m_scale(scales):
    """The float16 d whose four halves of a byte are the topmost 4 bits of four 16-bit integers, the lowest first."""
    bits = 0
    for n in range(4):
        bits |= (load_u16(scales + 2 * n) >> 12) << (4 * n)
    return float_f16(bits)


@device
def unpack_iq1_m(block, out):
    """IQ1_M: 256 weights in 56 bytes (1.75 bits each), the one format that stores its d in pieces.

    0 .. 31   the low 8 bits of the grid codes of 32 octets
    32 .. 47  4 bits for each octet, the low half first: the high 3 bits of its grid code, and the sign of its shift
              (set: minus)
    48 .. 55  four 16-bit integers: 3-bit scales of 16 weights each, four to an integer, from the lowest bits up; the
              topmost 4 bits are a piece of d, see `iq1_m_scale`

    weight = d * (1 + 2 * scale) * (IQ1_GRID[code] ± 1/8)
    """
    d = iq1_m_scale(block + 48)
    for octet in range(32):
        integer_scale = (load_u16(block + 48 + 2 * (octet // 8)) >> (3 * (octet // 2 % 4))) & 7
        scale = d * np.float32(1 + 2 * integer_scale)
        high = load_u8(block + 32 + octet // 2) >> (4 * (octet % 2))
        code = load_u8(block + octet) | (high & 7) << 8
        store_shifted(code, scale, high & 8, out + 4 * (8 * octet))
