"""The two products of attention for many rows, in 16-bit integers (AVX512-VNNI).

An instruction multiplies twice as many values as in float32. Each vector of a product is scaled to a Euclidean norm of
LARGEST and rounded: a row of q, a key, a row of weights of a block of keys, and a dimension of its values. The sum of
the products of two vectors is at most the product of their norms (Cauchy and Schwarz), so sums fit in 32 bits. Rounding
costs 3e-8 of the result's mean square for normally distributed values, a third of what a float16 cache costs.

Words are multiplied in pairs, of dimensions in the first product, and of keys in the second:

    q        [rows / ROWS][padded / 2][ROWS][2], then the scales f32 [16] of these rows
    keys     [KEYS / 16][pairs of dimensions][16 keys][2], dimensions being rounded up to 32
    values   [padded / 16][KEYS / 2][16 dimensions][2]
    weights  [rows][KEYS], in the first half of a row of scores; then, at SCALE, its scale f32

A vector that is not finite gets the scale NaN.
"""

import math

from llvmlite import ir
from numba import float32, int64

from localllm.kernels import simd
from localllm.kernels.cpu import ATTEND_KEYS as KEYS
from localllm.kernels.cpu.attention.products import ManyRowProducts, compute_query_scale, find_row, pad_to_16
from localllm.kernels.cpu.matmul.tiles_f32 import (
    COLUMNS,
    ROWS,
    get_tuple_type,
    make_join,
    make_load,
    make_splats,
    make_store,
    make_store_sums_by_four,
    make_zeros,
)
from localllm.kernels.cpu.signature import device, inlined, load_argument
from localllm.kernels.table import ATTEND

LARGEST, TINY = float32(32767.0), float32(1e-30)
STRIDE, SCALE, WIDTH = KEYS * 4, KEYS * 2, 16 * COLUMNS  # bytes of a row of scores; offset in it; columns of a tile
interleave_words = simd.operation(simd.f32x16, simd.i32x16, simd.i32x16)(simd.pack_pairs)


@simd.operation(simd.i32x16, simd.f32x16)
def round_to_i32x16(builder, value):
    arguments = [value, ir.Constant(simd.i32x16.llvm, None), simd.I16(-1), simd.I32(4)]  # all lanes, to nearest
    return simd.llvm_call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", simd.i32x16.llvm, arguments)


def make_outer(rows, columns):
    """Return the intrinsic of tiles_f32.make_outer for vectors of pairs of words, and sums in 32-bit integers.

    All vectors have the type float32.
    """
    tile_type = get_tuple_type(rows * columns)

    @simd.operation(tile_type, tile_type, get_tuple_type(rows), get_tuple_type(columns))
    def outer(builder, tile, x, w):
        tile, w = simd.elements(builder, tile), simd.elements(builder, w)
        for r, value in enumerate(simd.elements(builder, x)):
            for c in range(columns):
                i = r * columns + c
                total = builder.bitcast(tile[i], simd.i32x16.llvm)
                tile[i] = builder.bitcast(simd.dot_words_vnni_512(builder, total, value, w[c]), simd.f32x16.llvm)
        return simd.as_tuple(builder, tile)

    return outer


def make_add_scaled(rows, columns):
    """Return an intrinsic (total, tile, x, w) -> total + the integers of the tile * x[row] * w[column]."""
    tile_type = get_tuple_type(rows * columns)

    @simd.operation(tile_type, tile_type, tile_type, get_tuple_type(rows), get_tuple_type(columns))
    def add_scaled(builder, total, tile, x, w):
        total, tile, w = (simd.elements(builder, each) for each in (total, tile, w))
        for r, value in enumerate(simd.elements(builder, x)):
            for c in range(columns):
                i = r * columns + c
                whole = builder.sitofp(builder.bitcast(tile[i], simd.i32x16.llvm), simd.f32x16.llvm)
                total[i] = simd.multiply_add(builder, builder.fmul(whole, value), w[c], total[i])
        return simd.as_tuple(builder, total)

    return add_scaled


@device
def store_scales(squares, scales, inverses):
    """Store 16 vectors' scales and their inverses, from the sums of their squares; a sum of 0 counts as TINY."""
    norm = simd.sqrt_f32x16(simd.max_f32x16(simd.splat_f32x16(TINY), simd.load_f32x16(squares)))
    simd.store_f32x16(scales, norm * simd.splat_f32x16(float32(1.0) / LARGEST))
    simd.store_f32x16(inverses, simd.splat_f32x16(LARGEST) * simd.reciprocal_f32x16(norm))


@simd.operation(None, int64, simd.i32x16)
def store_pairs(builder, address, value):
    """Store 16 integers as pairs of words, one in each of 8 rows of a tile of q."""
    words = builder.bitcast(builder.trunc(value, ir.VectorType(simd.I16, 16)), ir.VectorType(simd.I32, 8))
    for i in range(8):
        place = builder.add(address, simd.I64(i * ROWS * 4))
        simd.store_value(builder, place, builder.extract_element(words, simd.I32(i)))


@device
def load_queries(a, first, rows, group, kv_head, key_dim, q):
    head_dim, scale = load_argument(a, ATTEND.key_dim), compute_query_scale(a)
    for r in range(rows):
        source = find_row(
            load_argument(a, ATTEND.q), load_argument(a, ATTEND.q_stride), first + r, group, kv_head, head_dim
        )
        squares, tile = simd.zero_f32x16(), q + r // ROWS * (key_dim * 2 * ROWS + 64)
        for d in range(0, key_dim, 16):
            x = simd.load_lanes_f32x16(source + d * 4, head_dim - d)
            squares = simd.fma_f32x16(x, x, squares)
        total = simd.sum_f32x16(squares)
        norm = math.sqrt(TINY if total < TINY else total)
        simd.store_f32(tile + key_dim * 2 * ROWS + r % ROWS * 4, norm * scale / LARGEST)
        for d in range(0, key_dim, 16):
            x = simd.load_lanes_f32x16(source + d * 4, head_dim - d) * simd.splat_f32x16(LARGEST / norm)
            store_pairs(tile + (d // 2 * ROWS + r % ROWS) * 4, round_to_i32x16(x))


def make_square(load):
    """Build a function that squares 16 vectors, `apart` bytes from each other, and stores their sums of squares."""

    join, store_sums = make_join(4), make_store_sums_by_four(4)

    @inlined
    def square_four(x, apart, padded):
        s0, s1, s2, s3 = simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16()
        for d in range(0, padded, 16):
            x0, x1, x2, x3 = load(x, d), load(x + apart, d), load(x + 2 * apart, d), load(x + 3 * apart, d)
            s0, s1 = simd.fma_f32x16(x0, x0, s0), simd.fma_f32x16(x1, x1, s1)
            s2, s3 = simd.fma_f32x16(x2, x2, s2), simd.fma_f32x16(x3, x3, s3)
        return s0, s1, s2, s3

    @device
    def square(x, apart, padded, sums):
        s0, s1 = square_four(x, 4 * apart, padded), square_four(x + apart, 4 * apart, padded)
        s2, s3 = square_four(x + 2 * apart, 4 * apart, padded), square_four(x + 3 * apart, 4 * apart, padded)
        store_sums(join(s0, s1, s2, s3), sums, 16)

    return square


def make_pack_keys(load):
    square = make_square(load)

    @device
    def pack_keys(keys, count, token_bytes, padded, tiles, scales):
        wide, inverses, sums = (padded + 31) // 32 * 32, scales + KEYS * 4, scales + KEYS * 8
        rows = sums + 64  # of 16 keys
        for i in range(0, count, 16):
            square(keys + i * token_bytes, token_bytes, padded, sums)
            store_scales(sums, scales + i * 4, inverses + i * 4)
            for t in range(16):
                key, row = keys + (i + t) * token_bytes, rows + t * wide * 2
                inverse = simd.splat_f32x16(simd.load_f32(inverses + (i + t) * 4))
                for d in range(0, padded, 16):
                    simd.store_words_i32x16(row + d * 2, round_to_i32x16(load(key, d) * inverse))
                if padded < wide:
                    simd.store_words_i32x16(row + padded * 2, simd.splat_i32x16(0))
            for d in range(0, wide, 32):
                simd.transpose_f32(rows + d * 2, wide * 2, tiles + (i * wide + d * 16) * 2)

    return pack_keys


def make_pack_values(load):
    @device
    def pack_values(values, count, token_bytes, padded, tiles, scales):
        inverses = scales + padded * 4
        for d in range(0, padded, 16):
            sums, target = simd.zero_f32x16(), tiles + d * KEYS * 2
            for i in range(count):
                x = load(values + i * token_bytes, d)
                sums = simd.fma_f32x16(x, x, sums)
            simd.store_f32x16(inverses, sums)
            store_scales(inverses, scales + d * 4, inverses)
            inverse = simd.load_f32x16(inverses)
            for i in range(0, count, 2):
                value = values + i * token_bytes
                x, y = round_to_i32x16(load(value, d) * inverse), simd.splat_i32x16(0)
                if i + 1 < count:
                    y = round_to_i32x16(load(value + token_bytes, d) * inverse)
                simd.store_f32x16(target + i * 32, interleave_words(x, y))

    return pack_values


@device
def load_weights(row, i):
    return simd.load_f32x16(row + i * 4)


square_weights = make_square(load_weights)


@device
def pack_weights(weights, rows, count, sums):
    """Pack rows of weights in place; sums: temporary memory, f32 [48]."""
    scales, inverses = sums + 64, sums + 128
    for r in range(0, rows, 16):
        square_weights(weights + r * STRIDE, STRIDE, count, sums)
        store_scales(sums, scales, inverses)
        for t in range(min(16, rows - r)):
            row, inverse = weights + (r + t) * STRIDE, simd.splat_f32x16(simd.load_f32(inverses + t * 4))
            for i in range(0, count, 16):
                simd.store_words_i32x16(row + i * 2, round_to_i32x16(load_weights(row, i) * inverse))
            simd.store_f32(row + SCALE, simd.load_f32(scales + t * 4))


def make_add_tile(columns):
    """Build a function that adds the product of weights and values to a tile of the output."""
    zeros, outer, add_scaled = make_zeros(ROWS * columns), make_outer(ROWS, columns), make_add_scaled(ROWS, columns)
    load_tile, store_tile = make_load(ROWS, columns), make_store(ROWS, columns)
    splats, load_columns = make_splats(ROWS, STRIDE), make_load(1, columns)

    @device
    def add_tile(w, v, pairs, scales, y, row_bytes):
        tile = zeros()
        for i in range(pairs):
            tile = outer(tile, splats(w + i * 4), load_columns(v + i * 64, 0, KEYS * 32))
        total, w_scales = load_tile(y, row_bytes, 64), splats(w + SCALE)
        store_tile(add_scaled(total, tile, w_scales, load_columns(scales, 0, 64)), y, row_bytes, 64)

    return add_tile


def make_many(load_key, load_value):
    zeros, outer, add_scaled = make_zeros(ROWS * COLUMNS), make_outer(ROWS, COLUMNS), make_add_scaled(ROWS, COLUMNS)
    store_tile, load_columns, splats = make_store(ROWS, COLUMNS), make_load(1, COLUMNS), make_splats(ROWS, 4)
    add_tile, add_column = make_add_tile(COLUMNS), make_add_tile(1)
    pack_keys, pack_values = make_pack_keys(load_key), make_pack_values(load_value)

    @device
    def compute_scores(q, rows, keys, count, token_bytes, padded, tiles, scores):
        """Compute scores f32 [rows][KEYS]. Up to 15 keys beyond `count` are read, too."""
        wide = (padded + 31) // 32 * 32
        scales = tiles + KEYS * wide * 2
        pack_keys(keys, count, token_bytes, padded, tiles, scales)
        for i in range(0, count, WIDTH):
            w_scales = load_columns(scales + i * 4, 0, 64)
            for r in range(0, rows, ROWS):
                x, w, tile = q + r // ROWS * (padded * 2 * ROWS + 64), tiles + i * wide * 2, zeros()
                for d in range(padded // 2):
                    tile = outer(tile, splats(x + d * ROWS * 4), load_columns(w + d * 64, 0, wide * 32))
                scaled = add_scaled(zeros(), tile, splats(x + padded * 2 * ROWS), w_scales)
                store_tile(scaled, scores + (r * KEYS + i) * 4, STRIDE, 64)

    @device
    def add_values(weights, rows, values, count, token_bytes, padded, tiles, output):
        scales, row_bytes = tiles + KEYS * padded * 2, padded * 4
        pack_weights(weights, rows, pad_to_16(count), scales)
        pack_values(values, count, token_bytes, padded, tiles, scales)
        for d in range(0, padded, WIDTH):
            for r in range(0, rows, ROWS):
                w, v, y = weights + r * STRIDE, tiles + d * KEYS * 2, output + (r * padded + d) * 4
                if d + 16 < padded:
                    add_tile(w, v, (count + 1) // 2, scales + d * 4, y, row_bytes)
                else:
                    add_column(w, v, (count + 1) // 2, scales + d * 4, y, row_bytes)

    return compute_scores, add_values


IN_WORDS = ManyRowProducts(make_many, load_queries, device(lambda tiles: None), device(lambda: None), 0)
