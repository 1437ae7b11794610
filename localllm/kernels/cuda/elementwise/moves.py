"""Copies of rows and columns, and of the logits to the array that the caller gets."""

import math

from numba import cuda

from localllm.kernels.cuda.device import float32, load_4f32, load_f32, load_i64, store_4f32, store_f32, store_i64
from localllm.kernels.cuda.elementwise.formulas import first_column
from localllm.kernels.table import SEQUENCE

INFINITY, ZERO = float32(math.inf), float32(0)
SEQUENCE_BYTES = 8 * len(SEQUENCE)


def select(count, x, rows, y, stride, columns):
    """Copy row rows[i] of x to row i of y; a thread for four columns."""
    row, column = cuda.blockIdx.x, first_column()
    if row < load_i64(count) and column < columns:
        a, b, c, d = load_4f32(x + load_i64(rows + 8 * row) * stride + 4 * column)
        store_4f32(y + row * stride + 4 * column, a, b, c, d)


def replace_ids(count, ids, table, y):
    """Write table[ids[t]] to y[t]; a thread for each token."""
    token = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if token < load_i64(count):
        store_i64(y + 8 * token, load_i64(table + 8 * load_i64(ids + 8 * token)))


def pool(count, sequences, x, y, stride, columns, kind):
    """Pool the rows of each sequence to one row: their mean, the first or the last; a thread for four columns."""
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
    """Copy some columns of every period of x to y, see SLICE_COLUMNS in table.py; a thread for each column of y."""
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        width = columns // groups
        number = load_f32(x + row * x_stride + 4 * (first + column // width * period + column % width))
        store_f32(y + row * stride + 4 * column, number)


def concat_heads(count, x, x_stride, x_columns, z, z_stride, z_columns, shared, heads, y, stride):
    """Write to y, for each head, its columns of x and then its columns of z; a block for each row and head."""
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
    """Copy x without padding to the array whose address is at y; a thread for each number.

    `flaws` is increased if a number is not finite. Threads that increase it at the same time may count as one.
    """
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        number = load_f32(x + row * stride + 4 * column)
        store_f32(load_i64(y) + 4 * (row * columns + column), number)
        if not abs(number) < INFINITY:
            store_i64(flaws, load_i64(flaws) + 1)
