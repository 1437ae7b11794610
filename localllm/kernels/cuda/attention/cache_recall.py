"""Keys or values out of the KV cache, as float32 rows: a block for each token and head."""

from numba import cuda

from localllm.kernels.cuda.attention.cache_formats import STORAGE
from localllm.kernels.cuda.attention.cache_store import place_of
from localllm.kernels.cuda.device import load_i64, store_f32


def make(format_name):
    """The kernel for one storage type."""
    load = STORAGE[format_name][0]

    def recall(count, positions, owners, sequences, x, stride, base, head_stride, token_bytes, heads, head_dim):
        token, number = cuda.blockIdx.x, cuda.blockIdx.y
        if token < load_i64(count):
            head = base + place_of(positions, owners, sequences, token) * token_bytes + number * head_stride
            target = x + token * stride + 4 * number * head_dim
            for d in range(cuda.threadIdx.x, head_dim, cuda.blockDim.x):
                store_f32(target + 4 * d, load(head, d))

    return recall
