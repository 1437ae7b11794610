"""Copies the header of a run (its SEQUENCEs and other small arrays) from pinned host memory to GPU memory."""

from numba import cuda

from localllm.kernels.cuda.device import load_i64, store_i64


def fetch(source, target, words):
    """Copy int64 words; the threads of the grid copy one word each at a time."""
    step = cuda.gridDim.x * cuda.blockDim.x
    for word in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, words, step):
        store_i64(target + 8 * word, load_i64(source + 8 * word))
