"""Looks up rows of the embedding matrix and dequantizes them: x[t] = row ids[t], float32."""

from localllm.kernels.cpu.matmul.matmul_float import PLAIN, make_blocks, make_plain
from localllm.kernels.cpu.signature import argument, kernel
from localllm.kernels.simd import load_i64
from localllm.kernels.table import EMBED


def make(format_name):
    """Make the kernel for one format."""
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)

    @kernel
    def embed(a, part, parts, thread):
        tokens = load_i64(argument(a, EMBED.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = argument(a, EMBED.weights) + load_i64(argument(a, EMBED.ids) + t * 8) * argument(a, EMBED.row_bytes)
            load_row(row, argument(a, EMBED.columns), argument(a, EMBED.x) + t * argument(a, EMBED.stride))

    return embed
