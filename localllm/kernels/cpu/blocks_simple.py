"""Blocks with one scale: weight = d * code, or d * code + minimum.

Each docstring lists a block's bytes and then its formula; `blocks` says what all of these functions have in common.
"""

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import load_f16, load_i8, load_u8, load_u32, store_f32


@device
def unpack_q1_0(block, out):
    """Q1_0: 128 weights in 18 bytes, 1 bit each: only the sign differs.

    0 .. 1    d, float16
    2 .. 17   bits 0 .. 127, the lowest bit of a byte first

    weight = d where the bit is set, else -d
    """
    scale = load_f16(block)
    for byte in range(16):
        bits = load_u8(block + 2 + byte)
        for bit in range(8):
            sign = 2 * ((bits >> bit) & 1) - 1
            store_f32(out + 4 * (8 * byte + bit), scale * np.float32(sign))


@device
def unpack_q2_0(block, out):
    """Q2_0: 64 weights in 18 bytes, 2 bits each: -d, 0, d or 2 d.

    0 .. 1    d, float16
    2 .. 17   codes 0 .. 63, the lowest bits of a byte first

    weight = d * (code - 1)
    """
    scale = load_f16(block)
    for i in range(64):
        code = (load_u8(block + 2 + i // 4) >> (2 * (i % 4))) & 3
        store_f32(out + 4 * i, scale * np.float32(code - 1))


@device
def unpack_q4_0(block, out):
    """Q4_0: 32 weights in 18 bytes, 4 bits each, centred on zero.

    0 .. 1    d, float16
    2 .. 17   codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * (code - 8)
    """
    scale = load_f16(block)
    for i in range(16):
        codes = load_u8(block + 2 + i)
        store_f32(out + 4 * i, scale * np.float32((codes & 15) - 8))
        store_f32(out + 4 * (16 + i), scale * np.float32((codes >> 4) - 8))


@device
def unpack_q4_1(block, out):
    """Q4_1: 32 weights in 20 bytes, 4 bits each, counted up from the block's smallest weight.

    0 .. 1    d, float16
    2 .. 3    minimum, float16
    4 .. 19   codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * code + minimum
    """
    scale, minimum = load_f16(block), load_f16(block + 2)
    for i in range(16):
        codes = load_u8(block + 4 + i)
        store_f32(out + 4 * i, scale * np.float32(codes & 15) + minimum)
        store_f32(out + 4 * (16 + i), scale * np.float32(codes >> 4) + minimum)


@device
def unpack_q5_0(block, out):
    """Q5_0: 32 weights in 22 bytes: Q4_0 with a fifth bit for every code.

    0 .. 1    d, float16
    2 .. 5    the highest bits of codes 0 .. 31, a 32-bit integer
    6 .. 21   the low 4 bits: codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * (code - 16)
    """
    scale, fifth_bits = load_f16(block), load_u32(block + 2)
    for i in range(16):
        codes = load_u8(block + 6 + i)
        low = (codes & 15) | ((fifth_bits >> i) & 1) << 4
        high = (codes >> 4) | ((fifth_bits >> (16 + i)) & 1) << 4
        store_f32(out + 4 * i, scale * np.float32(low - 16))
        store_f32(out + 4 * (16 + i), scale * np.float32(high - 16))


@device
def unpack_q5_1(block, out):
    """Q5_1: 32 weights in 24 bytes: Q4_1 with a fifth bit for every code.

    0 .. 1    d, float16
    2 .. 3    minimum, float16
    4 .. 7    the highest bits of codes 0 .. 31, a 32-bit integer
    8 .. 23   the low 4 bits: codes 0 .. 15 in the low halves, 16 .. 31 in the high halves

    weight = d * code + minimum
    """
    scale, minimum, fifth_bits = load_f16(block), load_f16(block + 2), load_u32(block + 4)
    for i in range(16):
        codes = load_u8(block + 8 + i)
        low = (codes & 15) | ((fifth_bits >> i) & 1) << 4
        high = (codes >> 4) | ((fifth_bits >> (16 + i)) & 1) << 4
        store_f32(out + 4 * i, scale * np.float32(low) + minimum)
        store_f32(out + 4 * (16 + i), scale * np.float32(high) + minimum)


@device
def unpack_q8_0(block, out):
    """Q8_0: 32 weights in 34 bytes, one signed byte each.

    0 .. 1    d, float16
    2 .. 33   codes 0 .. 31, int8

    weight = d * code
    """
    scale = load_f16(block)
    for i in range(32):
        store_f32(out + 4 * i, scale * np.float32(load_i8(block + 2 + i)))


@device
def unpack_trits(codes, count, trits, scale, out):
    """The first `trits` ternary digits of `count` bytes: digit n of all bytes, then digit n + 1 of all bytes.

    A byte is a fraction of 256 in base three, so multiplying by 3 moves its next digit in front of the point. Digits
    0, 1, 2 stand for -d, 0, d.
    """
    for i in range(count):
        fraction = load_u8(codes + i)
        for n in range(trits):
            tripled = 3 * fraction
            store_f32(out + 4 * (n * count + i), scale * np.float32((tripled >> 8) - 1))
            fraction = tripled & 255


@device
def unpack_tq1_0(block, out):
    """TQ1_0: 256 weights in 54 bytes, one of -d, 0, d each; five to a byte, since 3 ** 5 = 243 fits in 256.

    0 .. 31   weights 0 .. 159: five digits a byte, see `unpack_trits`
    32 .. 47  weights 160 .. 239: five digits a byte
    48 .. 51  weights 240 .. 255: four digits a byte
    52 .. 53  d, float16

    weight = d * (digit - 1)
    """
    scale = load_f16(block + 52)
    unpack_trits(block, 32, 5, scale, out)
    unpack_trits(block + 32, 16, 5, scale, out + 4 * 160)
    unpack_trits(block + 48, 4, 4, scale, out + 4 * 240)


@device
def unpack_tq2_0(block, out):
    """TQ2_0: 256 weights in 66 bytes, 2 bits each, meant for -d, 0, d.

    0 .. 63   each 32 bytes hold 128 codes: the lowest 2 bits codes 0 .. 31, the next 2 bits codes 32 .. 63, and so on
    64 .. 65  d, float16

    weight = d * (code - 1)
    """
    scale = load_f16(block + 64)
    for half in range(2):
        for i in range(32):
            codes = load_u8(block + 32 * half + i)
            for n in range(4):
                code = (codes >> (2 * n)) & 3
                store_f32(out + 4 * (128 * half + 32 * n + i), scale * np.float32(code - 1))
