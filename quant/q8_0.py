"""Q8_0: blocks of 32 weights, a weight is scale * code. A block: float16 scale; 32 codes, int8."""

import numpy as np

from quant import symmetric
from quant.units import largest_of, load, unit_of
from quant.compiled import compiled
from quant.half import put_half

f32 = np.float32
BYTES, TOP = 34, f32(127)
GRID, START, SPACING = 2, f32(0), f32(0.5)


@compiled
def encode_q8_0(weights, importance, out):
    """float32 [rows, columns], float32 [columns] -> uint8 [rows, columns / 32 * 34]."""
    s = symmetric.new_super_block(1, 32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            into = out[row, block * BYTES : (block + 1) * BYTES]
            unit = unit_of(largest_of(weights, row, block * 32, 32))
            if unit == 0:
                into[:] = 0
                continue
            load(weights, importance, row, block * 32, unit, s.x, s.weight)
            scale = symmetric.search_plain_block(s, -TOP, TOP, GRID, START, SPACING, unit)
            put_half(into, 0, scale * unit)
            inverse = symmetric.inverse_of(scale)
            for i in range(32):
                into[2 + i] = np.uint8(np.int8(symmetric.nearest_code(s.x[0, i], inverse, -TOP, TOP)))
