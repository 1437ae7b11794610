"""Operations on equal sections of a row: gates, sums, weighted sums.

The sections are heads or parallel residual streams.
"""

from numba import cuda, float32

from localllm.kernels.cuda.gpu import block_sum, decode_f32, device, exp, load_f32, load_i64, store_f32

LOWEST = float32(-3e38)


def multiply_heads(count, x, gates, gates_stride, heads, y, stride, columns):
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count) and column < columns:
        at, gate = row * stride + 4 * column, load_f32(gates + row * gates_stride + 4 * (column // (columns // heads)))
        store_f32(y + at, load_f32(x + at) * gate)


@device
def compute_softmax(x, y, size, epsilon):
    """Write softmax(x) + epsilon for `size` values to y; all are NaN if any input is not finite."""
    top, total = LOWEST, float32(0)
    for i in range(size):
        number = load_f32(x + 4 * i)
        top, total = max(top, number), total + (number - number)
    for i in range(size):
        power = exp(load_f32(x + 4 * i) - top)
        store_f32(y + 4 * i, power)
        total += power
    for i in range(size):
        store_f32(y + 4 * i, load_f32(y + 4 * i) / total + epsilon)


def softmax(count, x, y, stride, columns):
    """Write the softmax of each row of x to y, with a thread for each row, because rows are short."""
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row < load_i64(count):
        compute_softmax(x + row * stride, y + row * stride, columns, float32(0))


@device
def divide_by_sums(y, size, across, along, epsilon):
    """Divide the values of each row of a [size, size] matrix by their sum plus epsilon.

    across, along: bytes from row to row, and from column to column. If they are exchanged, columns are divided instead.
    """
    for i in range(size):
        total = epsilon
        for j in range(size):
            total += load_f32(y + i * across + j * along)
        for j in range(size):
            place = y + i * across + j * along
            store_f32(place, load_f32(place) / total)


def sinkhorn(count, x, size, iterations, epsilon, y, stride, columns):
    """Scale each row's matrix until its rows and columns add up to 1 (Sinkhorn), then transpose it.

    There is a thread for each row.
    """
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row >= load_i64(count):
        return
    x, y, added = x + row * stride, y + row * stride, decode_f32(epsilon)
    for i in range(0, 4 * columns, 4 * size):
        compute_softmax(x + i, y + i, size, added)
    divide_by_sums(y, size, 4, 4 * size, added)
    for _ in range(iterations - 1):
        divide_by_sums(y, size, 4 * size, 4, added)
        divide_by_sums(y, size, 4, 4 * size, added)
    for i in range(size):
        for j in range(i):
            upper, lower = y + 4 * (i * size + j), y + 4 * (j * size + i)
            number = load_f32(upper)
            store_f32(upper, load_f32(lower))
            store_f32(lower, number)


def head_dots(count, x, x_stride, z, heads, head_dim, y, stride):
    row, head, total = cuda.blockIdx.x, cuda.blockIdx.y, float32(0)
    if row >= load_i64(count):
        return
    first = row * x_stride + 4 * head * head_dim
    for column in range(cuda.threadIdx.x, head_dim, cuda.blockDim.x):
        total += load_f32(x + first + 4 * column) * load_f32(z + first + 4 * column)
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        store_f32(y + row * stride + 4 * head, total)


def mix_streams(count, x, x_stride, streams, width, weights, weights_stride, y, stride, columns):
    row, column, total = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x, float32(0)
    if row < load_i64(count) and column < columns:
        source, by = x + row * x_stride + 4 * (column % width), weights + row * weights_stride
        for j in range(streams):
            total += load_f32(source + 4 * j * width) * load_f32(by + 4 * (column // width * streams + j))
        store_f32(y + row * stride + 4 * column, total)
