"""Norms, rotations, copies of rows and columns, hashes of tokens, and sums over tokens.

A norm has a block of threads for each group of columns of a row. Some are fused with the operations before or after
them in a decoder's layers: for one token, launching a kernel takes as long as its work.
"""

import math

from numba import cuda, float32, float64, int64

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.elementwise.formulas import compute_first_column
from localllm.kernels.table import EXPERT, SEQUENCE

ZERO, NAN, INFINITY = float32(0), float32(math.nan), float32(math.inf)


@gpu.device
def compute_inverse_root(mean, epsilon):
    """Compute 1 / sqrt(mean + epsilon), or NaN if the sum of squares has exceeded float32."""
    return float32(1) / math.sqrt(mean + epsilon) if mean < INFINITY else NAN


@gpu.device
def sum_squares(x, columns, center):
    """Return this thread's share of the sum of (x - center)^2 over the columns."""
    total = ZERO
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += (gpu.load_f32(x + 4 * column) - center) ** 2
    return total


def rms_norm(count, x, weight, y, stride, columns, group, epsilon):
    row, first = cuda.blockIdx.x, 4 * cuda.blockIdx.y * group
    if row >= gpu.load_i64(count):
        return
    source, target = x + row * stride + first, y + row * stride + first
    scale = compute_inverse_root(
        gpu.block_sum(sum_squares(source, group, ZERO)) / float32(group), gpu.decode_f32(epsilon)
    )
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        number = gpu.load_f32(source + 4 * column) * scale
        gpu.store_f32(target + 4 * column, number * gpu.load_f32(weight + first + 4 * column))


def layer_norm(count, x, weight, bias, y, stride, columns, group, epsilon):
    row, first, total = cuda.blockIdx.x, 4 * cuda.blockIdx.y * group, ZERO
    if row >= gpu.load_i64(count):
        return
    source, target = x + row * stride + first, y + row * stride + first
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        total += gpu.load_f32(source + 4 * column)
    mean = gpu.block_sum(total) / float32(group)
    scale = compute_inverse_root(
        gpu.block_sum(sum_squares(source, group, mean)) / float32(group), gpu.decode_f32(epsilon)
    )
    for column in range(cuda.threadIdx.x, group, cuda.blockDim.x):
        number = (gpu.load_f32(source + 4 * column) - mean) * scale * gpu.load_f32(weight + first + 4 * column)
        gpu.store_f32(target + 4 * column, number + gpu.load_f32(bias + first + 4 * column))


def add_rms_norm(count, x, z, weight, total, y, stride, columns, epsilon):
    """Write total = x + z, and the RMS norm of total to y.

    total is the residual stream, y the input of the next sublayer.
    """
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride
    if row >= gpu.load_i64(count):
        return
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        gpu.store_f32(total + at + 4 * column, gpu.load_f32(x + at + 4 * column) + gpu.load_f32(z + at + 4 * column))
    own_squares = sum_squares(total + at, columns, ZERO)  # each thread reads the columns that it has written
    scale = compute_inverse_root(gpu.block_sum(own_squares) / float32(columns), gpu.decode_f32(epsilon))
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        number = gpu.load_f32(total + at + 4 * column) * scale
        gpu.store_f32(y + at + 4 * column, number * gpu.load_f32(weight + 4 * column))


def rms_norm_rope(count, x, weight, epsilon, y, stride, heads, head_dim, table, pairs, step, apart):
    """Write the RMS norm of each head of x, with its pairs rotated, to y: normalized queries and keys."""
    row, first = cuda.blockIdx.x, 4 * cuda.blockIdx.y * head_dim
    if row >= gpu.load_i64(count):
        return
    source, target, cosines = x + row * stride + first, y + row * stride + first, table + 8 * row * pairs
    total, factors = gpu.block_sum(sum_squares(source, head_dim, ZERO)), weight + first
    scale = compute_inverse_root(total / float32(head_dim), gpu.decode_f32(epsilon))
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        i, k = 4 * pair * step, 4 * (pair * step + apart)
        u = gpu.load_f32(source + i) * scale * gpu.load_f32(factors + i)
        v = gpu.load_f32(source + k) * scale * gpu.load_f32(factors + k)
        cosine, sine = gpu.load_f32(cosines + 4 * pair), gpu.load_f32(cosines + 4 * (pairs + pair))
        gpu.store_f32(target + i, u * cosine - v * sine)
        gpu.store_f32(target + k, u * sine + v * cosine)
    for number in range(2 * pairs + cuda.threadIdx.x, head_dim, cuda.blockDim.x):
        at = 4 * number
        gpu.store_f32(target + at, gpu.load_f32(source + at) * scale * gpu.load_f32(factors + at))


SEQUENCE_BYTES = 8 * len(SEQUENCE)


def select(count, x, rows, y, stride, columns):
    row, column = cuda.blockIdx.x, compute_first_column()
    if row < gpu.load_i64(count) and column < columns:
        a, b, c, d = gpu.load_4f32(x + gpu.load_i64(rows + 8 * row) * stride + 4 * column)
        gpu.store_4f32(y + row * stride + 4 * column, a, b, c, d)


def replace_ids(count, ids, table, y):
    token = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if token < gpu.load_i64(count):
        gpu.store_i64(y + 8 * token, gpu.load_i64(table + 8 * gpu.load_i64(ids + 8 * token)))


def pool(count, sequences, x, y, stride, columns, kind):
    row, column = cuda.blockIdx.x, compute_first_column()
    if row < gpu.load_i64(count) and column < columns:
        sequence = sequences + row * SEQUENCE_BYTES
        first, rows = gpu.load_i64(sequence + 8 * SEQUENCE.first), gpu.load_i64(sequence + 8 * SEQUENCE.count)
        if kind != 0:
            first, rows = first + (rows - 1 if kind == 2 else 0), 1
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        for r in range(first, first + rows):
            e, f, g, h = gpu.load_4f32(x + r * stride + 4 * column)
            a, b, c, d = a + e, b + f, c + g, d + h
        scale = float32(1.0) / float32(rows)
        gpu.store_4f32(y + row * stride + 4 * column, a * scale, b * scale, c * scale, d * scale)


def slice_columns(count, x, x_stride, first, groups, period, y, stride, columns):
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < gpu.load_i64(count) and column < columns:
        width = columns // groups
        number = gpu.load_f32(x + row * x_stride + 4 * (first + column // width * period + column % width))
        gpu.store_f32(y + row * stride + 4 * column, number)


def concat_heads(count, x, x_stride, x_columns, z, z_stride, z_columns, shared, heads, y, stride):
    row, head, width = cuda.blockIdx.x, cuda.blockIdx.y, x_columns + z_columns
    if row >= gpu.load_i64(count):
        return
    first = x + row * x_stride + 4 * head * x_columns
    second = z + row * z_stride + (0 if shared == 1 else 4 * head * z_columns)
    target = y + row * stride + 4 * head * width
    for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        source = first + 4 * column if column < x_columns else second + 4 * (column - x_columns)
        gpu.store_f32(target + 4 * column, gpu.load_f32(source))


def logits(count, x, stride, columns, y, flaws):
    """Copy x without padding to the array whose address is at y.

    `flaws` is increased if a value is not finite. Threads that increase it at the same time may count as one.
    """
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < gpu.load_i64(count) and column < columns:
        number = gpu.load_f32(x + row * stride + 4 * column)
        gpu.store_f32(gpu.load_i64(y) + 4 * (row * columns + column), number)
        if not abs(number) < INFINITY:
            gpu.store_i64(flaws, gpu.load_i64(flaws) + 1)


TURNS = 0.5 / math.pi  # turns per radian


def angles(count, positions, before, frequencies, pairs, table, factor):
    """Write the cosines and sines of each token's angles to the table, times `factor`.

    Angles are computed in turns, in float64, and whole turns are dropped: after a million turns 20 bits of 53 are lost.
    """
    row = cuda.blockIdx.x
    if row >= gpu.load_i64(count):
        return
    position, target = float64(gpu.load_i64(positions + 8 * row) - before), table + 8 * row * pairs
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        turns = position * gpu.load_f64(frequencies + 8 * pair) * TURNS
        gpu.store_f32(target + 4 * pair, float32(gpu.compute_cosine(turns)) * gpu.decode_f32(factor))
        gpu.store_f32(target + 4 * (pairs + pair), float32(gpu.compute_sine(turns)) * gpu.decode_f32(factor))


def rope(count, x, y, stride, heads, head_dim, table, pairs, step, apart):
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride + 4 * cuda.blockIdx.y * head_dim
    if row >= gpu.load_i64(count):
        return
    cosines = table + 8 * row * pairs
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        cosine, sine = gpu.load_f32(cosines + 4 * pair), gpu.load_f32(cosines + 4 * (pairs + pair))
        first, second = at + 4 * pair * step, at + 4 * (pair * step + apart)
        u, v = gpu.load_f32(x + first), gpu.load_f32(x + second)
        gpu.store_f32(y + first, u * cosine - v * sine)
        gpu.store_f32(y + second, u * sine + v * cosine)
    for number in range(2 * pairs + cuda.threadIdx.x, head_dim, cuda.blockDim.x):
        gpu.store_f32(y + at + 4 * number, gpu.load_f32(x + at + 4 * number))


def hadamard(count, x, y, stride, columns, block):
    """Apply the fast Walsh-Hadamard transform to each block of columns.

    It replaces pairs of values at distances 1, 2, 4, ... by their sum and difference.
    """
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride + 4 * cuda.blockIdx.y * block
    if row >= gpu.load_i64(count):
        return
    factor, distance = float32(1) / math.sqrt(float32(block)), 1
    for number in range(cuda.threadIdx.x, block, cuda.blockDim.x):
        gpu.store_f32(y + at + 4 * number, gpu.load_f32(x + at + 4 * number) * factor)
    while distance < block:
        cuda.syncthreads()
        for pair in range(cuda.threadIdx.x, block // 2, cuda.blockDim.x):
            first = y + at + 4 * (2 * pair - (pair & (distance - 1)))
            u, v = gpu.load_f32(first), gpu.load_f32(first + 4 * distance)
            gpu.store_f32(first, u + v)
            gpu.store_f32(first + 4 * distance, u - v)
        distance *= 2


def as_column(count, ids, y, stride):
    token = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if token < gpu.load_i64(count):
        gpu.store_f32(y + token * stride, float32(gpu.load_i64(ids + 8 * token) + 1))


def hash(count, x, stride, factors, length, size, first, end, y):
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row >= gpu.load_i64(count):
        return
    hashed, is_cut = int64(0), False
    for i in range(length):
        token = int64(gpu.load_f32(x + row * stride + 4 * i)) - 1
        is_cut = is_cut or (i > 0 and (token < 0 or token == end))
        hashed ^= (end if is_cut else token) * gpu.load_i64(factors + 8 * i)
    gpu.store_i64(y + 8 * row, hashed % size + first)


EXPERT_BYTES = 8 * len(EXPERT)
NUMBER, FIRST, COUNT = 8 * EXPERT.number, 8 * EXPERT.first, 8 * EXPERT.count


def add_squares(count, x, stride, columns, sums):
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if column >= columns:
        return
    total = gpu.load_f32(sums + 4 * column)
    for row in range(gpu.load_i64(count)):
        total += gpu.load_f32(x + row * stride + 4 * column) ** 2
    gpu.store_f32(sums + 4 * column, total)


def add_expert_squares(active, active_count, x, stride, columns, sums, sums_stride, counts):
    """Add x^2 over each expert's rows to its sums.

    The first thread also adds the numbers of rows to the counts.
    """
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if column >= columns:
        return
    for i in range(gpu.load_i64(active_count)):
        expert = active + i * EXPERT_BYTES
        number, first, rows = gpu.load_i64(expert + NUMBER), gpu.load_i64(expert + FIRST), gpu.load_i64(expert + COUNT)
        place = sums + number * sums_stride + 4 * column
        total = gpu.load_f32(place)
        for row in range(first, first + rows):
            total += gpu.load_f32(x + row * stride + 4 * column) ** 2
        gpu.store_f32(place, total)
        if column == 0:
            gpu.store_i64(counts + 8 * number, gpu.load_i64(counts + 8 * number) + rows)


def fetch(source, target, words):
    step = cuda.gridDim.x * cuda.blockDim.x
    for word in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, words, step):
        gpu.store_i64(target + 8 * word, gpu.load_i64(source + 8 * word))
