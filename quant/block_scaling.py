"""Scales the weights of a block by a power of two, its unit, so that no sum of a search overflows or underflows."""

import numpy as np

from localllm.quant.numba_cache import inlined

f32 = np.float32


@inlined
def largest_of(weights, row, start, count):
    """Return the largest absolute value among `count` weights of a row, from `start` on."""
    largest = f32(0)
    for i in range(start, start + count):
        largest = max(largest, abs(weights[row, i]))
    return largest


@inlined
def unit_of(largest):
    """Return the largest power of two that is at most `largest`.

    Return 0 if weights are so small that all become 0.
    """
    if largest < f32(2.0**-25):
        return f32(0)
    return np.uint32(f32(largest).view(np.uint32) & np.uint32(0x7F800000)).view(f32)


@inlined
def normalize(weights, row, start, count, x):
    """Copy `count` weights of a row, divided by their unit, to x; return the unit (see unit_of).

    If the unit is 0, x becomes zeros.
    """
    unit = unit_of(largest_of(weights, row, start, count))
    inverse = f32(1) / unit if unit > 0 else f32(0)
    for i in range(count):
        x[i] = weights[row, start + i] * inverse
    return unit


@inlined
def load_block(weights, importance, row, start, count, s):
    """Copy `count` weights of a row, divided by their unit, to s.x; return the unit.

    Their importance is copied to s.weight.
    """
    flat = s.weight.reshape(-1)
    for i in range(count):
        flat[i] = importance[start + i]
    return normalize(weights, row, start, count, s.x.reshape(-1))
