"""Unpacks weights in planes to float16, for products with many tokens; embed.py uses parts of it.

Four threads read the same unit, and each writes 8 of its weights, so neighbouring threads write neighbouring weights.
"""

from numba import cuda

from localllm.kernels.cuda.device import (
    device,
    f16_bits,
    float32,
    signed_byte,
    store_4i32,
)
from localllm.kernels.cuda.matmul.planes import UNIT
from localllm.kernels.cuda.matmul.units import UNITS

LANES = 4  # threads that share a unit


@device
def four(word, scale, minimum):
    """Return the four weights of a word of codes."""
    return (
        scale * float32(signed_byte(word, 0)) + minimum,
        scale * float32(signed_byte(word, 1)) + minimum,
        scale * float32(signed_byte(word, 2)) + minimum,
        scale * float32(signed_byte(word, 3)) + minimum,
    )


@device
def eight(weights, part):
    """Return weights 8 `part` to 8 `part` + 7 of a unit, as two tuples of four; weights: codes, scales, minimums."""
    codes, scales, minimums = weights
    a, b = (codes[0], codes[1]) if part == 0 else (codes[2], codes[3])
    c, d = (codes[4], codes[5]) if part == 2 else (codes[6], codes[7])
    a, b = (a, b) if part < 2 else (c, d)
    scale, minimum = (scales[0], minimums[0]) if part < 2 else (scales[1], minimums[1])
    return four(a, scale, minimum), four(b, scale, minimum)


@device
def two_f16(a, b):
    """Convert two numbers to float16 in an int32."""
    return f16_bits(a) | f16_bits(b) << 16


def make(name):
    """Make the kernel that unpacks rows of a format."""
    read = UNITS[name].read

    def unpack(weights, row_bytes, columns, first, rows, y):
        number = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        unit, part, units = number // LANES, number % LANES, columns // UNIT
        if unit >= rows * units:
            return
        a, b = eight(read(weights + (first + unit // units) * row_bytes, units, unit % units), part)
        store_4i32(y + 16 * number, two_f16(a[0], a[1]), two_f16(a[2], a[3]), two_f16(b[0], b[1]), two_f16(b[2], b[3]))

    return unpack
