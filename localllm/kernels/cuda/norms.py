"""Norms: a block for each row."""

import math

from numba import cuda

from localllm.kernels.cuda.device import block_sum, f32_value, float32, load_f32, load_i64, store_f32


def rms_norm(count, x, weight, y, stride, columns, group, epsilon):
    """y = x / sqrt(mean(x^2) + epsilon) * weight, the mean of each `group` columns."""
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    source, target = x + row * stride, y + row * stride
    for first in range(0, columns, group):
        squares = float32(0)
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            squares += load_f32(source + 4 * column) ** 2
        scale = float32(1) / math.sqrt(block_sum(squares) / float32(group) + f32_value(epsilon))
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            store_f32(target + 4 * column, load_f32(source + 4 * column) * scale * load_f32(weight + 4 * column))
