"""Sums of squared activations per column, for importance matrices (localllm.quantizing.imatrix)."""

from numba import cuda

from localllm.kernels.cuda.device import load_f32, load_i64, store_f32


def add_squares(count, x, stride, columns, sums):
    """Add x^2 over the tokens to the sums, in their order; a thread for each column."""
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if column >= columns:
        return
    total = load_f32(sums + 4 * column)
    for row in range(load_i64(count)):
        total += load_f32(x + row * stride + 4 * column) ** 2
    store_f32(sums + 4 * column, total)
