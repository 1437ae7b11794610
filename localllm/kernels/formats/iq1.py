"""IQ1_S and IQ1_M: a grid of -1, 0 and 1, shifted by 1/8 up or down. The shift takes the place of a minimum.

The int8 kernels read the shifted grid values in units of 1/8, plus IQ1_OFFSET.
"""

import numpy as np
from gguf import quants

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.grids import RUNS, codebook, for_octets, octets, packed
from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.simd import (
    bytes_of,
    concatenate_u8x16,
    constant_u8,
    float_f16,
    float_i8x16,
    float_u8x8,
    load_f16,
    load_i64,
    load_splat_f16x8,
    load_u8,
    load_u8x16,
    load_u16,
    make_shuffle,
    make_where,
    splat_f16x16,
    splat_f32x8,
    splat_f32x16,
    store_f32,
    u8x8,
    u8x16,
)
from localllm.quant.layouts import LAYOUTS

IQ1_GRID = codebook(quants.IQ1_S)  # [2048, 8], values -1, 0, 1
IQ1_SHIFT = np.float32(0.125)


@device
def store_shifted(code, scale, negative, out):
    """Write the 8 weights of a code to `out`: scale * (grid value + 1/8), or - 1/8 if `negative` is not 0."""
    shift = -IQ1_SHIFT if negative else IQ1_SHIFT
    for i in range(8):
        store_f32(out + 4 * i, scale * (np.float32(IQ1_GRID[code, i]) + shift))


@device
def iq1_m_scale(scales):
    """Assemble the float16 d, which IQ1_M stores in the topmost 4 bits of each of the four 16-bit integers at `scales`.

    The first integer has the lowest 4 bits.
    """
    bits = 0
    for n in range(4):
        bits |= (load_u16(scales + 2 * n) >> 12) << (4 * n)
    return float_f16(bits)


S, M = LAYOUTS["IQ1_S"], LAYOUTS["IQ1_M"]
S_CODES, S_SCALES, M_CODES, M_HIGH, M_SCALES = (
    S.part("codes"),
    S.part("scales"),
    M.part("codes"),
    M.part("high"),
    M.part("scales"),
)


@device
def unpack_iq1_s(block, out):
    for octet in range(32):
        word = load_u16(block + S_SCALES + 2 * (octet // 4))
        scale = load_f16(block) * np.float32(1 + 2 * (word >> 12 & 7))
        store_shifted(iq1_s_row(block, octet), scale, word >> 15, out + 32 * octet)


@device
def unpack_iq1_m(block, out):
    d = iq1_m_scale(block + M_SCALES)
    for octet in range(32):
        multiple = load_u16(block + M_SCALES + 2 * (octet // 8)) >> 3 * (octet // 2 % 4) & 7
        is_down = load_u8(block + M_HIGH + octet // 2) >> 4 * (octet % 2) & 8
        store_shifted(iq1_m_row(block, octet), d * np.float32(1 + 2 * multiple), is_down, out + 32 * octet)


@device
def iq1_s_row(block, octet):
    high = load_u16(block + S_SCALES + 2 * (octet >> 2)) << 8 >> 3 * (octet & 3)
    return load_u8(block + S_CODES + octet) | high & 0x700


@device
def iq1_m_row(block, octet):
    return load_u8(block + M_CODES + octet) | (load_u8(block + M_HIGH + (octet >> 1)) << (8 - 4 * (octet & 1))) & 0x700


IQ1_OFFSET = 9
IQ1_TABLE = packed(IQ1_GRID * 8 + 1 + IQ1_OFFSET)  # shifted up by 1/8; those shifted down are 2 smaller
shift_down_at_3, shift_down_at_7 = (make_where([1 << bit] * 64, -2) for bit in (3, 7))
iq1_s_shifts = for_octets(u8x16, [2 * run + 1 for run in RUNS])
iq1_s_scale_bits, upper_bytes = constant_u8(u8x16, 0x70), make_shuffle(u8x8, u8x16, range(1, 16, 2))


iq1_s_octets = octets(IQ1_TABLE, iq1_s_row)


@device
def iq1_s_codes(address):
    (c0, c1, c2, c3), bits = iq1_s_octets(address), iq1_s_shifts(load_u8x16(address + S_SCALES))
    return shift_down_at_7(c0, bits), shift_down_at_7(c1, bits), shift_down_at_7(c2, bits), shift_down_at_7(c3, bits)


@device
def iq1_s_scales(address):
    """Compute the 8 scales of a group in IQ1_S, d / 8 * (1 + 2 * scale): f32x8.

    A stored scale has 3 bits, bits 4 to 6 of a byte. They are read as 16 * scale, and the result is divided by 16.
    """
    scales = float_u8x8(upper_bytes(load_u8x16(address + S_SCALES) & iq1_s_scale_bits()))
    return (scales + splat_f32x8(8.0)) * (load_splat_f16x8(address) * splat_f32x8(1 / 64))


iq1_m_shifts_01, iq1_m_shifts_23 = (for_octets(u8x16, [2 * run + pair for run in RUNS]) for pair in (0, 1))
alternate_pairs = make_shuffle(
    u8x16, u8x16, [8 * half + 2 * n + i for n in range(4) for half in (0, 1) for i in (0, 1)]
)


iq1_m_octets = octets(IQ1_TABLE, iq1_m_row)


@device
def iq1_m_codes(address):
    (c0, c1, c2, c3), bits = iq1_m_octets(address), load_u8x16(address + M_HIGH)
    first, last = iq1_m_shifts_01(bits), iq1_m_shifts_23(bits)
    return shift_down_at_3(c0, first), shift_down_at_7(c1, first), shift_down_at_3(c2, last), shift_down_at_7(c3, last)


@device
def iq1_m_scales(address):
    """Compute the 16 scales of a group in IQ1_M, d / 8 * (1 + 2 * scale): f32x16.

    Stored in four 16-bit integers, each with four scales of 3 bits and, in the topmost bits, 4 bits of d.
    """
    words = load_i64(address + M_SCALES)
    first = (words & 0x0007000700070007) | ((words & 0x0038003800380038) << 5)
    second = ((words >> 6) & 0x0007000700070007) | ((words & 0x0E000E000E000E00) >> 1)
    d = ((words >> 12) & 0xF) | ((words >> 24) & 0xF0) | ((words >> 36) & 0xF00) | ((words >> 48) & 0xF000)
    scales = float_i8x16(alternate_pairs(concatenate_u8x16(bytes_of(first), bytes_of(second))))
    return (scales + splat_f32x16(0.5)) * (splat_f16x16(d) * splat_f32x16(0.25))


GROUPS = {
    "IQ1_S": GroupFormat("IQ1_S", 32, 50, iq1_s_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_s_scales),
    "IQ1_M": GroupFormat("IQ1_M", 16, 56, iq1_m_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_m_scales),
}
UNPACK = {"IQ1_S": unpack_iq1_s, "IQ1_M": unpack_iq1_m}
