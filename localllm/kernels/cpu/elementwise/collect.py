"""Sums over tokens: pooled embeddings, and squares per column for importance matrices (quantizing/imatrix.py)."""

from numba import float32

from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import fma_f32x16, load_f32x16, load_i64, splat_f32x16, store_f32x16, store_i64
from localllm.kernels.table import ADD_EXPERT_SQUARES, ADD_SQUARES, EXPERT, POOL, SEQUENCE


@device
def add_four(x, stride, tokens, sums):
    """Add x^2 over the tokens to the sums of 64 columns. Four independent sums hide the latency of each."""
    s0, s1 = load_f32x16(sums), load_f32x16(sums + 64)
    s2, s3 = load_f32x16(sums + 128), load_f32x16(sums + 192)
    for _ in range(tokens):
        v0, v1, v2, v3 = load_f32x16(x), load_f32x16(x + 64), load_f32x16(x + 128), load_f32x16(x + 192)
        s0, s1 = fma_f32x16(v0, v0, s0), fma_f32x16(v1, v1, s1)
        s2, s3 = fma_f32x16(v2, v2, s2), fma_f32x16(v3, v3, s3)
        x += stride
    store_f32x16(sums, s0)
    store_f32x16(sums + 64, s1)
    store_f32x16(sums + 128, s2)
    store_f32x16(sums + 192, s3)


@device
def add_one(x, stride, tokens, sums):
    """Add x^2 over the tokens to the sums of 16 columns."""
    total = load_f32x16(sums)
    for _ in range(tokens):
        v = load_f32x16(x)
        total = fma_f32x16(v, v, total)
        x += stride
    store_f32x16(sums, total)


@device
def add_columns(x, stride, tokens, columns, sums, part, parts):
    """Add x^2 over the tokens to the sums of those columns that this part is responsible for."""
    vectors = (columns + 15) // 16
    first, last = vectors * part // parts, vectors * (part + 1) // parts
    rest = last - (last - first) % 4
    for i in range(first, rest, 4):
        add_four(x + i * 64, stride, tokens, sums + i * 64)
    for i in range(rest, last):
        add_one(x + i * 64, stride, tokens, sums + i * 64)


@kernel
def add_squares(a, part, parts, thread):
    """Add x^2 over the tokens to the sums.

    The parts share the columns, so the result does not depend on the number of parts.
    """
    tokens, stride = load_i64(argument(a, ADD_SQUARES.count)), argument(a, ADD_SQUARES.stride)
    x, sums = argument(a, ADD_SQUARES.x), argument(a, ADD_SQUARES.sums)
    add_columns(x, stride, tokens, argument(a, ADD_SQUARES.columns), sums, part, parts)


@kernel
def add_expert_squares(a, part, parts, thread):
    """Add x^2 over each expert's rows to the expert's sums, and the number of these rows to its count."""
    x, stride = argument(a, ADD_EXPERT_SQUARES.x), argument(a, ADD_EXPERT_SQUARES.stride)
    columns, sums = argument(a, ADD_EXPERT_SQUARES.columns), argument(a, ADD_EXPERT_SQUARES.sums)
    for i in range(load_i64(argument(a, ADD_EXPERT_SQUARES.active_count))):
        expert = argument(a, ADD_EXPERT_SQUARES.active) + i * 8 * len(EXPERT)
        number, rows = argument(expert, EXPERT.number), argument(expert, EXPERT.count)
        expert_sums = sums + number * argument(a, ADD_EXPERT_SQUARES.sums_stride)
        add_columns(x + argument(expert, EXPERT.first) * stride, stride, rows, columns, expert_sums, part, parts)
        if part == 0:
            place = argument(a, ADD_EXPERT_SQUARES.counts) + number * 8
            store_i64(place, load_i64(place) + rows)


@device
def add_rows(x, stride, columns, rows, y):
    """Store the sum of `rows` rows at y, float32 [columns padded to 16]."""
    for i in range(0, columns * 4, 64):
        total = load_f32x16(x + i)
        for r in range(1, rows):
            total = total + load_f32x16(x + r * stride + i)
        store_f32x16(y + i, total)


@kernel
def pool(a, part, parts, thread):
    """Pool the rows of each sequence to one row: their mean, the first or the last."""
    count, stride, columns = load_i64(argument(a, POOL.count)), argument(a, POOL.stride), argument(a, POOL.columns)
    for i in range(count * part // parts, count * (part + 1) // parts):
        sequence, y = argument(a, POOL.sequences) + i * 8 * len(SEQUENCE), argument(a, POOL.y) + i * stride
        first, rows = argument(sequence, SEQUENCE.first), argument(sequence, SEQUENCE.count)
        if argument(a, POOL.kind) != 0:
            first, rows = first + (rows - 1 if argument(a, POOL.kind) == 2 else 0), 1
        add_rows(argument(a, POOL.x) + first * stride, stride, columns, rows, y)
        scale = splat_f32x16(float32(1.0) / float32(rows))
        for k in range(0, columns * 4, 64):
            store_f32x16(y + k, load_f32x16(y + k) * scale)
