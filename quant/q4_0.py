"""Q4_0 and Q5_0: blocks of 32 weights, a weight is scale * (code - 8), of Q5_0 scale * (code - 16).

A block: float16 scale; Q5_0 only: 4 bytes with the codes' fifth bits, weight i's is bit i of the little-endian number;
16 bytes with their lower 4 bits, byte i holds weight i in its lower half and weight 16 + i in its upper half.
"""

import numpy as np

from localllm.quant import symmetric
from localllm.quant.compiled import compiled, inlined
from localllm.quant.float16 import put_half
from localllm.quant.units import load_block

f32 = np.float32


@inlined
def encode_rows(weights, importance, out, bits, block_bytes):
    half_range = 1 << (bits - 1)
    bottom, top = f32(-half_range), f32(half_range - 1)
    search = symmetric.Search(bottom, top, 12, f32(-0.6), f32(0.45), 2, 4, f32(1), 0)
    s = symmetric.new_super_block(1, 32, search)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            into = out[row, block * block_bytes : (block + 1) * block_bytes]
            into[:] = 0
            unit = load_block(weights, importance, row, block * 32, 32, s)
            scale = symmetric.search_plain_block(s, search, unit) if unit > 0 else f32(0)
            put_half(into, 0, scale * unit)
            inverse = symmetric.inverse_of(scale)
            for i in range(32):
                code = np.uint8(symmetric.nearest_code(s.x[0, i], inverse, bottom, top) - bottom)
                into[block_bytes - 16 + i % 16] |= (code & 15) << (i // 16 * 4)
                if bits == 5:
                    into[2 + i // 8] |= (code >> 4) << (i % 8)


@compiled
def encode_q4_0(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 32 * 18]."""
    encode_rows(weights, importance, out, 4, 18)


@compiled
def encode_q5_0(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 32 * 22]."""
    encode_rows(weights, importance, out, 5, 22)
