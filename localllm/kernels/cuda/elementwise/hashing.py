"""Hashes a token and its predecessors to a row of an embedding table, a thread for each token."""

from numba import cuda, int64

from localllm.kernels.cuda.device import float32, load_f32, load_i64, store_f32, store_i64


def as_column(count, ids, y, stride):
    """Write ids[t] + 1 to y[t] as float32; 0 then stands for "no token"."""
    token = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if token < load_i64(count):
        store_f32(y + token * stride, float32(load_i64(ids + 8 * token) + 1))


def hash(count, x, stride, factors, length, size, first, end, y):
    """Write first + (the exclusive or of a token's and its predecessors' ids, each times its factor) % size to y[t].

    From the first predecessor that is missing or `end` on, all count as `end`.
    """
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row >= load_i64(count):
        return
    hashed, is_cut = int64(0), False
    for i in range(length):
        token = int64(load_f32(x + row * stride + 4 * i)) - 1
        is_cut = is_cut or (i > 0 and (token < 0 or token == end))
        hashed ^= (end if is_cut else token) * load_i64(factors + 8 * i)
    store_i64(y + 8 * row, hashed % size + first)
