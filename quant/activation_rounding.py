"""What matrices meet in 8 bits: how other programs have it where weights are in blocks."""

import numpy as np


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """x [rows, columns] in 8 bits with a scale for so many numbers of a row: 256 for matrices in super-blocks, else 32.

    As of llama.cpp's kernels for CPUs (Q8_K, Q8_0), but for the scale's own rounding.
    """
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    return (np.rint(blocks / np.where(step > 0, step, 1)) * step).reshape(x.shape)
