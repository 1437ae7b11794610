"""MXFP4: 4-bit floats (sign, 2 bits exponent, 1 bit fraction); 32 weights of a block share a power of two.

    weight = 2 ** (e - 127) * SIZES[code & 7] * sign        the highest bit of a code is the sign

Source: OCP Microscaling Formats (MX) Specification 1.0, which takes the exponent of the largest weight for e. The
search also tries one more, which does not clip the largest weight, and up to three less, which suit small weights
better.
"""

import numpy as np

from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import DOUBLED_E2M1, LAYOUTS
from localllm.quant.numba_cache import compiled

BYTES, LAYOUT = BY_NAME["MXFP4"].bytes, LAYOUTS["MXFP4"]
CODES, SCALE = LAYOUT.codes[0].place(0)[0], LAYOUT.scales[0].place(0)[0]
SIZES = np.array(DOUBLED_E2M1[:8], dtype=np.float32) / 2
BORDERS = (SIZES[1:] + SIZES[:-1]) / 2
STEPS = SIZES[1:] - SIZES[:-1]

# Exponents tried, relative to the one with which the largest weight is 4 .. 8. Without importance the best is never
# below -1: the largest weight alone would then cost more than the others could save.
FROM, TO = -3, 1
LARGEST_EXPONENT = 252  # with one more, 6 times the scale would be infinite


@compiled
def block_error(weights, importance, scale):
    """Compute Σ importance * (weight * scale - nearest value)² over 32 weights."""
    error = np.float32(0)
    for i in range(32):
        size = abs(weights[i] * scale)
        value = np.float32(0)
        for k in range(7):
            value += STEPS[k] if size > BORDERS[k] else np.float32(0)
        error += importance[i] * (size - value) ** 2
    return error


@compiled
def power_of_two(exponent):
    """Return 2 ** exponent as a float32, -126 <= exponent <= 127."""
    return np.int32((exponent + 127) << 23).view(np.float32)


@compiled
def exponent_of(number):
    """Return the 8 bits of a float32's exponent: 127 for 1 .. 2, 0 for zero and subnormal numbers."""
    return np.float32(number).view(np.int32) >> 23 & 255


@compiled
def best_exponent(weights, importance):
    """Return the e with the least weighted error for 32 weights, the larger one of equals."""
    largest = np.float32(0)
    for i in range(32):
        largest = max(largest, abs(weights[i]))
    start = exponent_of(largest) - 2
    best, least = 0, np.float32(np.inf)
    for e in range(min(start + TO, LARGEST_EXPONENT), max(start + FROM, 0) - 1, -1):
        error = block_error(weights, importance, power_of_two(127 - e)) * power_of_two(2 * (e - start))
        if error < least:
            best, least = e, error
    return best


@compiled
def encode_block(weights, importance, out):
    """Encode 32 weights to the bytes of a block."""
    e = best_exponent(weights, importance)
    scale = power_of_two(127 - e)
    out[SCALE] = e
    for i in range(16):
        out[CODES + i] = code(weights[i] * scale) | code(weights[16 + i] * scale) << 4


@compiled
def code(weight):
    """Return the code of the value nearest to a scaled weight. Zero has no sign."""
    index = 0
    for k in range(7):
        index += abs(weight) > BORDERS[k]
    return index | 8 if weight < -BORDERS[0] else index


@compiled
def encode_mxfp4(weights, importance, out):
    """Encode float32 [rows, columns] with importance float32 [columns] to uint8 [rows, bytes]."""
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            part = slice(32 * block, 32 * block + 32)
            encode_block(weights[row, part], importance[part], out[row, BYTES * block : BYTES * (block + 1)])
