"""The two products of attention for many rows, q k^T and weights * v, in float32 register tiles.

A block of keys is converted to float32 and transposed once for all rows of a unit, a block of values is converted. The
lanes of a tile's vectors are keys in the first product, and dimensions of the head in the second. Arrays of rows are
padded to whole tiles; the padding of q is zero, and its results are not used.
"""

from localllm.kernels.cpu import ATTEND_KEYS as KEYS
from localllm.kernels.cpu.matmul.tiles_f32 import (
    COLUMNS,
    ROWS,
    make_load,
    make_outer,
    make_splats,
    make_store,
    make_zeros,
)
from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import store_f32x16, transpose_f32

WIDTH = 16 * COLUMNS

zeros, outer, outer_one = make_zeros(ROWS * COLUMNS), make_outer(ROWS, COLUMNS), make_outer(ROWS, 1)
load_tile, store_tile = make_load(ROWS, COLUMNS), make_store(ROWS, COLUMNS)
load_one, store_one = make_load(ROWS, 1), make_store(ROWS, 1)
load_columns, load_column = make_load(1, COLUMNS), make_load(1, 1)
splats_q, splats_weights = make_splats(ROWS, 4), make_splats(ROWS, KEYS * 4)


def make_convert(load):
    """Make a function that converts the keys or values of a block to float32 [count][padded]."""

    @device
    def convert(source, count, token_bytes, padded, target):
        for i in range(count):
            for d in range(0, padded, 16):
                store_f32x16(target + (i * padded + d) * 4, load(source + i * token_bytes, d))

    return convert


def make_many(load_key, load_value):
    """Make the functions `scores` and `add_values` for one type of keys and one of values.

    load_key, load_value: load 16 dimensions of a head, see cache_formats.py.
    """
    convert_keys, convert_values = make_convert(load_key), make_convert(load_value)

    @device
    def scores(q, rows, keys, count, token_bytes, padded, tiles, scores):
        """Compute scores f32 [rows][KEYS] from q f32 [rows / ROWS][padded][ROWS].

        Up to 15 keys beyond `count` are read, too; tiles: temporary memory, f32 [2][KEYS][padded].
        """
        by_dimension = tiles + KEYS * padded * 4  # [KEYS / 16][padded][16]
        convert_keys(keys, (count + 15) // 16 * 16, token_bytes, padded, tiles)
        for i in range(0, count, 16):
            for d in range(0, padded, 16):
                transpose_f32(tiles + (i * padded + d) * 4, padded * 4, by_dimension + (i * padded + d * 16) * 4)
        for i in range(0, count, WIDTH):
            for r in range(0, rows, ROWS):
                x, w, tile = q + r * padded * 4, by_dimension + i * padded * 4, zeros()
                for d in range(padded):
                    tile = outer(tile, splats_q(x + d * ROWS * 4), load_columns(w + d * 64, 0, padded * 64))
                store_tile(tile, scores + (r * KEYS + i) * 4, KEYS * 4, 64)

    @device
    def add_values(weights, rows, values, count, token_bytes, padded, tiles, output):
        """Add weights f32 [rows][KEYS] times values to output f32 [rows][padded]."""
        convert_values(values, count, token_bytes, padded, tiles)
        for d in range(0, padded - WIDTH + 1, WIDTH):
            for r in range(0, rows, ROWS):
                w, y = weights + r * KEYS * 4, output + (r * padded + d) * 4
                tile = load_tile(y, padded * 4, 64)
                for i in range(count):
                    tile = outer(tile, splats_weights(w + i * 4), load_columns(tiles + (i * padded + d) * 4, 0, 64))
                store_tile(tile, y, padded * 4, 64)
        if padded % WIDTH:
            for r in range(0, rows, ROWS):
                w, y = weights + r * KEYS * 4, output + (r * padded + padded - 16) * 4
                tile = load_one(y, padded * 4, 0)
                for i in range(count):
                    v = load_column(tiles + (i * padded + padded - 16) * 4, 0, 0)
                    tile = outer_one(tile, splats_weights(w + i * 4), v)
                store_one(tile, y, padded * 4, 0)

    return scores, add_values
