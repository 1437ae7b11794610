"""Norms: a block for each row."""

import math

from numba import cuda

from localllm.kernels.cuda.device import block_sum, device, f32_value, float32, load_f32, load_i64, store_f32

NAN, INFINITY = float32(math.nan), float32(math.inf)


@device
def inverse_root(mean, epsilon):
    """1 / sqrt(mean + epsilon); NaN where a square was beyond float32."""
    return float32(1) / math.sqrt(mean + epsilon) if mean < INFINITY else NAN


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
        scale = inverse_root(block_sum(squares) / float32(group), f32_value(epsilon))
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            store_f32(target + 4 * column, load_f32(source + 4 * column) * scale * load_f32(weight + 4 * column))


def layer_norm(count, x, weight, bias, y, stride, columns, group, epsilon):
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias, for each `group` columns."""
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    source, target = x + row * stride, y + row * stride
    for first in range(0, columns, group):
        total = float32(0)
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            total += load_f32(source + 4 * column)
        mean, squares = block_sum(total) / float32(group), float32(0)
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            squares += (load_f32(source + 4 * column) - mean) ** 2
        scale = inverse_root(block_sum(squares) / float32(group), f32_value(epsilon))
        for column in range(first + cuda.threadIdx.x, first + group, cuda.blockDim.x):
            number = (load_f32(source + 4 * column) - mean) * scale
            store_f32(target + 4 * column, number * load_f32(weight + 4 * column) + load_f32(bias + 4 * column))
