"""Reading weights for a search: blocks in units of a power of two, so that no sum overflows or vanishes."""

import numpy as np

from quant.compiled import inlined

f32 = np.float32


@inlined
def largest_of(weights, row, start, count):
    """The largest absolute value of some weights of a row."""
    largest = f32(0)
    for i in range(start, start + count):
        largest = max(largest, abs(weights[row, i]))
    return largest


@inlined
def unit_of(largest):
    """The power of two at or below `largest`; 0 if a float16 times any code would round such weights to 0."""
    if largest < f32(2.0**-25):
        return f32(0)
    return np.uint32(f32(largest).view(np.uint32) & np.uint32(0x7F800000)).view(f32)


@inlined
def load(weights, importance, row, start, unit, x, w):
    """Copy weights in units and their importance to x and w, float32 [sub-blocks, size]."""
    inverse = f32(1) / unit
    flat_x, flat_w, source = x.reshape(-1), w.reshape(-1), weights[row, start : start + x.size]
    for i in range(x.size):
        flat_x[i] = source[i] * inverse
    source = importance[start : start + x.size]
    for i in range(x.size):
        flat_w[i] = source[i]
