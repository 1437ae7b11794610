"""The two products of attention, q k^T and weights * v, for few rows and for many rows.

Few rows read the cache directly: up to six rows share each vector of keys or values, which lies along the head
dimension. Two vectors are a block of 32 values, in cache types that have a scale per block. Arrays of rows are
padded to a multiple of four rows; the padding of q is zero, and its results are not used.

Keys and values are two streams from memory: while the keys of a block are multiplied, its values are prefetched, and
then the keys of the next block. Two cores of a Zen 4 read a float16 cache at 34 GB/s this way (of 37), and at 20
without prefetching.

Many rows, in float32 register tiles: a block of keys is converted to float32 and transposed once for all rows of a
unit, a block of values is converted. The lanes of a tile's vectors are keys in the first product, and dimensions of the
head in the second. Arrays of rows are padded to whole tiles; the padding of q is zero, and its results are not used.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu import ATTEND_KEYS as KEYS
from localllm.kernels.cpu.matmul.tiles_f32 import (
    COLUMNS,
    ROWS,
    make_join,
    make_load,
    make_outer,
    make_splats,
    make_store,
    make_store_sums_by_four,
    make_zeros,
)
from localllm.kernels.cpu.signature import device, inlined, load_argument, load_argument_f32
from localllm.kernels.machine import get_lane
from localllm.kernels.table import ATTEND

LOG2_E = float32(math.log2(math.e))
MOST_ROWS = 6 if get_lane().has_512_bits else 4  # that share a vector of keys or values, as many as registers allow


@device
def fill(address, count, value):
    """Set `count` float32 at an address to one value; count: a multiple of 16."""
    for i in range(0, count, 16):
        simd.store_f32x16(address + i * 4, simd.splat_f32x16(value))


@device
def pad_to_16(numbers):
    return (numbers + 15) // 16 * 16


@device
def find_row(first_token, stride, row, group, kv_head, head_dim):
    """Return the address of a row's head in q or in the output; first_token: that of the first token."""
    return first_token + row // group * stride + (kv_head * group + row % group) * head_dim * 4


@device
def compute_query_scale(a):
    """Compute the factor of q k^T: scale / softcap, or scale * log2(e), so that scores are exponents of 2."""
    softcap = load_argument_f32(a, ATTEND.softcap)
    return load_argument_f32(a, ATTEND.scale) * (float32(1.0) / softcap if softcap > 0 else LOG2_E)


def make_load_queries(few):
    """Build a function that loads a unit's rows of q, scaled.

    The layout is [rows][padded] for few rows, [rows / ROWS][padded][ROWS] for many.
    """
    tile, down, along = (1, 0, 4) if few else (ROWS, 4, ROWS * 4)

    @device
    def load_queries(a, first, rows, group, kv_head, key_dim, q):
        head_dim, scale = load_argument(a, ATTEND.key_dim), compute_query_scale(a)
        fill(q, (rows + ROWS - 1) // ROWS * ROWS * key_dim, float32(0.0))
        for r in range(rows):
            source = find_row(
                load_argument(a, ATTEND.q), load_argument(a, ATTEND.q_stride), first + r, group, kv_head, head_dim
            )
            target = q + (r - r % tile) * key_dim * 4 + r % tile * down
            for d in range(head_dim):
                simd.store_f32(target + d * along, simd.load_f32(source + d * 4) * scale)

    return load_queries


load_few_queries, load_many_queries = make_load_queries(True), make_load_queries(False)


class ManyRowProducts(NamedTuple):
    """The products of attention for many rows.

    They use float32 register tiles, or AMX tiles (amx/attention.py).
    """

    make: Callable  # (load_key, load_value) -> (scores, add_values)
    load_queries: Callable
    start: Callable  # (address of the tiles), called before the first unit
    finish: Callable  # (), called after the last unit
    more: int  # bytes, see `places`


def make_multiply_keys(load_key, rows):
    """Build a function that stores the scores of four keys and `rows` rows of q: 2, 4 or 6.

    With 32 registers, all four keys are multiplied by a vector of q once it is loaded.
    """
    at_once, store_sums, join = 4 if get_lane().has_512_bits else 1, make_store_sums_by_four(rows), make_join(rows)
    zeros, outer, load_rows = make_zeros(rows * at_once), make_outer(at_once, rows), make_load(rows, 1)

    @inlined
    def load_four(key, apart, d):
        return load_key(key, d), load_key(key + apart, d), load_key(key + 2 * apart, d), load_key(key + 3 * apart, d)

    @inlined
    def load_one(key, apart, d):
        return (load_key(key, d),)

    load_keys = load_four if at_once == 4 else load_one

    @inlined
    def multiply(q, padded, key, apart):
        tile = zeros()
        for d in range(0, padded - 16, 32):
            tile = outer(tile, load_keys(key, apart, d), load_rows(q + d * 4, padded * 4, 0))
            tile = outer(tile, load_keys(key, apart, d + 16), load_rows(q + d * 4 + 64, padded * 4, 0))
        if padded % 32:
            d = padded - 16
            tile = outer(tile, load_keys(key, apart, d), load_rows(q + d * 4, padded * 4, 0))
        return tile

    @inlined
    def multiply_each(q, padded, key, apart):
        first, second = multiply(q, padded, key, apart), multiply(q, padded, key + apart, apart)
        third, fourth = multiply(q, padded, key + 2 * apart, apart), multiply(q, padded, key + 3 * apart, apart)
        return join(first, second, third, fourth)

    multiply_four = multiply if at_once == 4 else multiply_each

    @inlined
    def multiply_keys(q, padded, key, apart, scores):
        store_sums(multiply_four(q, padded, key, apart), scores, KEYS * 4)

    return multiply_keys


def make_add_rows(load_value, rows):
    """Build a function that adds weights f32 [rows][KEYS] times values to y f32 [rows][padded]; rows: 2, 4 or 6."""
    outer, load_rows, store_rows = make_outer(rows, 1), make_load(rows, 1), make_store(rows, 1)
    outer_pairs, load_pairs, store_pairs = make_outer(rows, 2), make_load(rows, 2), make_store(rows, 2)
    splats = make_splats(rows, KEYS * 4)

    @device
    def add_rows(w, values, count, token_bytes, padded, y, ahead):
        line, step = ahead, token_bytes * 32 // padded
        for d in range(0, padded - 16, 32):
            tile = load_pairs(y + d * 4, padded * 4, 64)
            for i in range(count):
                simd.prefetch_l2(line)
                line += step
                value = values + i * token_bytes
                tile = outer_pairs(tile, splats(w + i * 4), (load_value(value, d), load_value(value, d + 16)))
            store_pairs(tile, y + d * 4, padded * 4, 64)
        if padded % 32:
            d = padded - 16
            tile = load_rows(y + d * 4, padded * 4, 0)
            for i in range(count):
                tile = outer(tile, splats(w + i * 4), (load_value(values + i * token_bytes, d),))
            store_rows(tile, y + d * 4, padded * 4, 0)

    return add_rows


def make_few(load_key, load_value):
    """Build `scores` and `add_values` for one type of keys and one of values.

    load_key, load_value: see cache.py.
    """
    multiply_most, multiply_four, multiply_two = (make_multiply_keys(load_key, rows) for rows in (MOST_ROWS, 4, 2))
    add_most, add_four, add_two = (make_add_rows(load_value, rows) for rows in (MOST_ROWS, 4, 2))

    @device
    def compute_scores(q, rows, keys, count, token_bytes, padded, scores, ahead):
        """Compute scores f32 [rows][KEYS] from q f32 [rows][padded].

        Up to 3 keys beyond `count` are read, too.
        """
        for i in range(0, count, 4):
            key, r = keys + i * token_bytes, 0
            for line in range(i * token_bytes, (i + 4) * token_bytes, 64):
                simd.prefetch_l2(ahead + line)
            while rows - r > 4:
                multiply_most(q + r * padded * 4, padded, key, token_bytes, scores + (r * KEYS + i) * 4)
                r += MOST_ROWS
            if rows - r > 2:
                multiply_four(q + r * padded * 4, padded, key, token_bytes, scores + (r * KEYS + i) * 4)
            elif rows - r > 0:
                multiply_two(q + r * padded * 4, padded, key, token_bytes, scores + (r * KEYS + i) * 4)

    @device
    def add_values(weights, rows, values, count, token_bytes, padded, output, ahead):
        """Add weights f32 [rows][KEYS] times values to output f32 [rows][padded]; ahead: address to prefetch."""
        r = 0
        while rows - r > 4:
            w, y = weights + r * KEYS * 4, output + r * padded * 4
            add_most(w, values, count, token_bytes, padded, y, ahead)
            r += MOST_ROWS
        w, y = weights + r * KEYS * 4, output + r * padded * 4
        if rows - r > 2:
            add_four(w, values, count, token_bytes, padded, y, ahead)
        elif rows - r > 0:
            add_two(w, values, count, token_bytes, padded, y, ahead)

    return compute_scores, add_values


WIDTH = 16 * COLUMNS


def make_convert(load):
    @device
    def convert(source, count, token_bytes, padded, target):
        for i in range(count):
            for d in range(0, padded, 16):
                simd.store_f32x16(target + (i * padded + d) * 4, load(source + i * token_bytes, d))

    return convert


def make_many(load_key, load_value):
    zeros, outer, outer_one = make_zeros(ROWS * COLUMNS), make_outer(ROWS, COLUMNS), make_outer(ROWS, 1)
    load_tile, store_tile = make_load(ROWS, COLUMNS), make_store(ROWS, COLUMNS)
    load_one, store_one = make_load(ROWS, 1), make_store(ROWS, 1)
    load_columns, load_column = make_load(1, COLUMNS), make_load(1, 1)
    splats_q, splats_weights = make_splats(ROWS, 4), make_splats(ROWS, KEYS * 4)
    convert_keys, convert_values = make_convert(load_key), make_convert(load_value)

    @device
    def compute_scores(q, rows, keys, count, token_bytes, padded, tiles, scores):
        """Compute scores f32 [rows][KEYS] from q f32 [rows / ROWS][padded][ROWS].

        Up to 15 keys beyond `count` are read, too. tiles: temporary memory, f32 [2][KEYS][padded].
        """
        by_dimension = tiles + KEYS * padded * 4  # [KEYS / 16][padded][16]
        convert_keys(keys, (count + 15) // 16 * 16, token_bytes, padded, tiles)
        for i in range(0, count, 16):
            for d in range(0, padded, 16):
                simd.transpose_f32(tiles + (i * padded + d) * 4, padded * 4, by_dimension + (i * padded + d * 16) * 4)
        for i in range(0, count, WIDTH):
            for r in range(0, rows, ROWS):
                x, w, tile = q + r * padded * 4, by_dimension + i * padded * 4, zeros()
                for d in range(padded):
                    tile = outer(tile, splats_q(x + d * ROWS * 4), load_columns(w + d * 64, 0, padded * 64))
                store_tile(tile, scores + (r * KEYS + i) * 4, KEYS * 4, 64)

    @device
    def add_values(weights, rows, values, count, token_bytes, padded, tiles, output):
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

    return compute_scores, add_values


IN_FLOAT32 = ManyRowProducts(make_many, load_many_queries, device(lambda tiles: None), device(lambda: None), 0)
