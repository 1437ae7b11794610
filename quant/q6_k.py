"""Q6_K: super-blocks of 256 weights, 16 sub-blocks of 16, a weight is d * k * (code - 32).

A block: 128 bytes with the codes' lower 4 bits, byte 64 h + i holds weight 128 h + i in its lower half and 128 h + 64
+ i in its upper half; 64 bytes with their upper 2 bits, byte 32 h + i holds weights 128 h + i + (0, 32, 64, 96) from
its lowest bits up; k, int8 [16]; float16 d.
"""

import numpy as np

from localllm.quant import symmetric
from localllm.quant.compiled import compiled, inlined

f32 = np.float32
BLOCKS, SIZE, BOTTOM, TOP = 16, 16, f32(-32), f32(31)
# Integers k are so close that trying many of them finds more than a grid of free scales: 5 % of the error.
SEARCH = symmetric.Search(BOTTOM, TOP, 8, f32(-0.6), f32(0.6), refits=1, rounds=2, steps=f32(128), reach=6)


@inlined
def put(s, out, factor):
    for b in range(BLOCKS):
        out[192 + b] = np.uint8(np.int8(s.best_k[b]))
        inverse = symmetric.inverse_of(factor * s.best_k[b])
        for i in range(SIZE):
            code = np.uint8(symmetric.nearest_code(s.x[b, i], inverse, BOTTOM, TOP) - BOTTOM)
            position = b * SIZE + i
            out[position // 128 * 64 + position % 64] |= (code & 15) << (position % 128 // 64 * 4)
            out[128 + position // 128 * 32 + position % 32] |= (code >> 4) << (position % 128 // 32 * 2)


@compiled
def encode_q6_k(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 256 * 210]."""
    symmetric.encode_rows(weights, importance, out, 210, BLOCKS, SIZE, SEARCH, put)
