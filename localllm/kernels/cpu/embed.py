"""x[t] = row ids[t] of the embedding matrix, in float32.

Arguments: 0 address of the token count, 1 weights, 2 bytes per row, 3 columns, 4 token ids int64, 5 x f32, 6 bytes
between tokens.
"""

from localllm.kernels.cpu.linear_float import PLAIN, make_blocks, make_plain
from localllm.kernels.cpu.signature import argument, kernel
from localllm.kernels.simd import load_i64


def make(format_name):
    """The kernel for one format."""
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)

    @kernel
    def embed(a, part, parts, thread):
        tokens = load_i64(argument(a, 0))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = argument(a, 1) + load_i64(argument(a, 4) + t * 8) * argument(a, 2)
            load_row(row, argument(a, 3), argument(a, 5) + t * argument(a, 6))

    return embed
