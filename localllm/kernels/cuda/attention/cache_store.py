"""Stores keys or values in the KV cache, in the slots of their tokens: a block of threads for each token and head."""

from numba import cuda

from localllm.kernels.cuda.attention.cache_formats import STORAGE
from localllm.kernels.cuda.device import WARP, device, load_i64
from localllm.kernels.table import PAGE, SEQUENCE

TABLE, SEQUENCE_BYTES = 8 * SEQUENCE.table, 8 * len(SEQUENCE)


@device
def place_of(positions, owners, sequences, token):
    """Return the cache slot of token number `token` of the run."""
    table = load_i64(sequences + load_i64(owners + 8 * token) * SEQUENCE_BYTES + TABLE)
    position = load_i64(positions + 8 * token)
    return load_i64(table + position // PAGE * 8) * PAGE + position % PAGE


def make_pass(work):
    """Make a kernel that calls `work` for all tokens of a run and all heads.

    work(address of a head in the cache, address of the head in x, head dimension, number of the warp, number of warps).
    """

    def go(count, positions, owners, sequences, x, stride, base, head_stride, token_bytes, heads, head_dim):
        token, number = cuda.blockIdx.x, cuda.blockIdx.y
        if token < load_i64(count):
            head = base + place_of(positions, owners, sequences, token) * token_bytes + number * head_stride
            of_x = x + token * stride + 4 * number * head_dim
            work(head, of_x, head_dim, cuda.threadIdx.x // WARP, cuda.blockDim.x // WARP)

    return go


def make(format_name):
    """Make the kernel for one cache type."""
    return make_pass(STORAGE[format_name][1])
