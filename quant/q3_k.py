"""Q3_K: super-blocks of 256 weights, 16 sub-blocks of 16, a weight is d * (k - 32) * (code - 4).

A block: 32 bytes with the codes' third bits, bit j of byte i for weight 32 j + i; 64 bytes with their lower 2 bits,
byte 32 h + i holds weights 128 h + i + (0, 32, 64, 96) from its lowest bits up; 12 bytes with k; float16 d.

The 12 bytes: byte i < 8 holds the lower 4 bits of k[i] and above them those of k[8 + i]; byte 8 + i holds the upper
2 bits of k[i + (0, 4, 8, 12)] from its lowest bits up.
"""

import numpy as np

from localllm.quant import symmetric
from localllm.quant.compiled import compiled, inlined

f32 = np.float32
BLOCKS, SIZE, BOTTOM, TOP, STEPS = 16, 16, f32(-4), f32(3), f32(32)
SEARCH = symmetric.Search(BOTTOM, TOP, 12, f32(-0.6), f32(0.45), refits=2, rounds=4, steps=STEPS, reach=1)


@inlined
def put_scales(out, start, k):
    for b in range(BLOCKS):
        code = np.uint8(k[b] + STEPS)
        out[start + b % 8] |= (code & 15) << (b // 8 * 4)
        out[start + 8 + b % 4] |= (code >> 4) << (b // 4 * 2)


@inlined
def put_codes(s, out, factor):
    for b in range(BLOCKS):
        inverse = symmetric.inverse_of(factor * s.best_k[b])
        for i in range(SIZE):
            code = np.uint8(symmetric.nearest_code(s.x[b, i], inverse, BOTTOM, TOP) - BOTTOM)
            position = b * SIZE + i
            out[position % 32] |= (code >> 2) << (position // 32)
            out[32 + position // 128 * 32 + position % 32] |= (code & 3) << (position % 128 // 32 * 2)


@inlined
def put(s, out, factor):
    put_codes(s, out, factor)
    put_scales(out, 96, s.best_k)


@compiled
def encode_q3_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 110]."""
    symmetric.encode_rows(weights, importance, out, 110, BLOCKS, SIZE, SEARCH, put)
