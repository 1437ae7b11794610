"""Q2_K: super-blocks of 256 weights, 16 sub-blocks of 16, a weight is d * k * code - dmin * m.

A block: 16 bytes with k in the lower and m in the upper 4 bits, one per sub-block; 64 bytes of codes, 2 bits each, byte
32 h + i holds weights 128 h + i + (0, 32, 64, 96) from its lowest bits up; float16 d and dmin.
"""

import numpy as np

from quant import affine
from quant.compiled import compiled, inlined
from quant.half import put_half
from quant.units import load_block

f32 = np.float32
BLOCKS, SIZE, BYTES, TOP, STEPS = 16, 16, 84, f32(3), f32(15)


@inlined
def put_codes(s, out, start, factor, low_factor):
    for b in range(BLOCKS):
        scale, low = factor * s.best_k[b], -low_factor * s.best_m[b]
        inverse = affine.inverse_of(scale)
        for i in range(SIZE):
            code = np.uint8(affine.nearest_code(s.x[b, i], low, inverse, TOP))
            out[start + b // 8 * 32 + b % 2 * 16 + i] |= code << (b % 8 // 2 * 2)


@compiled
def encode_q2_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 84]."""
    s = affine.new_super_block(BLOCKS, SIZE)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 256):
            into = out[row, block * BYTES : (block + 1) * BYTES]
            into[:] = 0
            unit = load_block(weights, importance, row, block * 256, 256, s)
            if unit == 0:
                continue
            factor, low_factor = affine.search_super_block(s, TOP, STEPS, unit)
            for b in range(BLOCKS):
                into[b] = np.uint8(s.best_k[b]) | np.uint8(s.best_m[b]) << 4
            put_codes(s, into, 16, factor, low_factor)
            put_half(into, 80, factor * unit)
            put_half(into, 82, low_factor * unit)
