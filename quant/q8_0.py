"""The encoder of Q8_0: blocks of 32 weights, weight = scale * code.

With 255 codes the error depends little on the size of the scale, but on where the weights happen to lie between its
multiples: trying a few scales above the smallest possible one reduces the error by a sixth.
"""

import numpy as np

from localllm.quant.block_scaling import largest_of, unit_of
from localllm.quant.float16 import SMALLEST_HALF, nearest_half, put_half
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS
from localllm.quant.numba_cache import compiled, inlined

f32 = np.float32
BYTES, CODES, D = BY_NAME["Q8_0"].bytes, LAYOUTS["Q8_0"].codes[0].at, LAYOUTS["Q8_0"].d
TOP, HUGE = f32(127), f32(3e38)
SCALES = 6  # scales tried: the largest |weight| / 127, / 126, ...; integer divisors, so that encoding is idempotent


@inlined
def nearest_code(x, inverse):
    """Return the code nearest to x; inverse: 1 / scale."""
    return min(max(np.rint(x * inverse), -TOP), TOP)


@inlined
def block_error(weights, importance, row, start, scale):
    """Compute the weighted error of 32 weights for a scale."""
    inverse, error = f32(1) / scale, f32(0)
    for i in range(start, start + 32):
        distance = weights[row, i] - scale * nearest_code(weights[row, i], inverse)
        error += importance[i] * distance * distance
    return error


@inlined
def best_scale(weights, importance, row, start, largest):
    """Return the float16 scale with the least error for 32 weights."""
    best, least = max(nearest_half(largest / TOP), SMALLEST_HALF), HUGE
    for i in range(SCALES):
        scale = max(nearest_half(largest / (TOP - f32(i))), SMALLEST_HALF)
        error = block_error(weights, importance, row, start, scale)
        if error < least:
            best, least = scale, error
    return best


@compiled
def encode_q8_0(weights, importance, out):
    """Encode float32 [rows, columns] with importance float32 [columns] to uint8 [rows, bytes]."""
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            into = out[row, block * BYTES : (block + 1) * BYTES]
            largest = largest_of(weights, row, block * 32, 32)
            if unit_of(largest) == 0:
                into[:] = 0
                continue
            scale = best_scale(weights, importance, row, block * 32, largest)
            put_half(into, D, scale)
            inverse = f32(1) / scale
            for i in range(32):
                into[CODES + i] = np.uint8(np.int8(nearest_code(weights[row, block * 32 + i], inverse)))
