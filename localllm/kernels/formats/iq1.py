"""IQ1_S and IQ1_M: a grid of -1, 0 and 1, and a shift of 1/8 up or down, which takes the place of a minimum.

The int8 kernels get both in eighths.
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

IQ1_GRID = codebook(quants.IQ1_S)  # [2048, 8], values -1, 0, 1
IQ1_SHIFT = np.float32(0.125)


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


GROUPS = {
    "IQ1_S": GroupFormat("IQ1_S", 32, 50, iq1_s_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_s_scales),
    "IQ1_M": GroupFormat("IQ1_M", 16, 56, iq1_m_codes, IQ1_OFFSET, 2 * IQ1_OFFSET, iq1_m_scales),
}
UNPACK = {"IQ1_S": unpack_iq1_s, "IQ1_M": unpack_iq1_m}
