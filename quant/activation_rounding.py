"""Rounding of activations to 8 bits, as other programs do it for weights in blocks."""

import numpy as np


def round_activations(x: np.ndarray, block: int) -> np.ndarray:
    """Round x [rows, columns] to 8 bits with a scale per `block` numbers of a row.

    block: 256 for matrices in super-blocks, else 32. It rounds as llama.cpp's kernels for CPUs do (Q8_K, Q8_0), except
    that the scale itself is not rounded.
    """
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    return (np.rint(blocks / np.where(step > 0, step, 1)) * step).reshape(x.shape)
