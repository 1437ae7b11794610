"""Q4_1 and Q5_1: blocks of 32 weights, a weight is scale * code + low.

A block: float16 scale and low; Q5_1 only: 4 bytes with the codes' fifth bits, weight i's is bit i of the little-endian
number; 16 bytes with their lower 4 bits, byte i holds weight i in its lower half and weight 16 + i in its upper half.
"""

import numpy as np

from localllm.quant import affine
from localllm.quant.compiled import compiled, inlined
from localllm.quant.float16 import put_half
from localllm.quant.units import load_block

f32 = np.float32


@inlined
def encode_rows(weights, importance, out, bits, block_bytes):
    s = affine.new_super_block(1, 32)
    top = f32((1 << bits) - 1)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            into = out[row, block * block_bytes : (block + 1) * block_bytes]
            into[:] = 0
            unit = load_block(weights, importance, row, block * 32, 32, s)
            if unit == 0:
                continue
            scale, low = affine.search_plain_block(s, top, unit)
            put_half(into, 0, scale * unit)
            put_half(into, 2, low * unit)
            inverse = affine.inverse_of(scale)
            for i in range(32):
                code = np.uint8(affine.nearest_code(s.x[0, i], low, inverse, top))
                into[block_bytes - 16 + i % 16] |= (code & 15) << (i // 16 * 4)
                if bits == 5:
                    into[4 + i // 8] |= (code >> 4) << (i % 8)


@compiled
def encode_q4_1(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 32 * 20]."""
    encode_rows(weights, importance, out, 4, 20)


@compiled
def encode_q5_1(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 32 * 24]."""
    encode_rows(weights, importance, out, 5, 24)
