"""Multiplies a slab with all tokens while the next slab is prefetched into the L2 cache.

A slab's weights are pieces of many rows, which no hardware prefetcher predicts: unpacking without prefetches read 7
GB/s.
"""

from localllm.kernels.cpu import SLAB
from localllm.kernels.cpu.matmul.tiles import ROWS, TOKENS, VECTORS, make_load_tile, make_store_tile, zero_floats
from localllm.kernels.cpu.signature import argument, device
from localllm.kernels.simd import prefetch_l2
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR


def make_fetch_next(group_bytes, slab_columns=SLAB):
    """Make a function (arguments, (tile, column), token, tokens) that prefetches a share of a slab's weights.

    The shares of all tokens make up the slab at that tile and column. group_bytes: bytes of 256 columns. The arguments
    may also be those of LINEAR_FLOAT, the first of which are the same.
    """

    @device
    def fetch_next(a, slab, token, tokens):
        row_bytes, (tile, column) = argument(a, LINEAR.row_bytes), slab
        size = min(slab_columns, argument(a, LINEAR.columns) - column) // 64 * group_bytes // 4
        first = argument(a, LINEAR.weights) + column * group_bytes // 256
        share = (ROWS * TOKENS + tokens - 1) // tokens
        row = tile * ROWS + token // TOKENS * share
        for r in range(row, min(row + share, argument(a, LINEAR.rows), (tile + 1) * ROWS)):
            for line in range(0, size, 64):
                prefetch_l2(first + r * row_bytes + line)

    return fetch_next


load_all, load_first = make_load_tile(VECTORS), make_load_tile(1)
store_all, store_first = make_store_tile(VECTORS), make_store_tile(1)


def make_slab(format, unpack_tile, multiply):
    """Make a function that multiplies a slab with all tokens.

    Its parameters: arguments, tile, column, (tile, column) of the next slab, tokens, scratch.

    unpack_tile(arguments, tile, column, columns, scratch): unpacks the slab to scratch memory. multiply(arguments,
    totals, columns, first activation, tokens, scratch): adds the products of TOKENS tokens to their totals; only the
    first `tokens` of these tokens exist.
    """
    fetch_next = make_fetch_next(format.group_bytes)

    @device
    def slab(a, tile, column, next_slab, tokens, scratch):
        columns = min(SLAB, argument(a, LINEAR.columns) - column)
        unpack_tile(a, tile, column, columns, scratch)
        width, y_stride = argument(a, LINEAR.columns), argument(a, LINEAR.y_stride)
        whole = argument(a, LINEAR.rows) - tile * ROWS > ROWS - 16
        for t in range(0, tokens, TOKENS):  # with up to TOKENS - 1 tokens too many, whose results are not used
            y = argument(a, LINEAR.y) + tile * ROWS * 4 + t * y_stride
            fetch_next(a, next_slab, t, tokens)
            totals = zero_floats()
            if column:
                totals = load_all(y, y_stride) if whole else load_first(y, y_stride)
            totals = multiply(a, totals, columns, t * width + column, tokens - t, scratch)
            if whole:
                store_all(totals, y, y_stride)
            else:
                store_first(totals, y, y_stride)

    return slab
