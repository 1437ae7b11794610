"""Conversion to 16-bit floats, as bits: rounds to nearest, ties to even, and never to infinity.

A number that is too large becomes the largest finite number of the type: a somewhat wrong weight harms a model less
than an infinite one. The functions have no branches, so that the compiler vectorizes loops over them.
"""

import numpy as np

from localllm.quant.numba_cache import compiled, inlined

SMALLEST_HALF = np.float32(2.0**-24)
LARGEST_BF16 = np.uint32(0x7F7F)


@inlined
def to_half(value):
    """Convert a float32 to the bits of the nearest float16, uint16.

    Half a unit of the last remaining bit is added to the bits as an integer; the carry may reach the exponent.
    Subnormal results are multiples of 2 ** -24, as are floats from 1/2 to 1: adding 1/2 rounds to those.
    """
    bits = np.float32(value).view(np.uint32)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32((size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13))
    small = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    result = np.uint32(small) if size < np.uint32(113 << 23) else min(normal, np.uint32(0x7BFF))
    return np.uint16(result | sign)


@inlined
def from_half(bits):
    """Convert the bits of a finite float16 to float32.

    Moved to their positions in a float32, exponent and fraction give a number 2 ** 112 times too small, subnormal or
    not.
    """
    number = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    return -number if bits & np.uint16(0x8000) else number


@inlined
def nearest_half(value):
    """Round a float32 to the nearest float16, as a float32."""
    return from_half(to_half(value))


@inlined
def put_half(out, position, value):
    """Store a float32 as a float16 in two bytes of `out`, from index `position` on."""
    bits = to_half(value)
    out[position] = np.uint8(bits & np.uint16(0xFF))
    out[position + 1] = np.uint8(bits >> np.uint16(8))


@compiled
def narrow_to_half(weights, out):
    """Convert float32 [n] to float16 bits, uint16 [n]."""
    for i in range(weights.size):
        out[i] = to_half(weights[i])


@compiled
def narrow_to_bf16(weights, out):
    """Convert float32 [n] to bfloat16 bits, uint16 [n]: the upper half of a float32."""
    for i in range(weights.size):
        bits = np.float32(weights[i]).view(np.uint32)
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        upper = np.uint32((bits & np.uint32(0x7FFFFFFF)) + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        out[i] = np.uint16(min(np.uint32(upper), LARGEST_BF16) | ((bits >> np.uint32(16)) & np.uint32(0x8000)))
