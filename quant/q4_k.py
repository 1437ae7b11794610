"""Q4_K and Q5_K: super-blocks of 256 weights, 8 sub-blocks of 32, a weight is d * k * code - dmin * m.

A block: float16 d and dmin; 12 bytes with k and m, 6 bits each, of the 8 sub-blocks; Q5_K only: 32 bytes with the
codes' fifth bits, bit b of byte i for weight i of sub-block b; 128 bytes with their lower 4 bits, byte 32 p + i holds
weight i of sub-block 2 p in its lower half and of 2 p + 1 in its upper half.

The 12 bytes: byte b < 4 has k[b], byte 4 + b has m[b]; byte 8 + b has the lower 4 bits of k[4 + b] and above them those
of m[4 + b], whose upper 2 bits are at the top of bytes b and 4 + b.
"""

import numpy as np

from localllm.quant import affine
from localllm.quant.compiled import compiled, inlined

f32 = np.float32
BLOCKS, SIZE, STEPS = 8, 32, f32(63)


@inlined
def put_scales(out, start, k, m):
    """Pack the integers, float32 [8], in 12 bytes."""
    for b in range(4):
        low_k, low_m, high_k, high_m = np.uint8(k[b]), np.uint8(m[b]), np.uint8(k[4 + b]), np.uint8(m[4 + b])
        out[start + b] = low_k | (high_k >> 4) << 6
        out[start + 4 + b] = low_m | (high_m >> 4) << 6
        out[start + 8 + b] = (high_k & 15) | (high_m & 15) << 4


@inlined
def put_codes(s, out, start, bits, factor, low_factor):
    """Store the nearest codes: 4 bits each from `start` + 32 (bits - 4), above them Q5_K's fifth bits."""
    top = f32((1 << bits) - 1)
    lower = start + SIZE * (bits - 4)
    for b in range(BLOCKS):
        scale, low = factor * s.best_k[b], -low_factor * s.best_m[b]
        inverse = affine.inverse_of(scale)
        for i in range(SIZE):
            code = np.uint8(affine.nearest_code(s.x[b, i], low, inverse, top))
            out[lower + b // 2 * SIZE + i] |= (code & 15) << (b % 2 * 4)
            if bits == 5:
                out[start + i] |= (code >> 4) << b


@inlined
def put_q4_k(s, out, factor, low_factor):
    put_scales(out, 4, s.best_k, s.best_m)
    put_codes(s, out, 16, 4, factor, low_factor)


@inlined
def put_q5_k(s, out, factor, low_factor):
    put_scales(out, 4, s.best_k, s.best_m)
    put_codes(s, out, 16, 5, factor, low_factor)


@compiled
def encode_q4_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 144]."""
    affine.encode_rows(weights, importance, out, 144, BLOCKS, SIZE, f32(15), STEPS, 0, put_q4_k)


@compiled
def encode_q5_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 176]."""
    affine.encode_rows(weights, importance, out, 176, BLOCKS, SIZE, f32(31), STEPS, 0, put_q5_k)
