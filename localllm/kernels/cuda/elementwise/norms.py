"""RMS norm and layer norm: a block for each group of columns of a row.

Some are fused with the operations before or after them in a decoder's layers: for one token, launching a kernel takes
as long as its work.
"""

import math

from numba import cuda

from localllm.kernels.cuda.device import device, f32_value, float32, load_f32, load_i64, store_f32
from localllm.kernels.cuda.reductions import block_sum

ZERO, NAN, INFINITY = float32(0), float32(math.nan), float32(math.inf)


@device
def inverse_root(mean, epsilon):
    """Compute 1 / sqrt(mean + epsilon); NaN if the sum of squares has exceeded float32."""
    return float32(1) / math.sqrt(mean + epsilon) if mean < INFINITY else NAN


@device
def squares(x, columns, center):
    """Return this thread's share of the sum of (x - center)^2 over the columns."""
    total = ZERO
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += (load_f32(x + 4 * column) - center) ** 2
    return total


def rms_norm(count, x, weight, y, stride, columns, group, epsilon):
    """Write x / sqrt(mean(x^2) + epsilon) * weight to y, with a mean for each `group` columns."""
    row, first = cuda.blockIdx.x, 4 * cuda.blockIdx.y * group
    if row >= load_i64(count):
        return
    source, target = x + row * stride + first, y + row * stride + first
    scale = inverse_root(block_sum(squares(source, group, ZERO)) / float32(group), f32_value(epsilon))
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        number = load_f32(source + 4 * column) * scale
        store_f32(target + 4 * column, number * load_f32(weight + first + 4 * column))


def layer_norm(count, x, weight, bias, y, stride, columns, group, epsilon):
    """Write (x - mean) / sqrt(variance + epsilon) * weight + bias to y, for each `group` columns."""
    row, first, total = cuda.blockIdx.x, 4 * cuda.blockIdx.y * group, ZERO
    if row >= load_i64(count):
        return
    source, target = x + row * stride + first, y + row * stride + first
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        total += load_f32(source + 4 * column)
    mean = block_sum(total) / float32(group)
    scale = inverse_root(block_sum(squares(source, group, mean)) / float32(group), f32_value(epsilon))
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        number = (load_f32(source + 4 * column) - mean) * scale * load_f32(weight + first + 4 * column)
        store_f32(target + 4 * column, number + load_f32(bias + first + 4 * column))


def add_rms_norm(count, x, z, weight, total, y, stride, columns, epsilon):
    """Write total = x + z, and the RMS norm of total to y: the residual stream, and the input of the next sublayer."""
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride
    if row >= load_i64(count):
        return
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        store_f32(total + at + 4 * column, load_f32(x + at + 4 * column) + load_f32(z + at + 4 * column))
    own_squares = squares(total + at, columns, ZERO)  # each thread reads the columns that it has written
    scale = inverse_root(block_sum(own_squares) / float32(columns), f32_value(epsilon))
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        number = load_f32(total + at + 4 * column) * scale
        store_f32(y + at + 4 * column, number * load_f32(weight + 4 * column))


def rms_norm_rope(count, x, weight, epsilon, y, stride, heads, head_dim, table, pairs, step, apart):
    """Write the RMS norm of each head of x, with its pairs rotated, to y.

    Models with normalized queries and keys apply this before attention.
    """
    row, first = cuda.blockIdx.x, 4 * cuda.blockIdx.y * head_dim
    if row >= load_i64(count):
        return
    source, target, cosines = x + row * stride + first, y + row * stride + first, table + 8 * row * pairs
    total, factors = block_sum(squares(source, head_dim, ZERO)), weight + first
    scale = inverse_root(total / float32(head_dim), f32_value(epsilon))
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        i, k = 4 * pair * step, 4 * (pair * step + apart)
        u, v = (
            load_f32(source + i) * scale * load_f32(factors + i),
            load_f32(source + k) * scale * load_f32(factors + k),
        )
        cosine, sine = load_f32(cosines + 4 * pair), load_f32(cosines + 4 * (pairs + pair))
        store_f32(target + i, u * cosine - v * sine)
        store_f32(target + k, u * sine + v * cosine)
    for number in range(2 * pairs + cuda.threadIdx.x, head_dim, cuda.blockDim.x):
        at = 4 * number
        store_f32(target + at, load_f32(source + at) * scale * load_f32(factors + at))
