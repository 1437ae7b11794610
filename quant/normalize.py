"""What the searches do with a block of weights before they start."""

import numpy as np

from quant.compiled import compiled

TINY = np.float32(1e-37)  # no format with a float16 d holds anything near it


@compiled
def normalize(weights, start, x):
    """Copies x.size weights from `start` on to x, divided by the largest of their sizes, which is returned.

    Where that is TINY, x is zeros, and 0 is returned.
    """
    largest = np.float32(0)
    for i in range(x.size):
        largest = max(largest, abs(weights[start + i]))
    if largest < TINY:
        largest = np.float32(0)
    inverse = np.float32(1) / largest if largest > 0 else np.float32(0)
    for i in range(x.size):
        x[i] = weights[start + i] * inverse
    return largest
