"""Rows of the embedding matrix."""

from numba import cuda

from localllm.kernels.cuda.device import load_f32, load_i64, store_f32


def make(format_name):
    """The kernel for one format."""
    return embed_f32


def embed_f32(count, weights, row_bytes, columns, ids, x, stride):
    """x[t] = row ids[t]."""
    token = cuda.blockIdx.x
    if token >= load_i64(count):
        return
    row = weights + load_i64(ids + 8 * token) * row_bytes
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        store_f32(x + token * stride + 4 * column, load_f32(row + 4 * column))
