"""The encoder of Q1_0: blocks of 128 weights, each d or -d.

The best signs are those of the weights x. For these, with importance w, the best d is Σw|x| / Σw.
"""

import numpy as np

from localllm.quant.bit_packing import putter
from localllm.quant.block_scaling import normalize
from localllm.quant.float16 import nearest_half, put_half
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS
from localllm.quant.numba_cache import compiled

BLOCK, BYTES, D = BY_NAME["Q1_0"].block, BY_NAME["Q1_0"].bytes, LAYOUTS["Q1_0"].d
put_code = putter(LAYOUTS["Q1_0"].codes, BLOCK)


@compiled
def encode_q1_0(weights, importance, out):
    """Encode float32 [rows, columns] with importance float32 [columns] to uint8 [rows, bytes]."""
    x = np.empty(BLOCK, np.float32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // BLOCK):
            into = out[row, block * BYTES : (block + 1) * BYTES]
            into[:] = 0
            unit = normalize(weights, row, block * BLOCK, BLOCK, x)
            total, weight = np.float32(0), np.float32(0)
            for i in range(BLOCK):
                total += importance[block * BLOCK + i] * abs(x[i])
                weight += importance[block * BLOCK + i]
                put_code(into, 0, i, np.uint8(x[i] >= 0))
            put_half(into, D, nearest_half(total / weight * unit))
