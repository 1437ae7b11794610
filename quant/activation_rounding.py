"""Round activations to 8 bits, as llama.cpp does before it multiplies them by quantized weights."""

import numpy as np


def round_activations(x: np.ndarray, block: int) -> np.ndarray:
    """Round activations x, float32 [rows, columns], to 8 bits with a scale for every `block` values of a row.

    block: 256 for weights in super-blocks, else 32. This is the rounding of llama.cpp's CPU kernels (Q8_K, Q8_0),
    except that the scale itself is not rounded.
    """
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    return (np.rint(blocks / np.where(step > 0, step, 1)) * step).reshape(x.shape)
