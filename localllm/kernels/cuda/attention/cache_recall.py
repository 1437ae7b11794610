"""Reads keys or values from the KV cache as float32 rows: a block of threads for each token and head."""

from localllm.kernels.cuda.attention.cache_formats import STORAGE
from localllm.kernels.cuda.attention.cache_store import make_pass
from localllm.kernels.cuda.device import WARP, device, lane, store_f32


def make(format_name):
    """Make the kernel for one cache type."""
    load = STORAGE[format_name][0]

    @device
    def recall(head, x, head_dim, warp, warps):
        for d in range(WARP * warp + lane(), head_dim, WARP * warps):
            store_f32(x + 4 * d, load(head, d))

    return make_pass(recall)
