"""The k-quants: 256 weights to a block, in groups of 16 or 32 whose scales are small integers themselves.

A float16 scale for every 16 weights would cost a bit per weight. A k-quant stores 4- to 8-bit integers instead, and one
float16 scale for all of them:

    weight = (d * group scale) * code                                 Q3_K, Q6_K: codes centred on zero
    weight = (d * group scale) * code - (dmin * group minimum)        Q2_K, Q4_K, Q5_K: codes from zero up

Codes lie in planes, so that one vector register of bytes yields whole groups: 32 bytes of 2-bit codes hold 128
weights, byte i the weights i, 32 + i, 64 + i and 96 + i, from the lowest bits up; 32 bytes of 4-bit codes hold 64
weights, byte i the weights i and 32 + i. `blocks` says what all of these functions have in common.
"""

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import load_f16, load_i8, load_u8, store_f32


@device
def unpack_q2_k(block, out):
    """Q2_K: 256 weights in 84 bytes, 2 bits each; 16 groups of 16.

    0 .. 15   group n: scale in the low half of byte n, minimum in the high half
    16 .. 79  codes of 2 bits, two runs of 32 bytes in planes
    80 .. 81  d, float16
    82 .. 83  dmin, float16

    weight = d * scale * code - dmin * minimum
    """
    scale, minimum_scale = load_f16(block + 80), load_f16(block + 82)
    for group in range(16):
        packed = load_u8(block + group)
        group_scale = scale * np.float32(packed & 15)
        group_minimum = minimum_scale * np.float32(packed >> 4)
        codes = block + 16 + 32 * (group // 8) + 16 * (group % 2)
        shift = 2 * (group % 8 // 2)
        for i in range(16):
            code = (load_u8(codes + i) >> shift) & 3
            store_f32(out + 4 * (16 * group + i), group_scale * np.float32(code) - group_minimum)


@device
def q3_k_scale(scales, group):
    """The signed 6-bit scale of one of 16 groups, out of 12 bytes.

    Bytes 0 .. 7 hold the low 4 bits (groups 0 .. 7 in the low halves, 8 .. 15 in the high halves), bytes 8 .. 11 the
    high 2 bits (groups 0 .. 3 in the lowest bits, then 4 .. 7, and so on). The value 32 means zero.
    """
    low = (load_u8(scales + group % 8) >> (4 * (group // 8))) & 15
    high = (load_u8(scales + 8 + group % 4) >> (2 * (group // 4))) & 3
    return (low | high << 4) - 32


@device
def unpack_q3_k(block, out):
    """Q3_K: 256 weights in 110 bytes, 3 bits each; 16 groups of 16.

    0 .. 31    the highest bits of the codes: byte i, bit n that of weight 32 * n + i
    32 .. 95   the low 2 bits of the codes, two runs of 32 bytes in planes
    96 .. 107  scales, see `q3_k_scale`
    108 .. 109 d, float16

    weight = d * scale * (code - 4)
    """
    scale = load_f16(block + 108)
    for group in range(16):
        group_scale = scale * np.float32(q3_k_scale(block + 96, group))
        high_bits = block + 16 * (group % 2)
        codes = block + 32 + 32 * (group // 8) + 16 * (group % 2)
        shift = 2 * (group % 8 // 2)
        for i in range(16):
            high = (load_u8(high_bits + i) >> (group // 2)) & 1
            code = (load_u8(codes + i) >> shift) & 3 | high << 2
            store_f32(out + 4 * (16 * group + i), group_scale * np.float32(code - 4))


@device
def q4_k_scale_and_minimum(scales, group):
    """The 6-bit scale and the 6-bit minimum of one of 8 groups, out of 12 bytes (Q4_K and Q5_K).

    Groups 0 .. 3 have theirs in the low 6 bits: scales in bytes 0 .. 3, minimums in bytes 4 .. 7. Groups 4 .. 7 have
    the low 4 bits in bytes 8 .. 11 (scale in the low half, minimum in the high half) and the upper 2 bits in the top
    bits of bytes 0 .. 3 (scale) and 4 .. 7 (minimum).
    """
    if group < 4:
        return load_u8(scales + group) & 63, load_u8(scales + 4 + group) & 63
    low = load_u8(scales + 4 + group)
    scale = (low & 15) | (load_u8(scales + group - 4) >> 6) << 4
    minimum = (low >> 4) | (load_u8(scales + group) >> 6) << 4
    return scale, minimum


@device
def unpack_q4_k(block, out):
    """Q4_K: 256 weights in 144 bytes, 4 bits each; 8 groups of 32.

    0 .. 1     d, float16
    2 .. 3     dmin, float16
    4 .. 15    scales and minimums, see `q4_k_scale_and_minimum`
    16 .. 143  codes of 4 bits, four runs of 32 bytes: even groups in the low halves, odd groups in the high halves

    weight = d * scale * code - dmin * minimum
    """
    scale, minimum_scale = load_f16(block), load_f16(block + 2)
    for group in range(8):
        integer_scale, integer_minimum = q4_k_scale_and_minimum(block + 4, group)
        group_scale = scale * np.float32(integer_scale)
        group_minimum = minimum_scale * np.float32(integer_minimum)
        codes = block + 16 + 32 * (group // 2)
        shift = 4 * (group % 2)
        for i in range(32):
            code = (load_u8(codes + i) >> shift) & 15
            store_f32(out + 4 * (32 * group + i), group_scale * np.float32(code) - group_minimum)


@device
def unpack_q5_k(block, out):
    """Q5_K: 256 weights in 176 bytes, 5 bits each; 8 groups of 32. Q4_K with a fifth bit for every code.

    0 .. 1     d, float16
    2 .. 3     dmin, float16
    4 .. 15    scales and minimums, see `q4_k_scale_and_minimum`
    16 .. 47   the highest bits of the codes: byte i, bit n that of weight 32 * n + i
    48 .. 175  the low 4 bits, four runs of 32 bytes: even groups in the low halves, odd groups in the high halves

    weight = d * scale * code - dmin * minimum
    """
    scale, minimum_scale = load_f16(block), load_f16(block + 2)
    for group in range(8):
        integer_scale, integer_minimum = q4_k_scale_and_minimum(block + 4, group)
        group_scale = scale * np.float32(integer_scale)
        group_minimum = minimum_scale * np.float32(integer_minimum)
        codes = block + 48 + 32 * (group // 2)
        shift = 4 * (group % 2)
        for i in range(32):
            high = (load_u8(block + 16 + i) >> group) & 1
            code = (load_u8(codes + i) >> shift) & 15 | high << 4
            store_f32(out + 4 * (32 * group + i), group_scale * np.float32(code) - group_minimum)


@device
def unpack_q6_k(block, out):
    """Q6_K: 256 weights in 210 bytes, 6 bits each; 16 groups of 16. Each half of the block has its own run of bytes.

    0 .. 127   the low 4 bits, two runs of 64 bytes: weights 0 .. 63 of a half in the low halves, 64 .. 127 in the high
    128 .. 191 the high 2 bits, two runs of 32 bytes in planes
    192 .. 207 scales of the groups, int8
    208 .. 209 d, float16

    weight = d * scale * (code - 32)
    """
    scale = load_f16(block + 208)
    for group in range(16):
        group_scale = scale * np.float32(load_i8(block + 192 + group))
        half, position = group // 8, 16 * (group % 8)  # the group's first weight within its half
        low_bits = block + 64 * half + position % 64
        low_shift = 4 * (position // 64)
        high_bits = block + 128 + 32 * half + position % 32
        high_shift = 2 * (position // 32)
        for i in range(16):
            low = (load_u8(low_bits + i) >> low_shift) & 15
            high = (load_u8(high_bits + i) >> high_shift) & 3
            store_f32(out + 4 * (16 * group + i), group_scale * np.float32((low | high << 4) - 32))
