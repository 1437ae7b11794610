"""Copies the header of a run from pinned host memory to GPU memory, where kernels read it faster."""

from numba import cuda

from localllm.kernels.cuda.device import load_i64, store_i64


def fetch(source, target, words):
    """Copy memory; a block copies blockDim.x words at a time."""
    step = cuda.gridDim.x * cuda.blockDim.x
    for word in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, words, step):
        store_i64(target + 8 * word, load_i64(source + 8 * word))
