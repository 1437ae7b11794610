"""Copies of rows between the tokens' order and the experts' order, see routing.py."""

from numba import cuda

from localllm.kernels.cuda.device import float32, load_4f32, load_f32, load_i64, store_4f32, store_f32
from localllm.kernels.cuda.elementwise.formulas import first_column

ZERO, ONE = float32(0), float32(1)


def gather(count, pairs, used, x, x_stride, weights, part_bytes, y, stride, columns):
    """Copy the rows of tokens to the order of the experts, times the pairs' weights if there are some.

    A thread for each number.
    """
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        pair = load_i64(pairs + 8 * row)
        source = x + pair // used * x_stride + pair % used * part_bytes
        weight = load_f32(weights + 4 * pair) if weights != 0 else ONE
        store_f32(y + row * stride + 4 * column, load_f32(source + 4 * column) * weight)


def from_heads(count, rows, used, x, x_stride, y, stride, columns):
    """Copy the results of a token's experts to the token's row, one after the other.

    A block of threads for each pair.
    """
    token, place = cuda.blockIdx.x, cuda.blockIdx.y
    if token >= load_i64(count):
        return
    source = x + load_i64(rows + 8 * (token * used + place)) * x_stride
    target = y + token * stride + 4 * place * columns
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        store_f32(target + 4 * column, load_f32(source + 4 * column))


def scatter(count, rows, used, x, x_stride, weights, y, stride, columns):
    """Add up the results of a token's experts, times their weights, in the order in which the experts were selected.

    A thread for four columns.
    """
    token, column = cuda.blockIdx.x, first_column()
    if token < load_i64(count) and column < columns:
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        for pair in range(token * used, (token + 1) * used):
            weight = load_f32(weights + 4 * pair) if weights != 0 else ONE
            e, f, g, h = load_4f32(x + load_i64(rows + 8 * pair) * x_stride + 4 * column)
            a, b, c, d = a + e * weight, b + f * weight, c + g * weight, d + h * weight
        store_4f32(y + token * stride + 4 * column, a, b, c, d)


def add_by_expert(count, pairs, chosen, x, z, z_stride, y, stride, columns):
    """Add to every row the vector (bias) of its expert; a thread for four columns."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        expert, at = load_i64(chosen + 8 * load_i64(pairs + 8 * row)), row * stride + 4 * column
        a, b, c, d = load_4f32(x + at)
        e, f, g, h = load_4f32(z + expert * z_stride + 4 * column)
        store_4f32(y + at, a + e, b + f, c + g, d + h)
