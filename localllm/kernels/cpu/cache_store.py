"""Keys or values into the KV cache, at the positions of their tokens.

Arguments: 0 address of the token count, 1 positions int64, 2 x f32, 3 bytes between tokens of x, 4 runs (see
attention.py), 5 number of runs, 6 which address of a run (0 keys, 8 values), 7 bytes between heads, 8 bytes per token
of a head, 9 heads, 10 head dimension.
"""

from localllm.kernels.cpu.cache_formats import STORAGE
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import load_i64


@device
def cache_row(a, position):
    """Where the token at `position` lies in the cache, for head 0; 0 if no run holds it."""
    for run in range(argument(a, 5)):
        at = argument(a, 4) + run * 24
        length = load_i64(at + 16)
        if position < length:
            return load_i64(at + argument(a, 6)) + position * argument(a, 8)
        position -= length
    return 0


def make(format_name):
    """The kernel for one storage type."""
    _, store_head = STORAGE[format_name]

    @kernel
    def store(a, part, parts, thread):
        heads, head_dim, tokens = argument(a, 9), argument(a, 10), load_i64(argument(a, 0))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = cache_row(a, load_i64(argument(a, 1) + t * 8))
            for head in range(heads):
                x = argument(a, 2) + t * argument(a, 3) + head * head_dim * 4
                store_head(row + head * argument(a, 7), x, head_dim)

    return store
