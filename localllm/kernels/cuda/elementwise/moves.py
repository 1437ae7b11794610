"""Copies of rows and columns, and of the logits to the caller."""

import math

from numba import cuda

from localllm.kernels.arguments import SEQUENCE
from localllm.kernels.cuda.device import float32, load_4f32, load_f32, load_i64, store_4f32, store_f32, store_i64
from localllm.kernels.cuda.elementwise.elementwise import first_column

INFINITY, ZERO = float32(math.inf), float32(0)
SEQUENCE_BYTES = 8 * len(SEQUENCE)


def select(count, x, rows, y, stride, columns):
    """Compute y[i] = x[rows[i]]; a thread for four columns."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        a, b, c, d = load_4f32(x + load_i64(rows + 8 * row) * stride + 4 * column)
        store_4f32(y + row * stride + 4 * column, a, b, c, d)


def replace_ids(count, ids, table, y):
    """Compute y[t] = table[ids[t]]; a thread for each token."""
    token = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if token < load_i64(count):
        store_i64(y + 8 * token, load_i64(table + 8 * load_i64(ids + 8 * token)))


def pool(count, sequences, x, y, stride, columns, kind):
    """Pool the rows of each sequence to one, their mean, the first or the last: a thread for four columns."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        sequence = sequences + row * SEQUENCE_BYTES
        first, rows = load_i64(sequence + 8 * SEQUENCE.first), load_i64(sequence + 8 * SEQUENCE.count)
        if kind != 0:
            first, rows = first + (rows - 1 if kind == 2 else 0), 1
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        for r in range(first, first + rows):
            e, f, g, h = load_4f32(x + r * stride + 4 * column)
            a, b, c, d = a + e, b + f, c + g, d + h
        scale = float32(1.0) / float32(rows)
        store_4f32(y + row * stride + 4 * column, a * scale, b * scale, c * scale, d * scale)


def slice_columns(count, x, x_stride, first, groups, period, y, stride, columns):
    """Compute y = some columns of every group of x; a thread for each column of y."""
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        width = columns // groups
        number = load_f32(x + row * x_stride + 4 * (first + column // width * period + column % width))
        store_f32(y + row * stride + 4 * column, number)


def concat_heads(count, x, x_stride, x_columns, z, z_stride, z_columns, shared, heads, y, stride):
    """Compute y = the columns of x and z, interleaved by head; a block for each row and head."""
    row, head, width = cuda.blockIdx.x, cuda.blockIdx.y, x_columns + z_columns
    if row >= load_i64(count):
        return
    first = x + row * x_stride + 4 * head * x_columns
    second = z + row * z_stride + (0 if shared == 1 else 4 * head * z_columns)
    target = y + row * stride + 4 * head * width
    for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        source = first + 4 * column if column < x_columns else second + 4 * (column - x_columns)
        store_f32(target + 4 * column, load_f32(source))


def logits(count, x, stride, columns, y, flaws):
    """Copy x without padding to the array whose address is stored at y; raise `flaws` if a number is not finite.

    Each number has a thread. Threads that raise it at once may count as one.
    """
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        number = load_f32(x + row * stride + 4 * column)
        store_f32(load_i64(y) + 4 * (row * columns + column), number)
        if not abs(number) < INFINITY:
            store_i64(flaws, load_i64(flaws) + 1)
