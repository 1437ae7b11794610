"""Weights asked for ahead: while a slab of a tile is multiplied, that of the next comes to the second cache.

Tiles are read a piece of each row at a time, which no processor foresees: unpacking alone read 7 GB/s.
"""

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.signature import argument, device
from localllm.kernels.cpu.tiles import ROWS, TOKENS
from localllm.kernels.simd import prefetch_l2


def make_fetch_next(group_bytes, slab_columns=SLAB):
    """A function (arguments of the kernel, (tile, column), token, tokens): asks for the share of these tokens.

    group_bytes: of 256 columns. The arguments may be those of LINEAR_FLOAT, which begin alike.
    """

    @device
    def fetch_next(a, slab, token, tokens):
        row_bytes, (tile, column) = argument(a, LINEAR.row_bytes), slab
        size = min(slab_columns, argument(a, LINEAR.columns) - column) // 64 * group_bytes // 4
        first = argument(a, LINEAR.weights) + column // 256 * group_bytes
        share = (ROWS * TOKENS + tokens - 1) // tokens
        row = tile * ROWS + token // TOKENS * share
        for r in range(row, min(row + share, argument(a, LINEAR.rows), (tile + 1) * ROWS)):
            for line in range(0, size, 64):
                prefetch_l2(first + r * row_bytes + line)

    return fetch_next
