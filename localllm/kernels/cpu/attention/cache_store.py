"""Stores keys or values in the KV cache, in the slots of their tokens."""

from localllm.kernels.cpu.attention.cache_formats import STORAGE
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import load_i64
from localllm.kernels.table import PAGE, SEQUENCE, STORE


@device
def place_of(a, token):
    """Return the cache slot of token number `token` of the run."""
    sequence = argument(a, STORE.sequences) + load_i64(argument(a, STORE.owners) + token * 8) * 8 * len(SEQUENCE)
    position = load_i64(argument(a, STORE.positions) + token * 8)
    return load_i64(argument(sequence, SEQUENCE.table) + position // PAGE * 8) * PAGE + position % PAGE


def make_pass(work):
    """Make a kernel that calls `work` for all tokens of a run and all heads.

    work(address of a head in the cache, address of the head in x, head dimension).
    """

    @kernel
    def go(a, part, parts, thread):
        heads, head_dim, tokens = (
            argument(a, STORE.heads),
            argument(a, STORE.head_dim),
            load_i64(argument(a, STORE.count)),
        )
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = argument(a, STORE.base) + place_of(a, t) * argument(a, STORE.token_bytes)
            for head in range(heads):
                x = argument(a, STORE.x) + t * argument(a, STORE.stride) + head * head_dim * 4
                work(row + head * argument(a, STORE.head_stride), x, head_dim)

    return go


def make(format_name):
    """Make the kernel for one cache type."""
    return make_pass(STORAGE[format_name][1])
