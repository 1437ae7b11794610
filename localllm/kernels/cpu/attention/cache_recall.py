"""Reads keys or values from the KV cache, as float32 rows."""

from localllm.kernels.cpu.attention.cache_formats import STORAGE
from localllm.kernels.cpu.attention.cache_store import make_pass
from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import store_lanes_f32x16


def make(format_name):
    """Make the kernel for one cache type."""
    load, _ = STORAGE[format_name]

    @device
    def recall(head, x, head_dim):
        for d in range(0, head_dim, 16):
            store_lanes_f32x16(x + d * 4, load(head, d), head_dim - d)

    return make_pass(recall)
