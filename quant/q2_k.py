"""Q2_K: super-blocks of 256 weights, 16 sub-blocks of 16, a weight is d * k * code - dmin * m.

A block: 16 bytes with k in the lower and m in the upper 4 bits, one per sub-block; 64 bytes of codes, 2 bits each, byte
32 h + i holds weights 128 h + i + (0, 32, 64, 96) from its lowest bits up; float16 d and dmin.
"""

import numpy as np

from localllm.quant import affine
from localllm.quant.compiled import compiled, inlined

f32 = np.float32
BLOCKS, SIZE, TOP, STEPS = 16, 16, f32(3), f32(15)


@inlined
def put(s, out, factor, low_factor):
    for b in range(BLOCKS):
        out[b] = np.uint8(s.best_k[b]) | np.uint8(s.best_m[b]) << 4
        scale, low = factor * s.best_k[b], -low_factor * s.best_m[b]
        inverse = affine.inverse_of(scale)
        for i in range(SIZE):
            code = np.uint8(affine.nearest_code(s.x[b, i], low, inverse, TOP))
            out[16 + b // 8 * 32 + b % 2 * 16 + i] |= code << (b % 8 // 2 * 2)


@compiled
def encode_q2_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 84]."""
    affine.encode_rows(weights, importance, out, 84, BLOCKS, SIZE, TOP, STEPS, 80, put)
