"""Operations that process each token independently, and sums over tokens.

Rows of activations, norms and biases are padded to a multiple of 16 columns, and the padding has arbitrary values. A
stride may be longer than that, but only the columns and their padding are touched. The group of a norm need not have a
multiple of 16 columns, and y may be x, so no memory outside of the group is touched.
"""

from math import cos, sin, sqrt

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, kernel, load_argument, load_argument_f32
from localllm.kernels.table import (
    ADD_EXPERT_SQUARES,
    ADD_SQUARES,
    ANGLES,
    AS_COLUMN,
    CONCAT_HEADS,
    EXPERT,
    HADAMARD,
    HASH,
    LAYER_NORM,
    LOGITS,
    POOL,
    REPLACE_IDS,
    RMS_NORM,
    ROPE,
    ROUND_BF16,
    SELECT,
    SEQUENCE,
    SLICE_COLUMNS,
)


@kernel
def round_bf16(a, part, parts, thread):
    stride, y_stride = load_argument(a, ROUND_BF16.stride), load_argument(a, ROUND_BF16.y_stride)
    tokens, columns = simd.load_i64(load_argument(a, ROUND_BF16.count)), load_argument(a, ROUND_BF16.columns)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = load_argument(a, ROUND_BF16.x) + t * stride, load_argument(a, ROUND_BF16.y) + t * y_stride
        for i in range(0, columns, 16):
            simd.store_bf16x16(y + i * 2, simd.load_f32x16(x + i * 4))


@kernel
def select(a, part, parts, thread):
    stride, columns = load_argument(a, SELECT.stride), load_argument(a, SELECT.columns)
    count = simd.load_i64(load_argument(a, SELECT.count))
    for t in range(count * part // parts, count * (part + 1) // parts):
        row = simd.load_i64(load_argument(a, SELECT.rows) + t * 8)
        x, y = load_argument(a, SELECT.x) + row * stride, load_argument(a, SELECT.y) + t * stride
        for i in range(0, columns * 4, 64):
            simd.store_f32x16(y + i, simd.load_f32x16(x + i))


@kernel
def replace_ids(a, part, parts, thread):
    table, ids, count = (
        load_argument(a, REPLACE_IDS.table),
        load_argument(a, REPLACE_IDS.ids),
        load_argument(a, REPLACE_IDS.count),
    )
    tokens = simd.load_i64(count)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        simd.store_i64(load_argument(a, REPLACE_IDS.y) + t * 8, simd.load_i64(table + simd.load_i64(ids + t * 8) * 8))


@device
def copy(x, y, columns):
    """Copy exactly `columns` values, without their padding."""
    for i in range(0, columns - 15, 16):
        simd.store_f32x16(y + i * 4, simd.load_f32x16(x + i * 4))
    for i in range(columns // 16 * 16, columns):
        simd.store_f32(y + i * 4, simd.load_f32(x + i * 4))


@kernel
def slice_columns(a, part, parts, thread):
    tokens, groups = simd.load_i64(load_argument(a, SLICE_COLUMNS.count)), load_argument(a, SLICE_COLUMNS.groups)
    count = load_argument(a, SLICE_COLUMNS.columns) // groups
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x = (
            load_argument(a, SLICE_COLUMNS.x)
            + t * load_argument(a, SLICE_COLUMNS.x_stride)
            + load_argument(a, SLICE_COLUMNS.first) * 4
        )
        y = load_argument(a, SLICE_COLUMNS.y) + t * load_argument(a, SLICE_COLUMNS.stride)
        for g in range(groups):
            copy(x + g * load_argument(a, SLICE_COLUMNS.period) * 4, y + g * count * 4, count)


@kernel
def concat_heads(a, part, parts, thread):
    tokens, heads = simd.load_i64(load_argument(a, CONCAT_HEADS.count)), load_argument(a, CONCAT_HEADS.heads)
    shared = load_argument(a, CONCAT_HEADS.shared)
    x_columns, z_columns = load_argument(a, CONCAT_HEADS.x_columns), load_argument(a, CONCAT_HEADS.z_columns)
    for i in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
        t, head = i // heads, i % heads
        x = load_argument(a, CONCAT_HEADS.x) + t * load_argument(a, CONCAT_HEADS.x_stride) + head * x_columns * 4
        z = (
            load_argument(a, CONCAT_HEADS.z)
            + t * load_argument(a, CONCAT_HEADS.z_stride)
            + (0 if shared == 1 else head * z_columns * 4)
        )
        y = (
            load_argument(a, CONCAT_HEADS.y)
            + t * load_argument(a, CONCAT_HEADS.stride)
            + head * (x_columns + z_columns) * 4
        )
        copy(x, y, x_columns)
        copy(z, y + x_columns * 4, z_columns)


@kernel
def angles(a, part, parts, thread):
    pairs, factor = load_argument(a, ANGLES.pairs), load_argument_f32(a, ANGLES.factor)
    tokens = simd.load_i64(load_argument(a, ANGLES.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        position = float(simd.load_i64(load_argument(a, ANGLES.positions) + t * 8) - load_argument(a, ANGLES.before))
        table = load_argument(a, ANGLES.table) + t * pairs * 8
        for i in range(pairs):
            angle = position * simd.load_f64(load_argument(a, ANGLES.frequencies) + i * 8)
            simd.store_f32(table + i * 4, float32(cos(angle)) * factor)
            simd.store_f32(table + (pairs + i) * 4, float32(sin(angle)) * factor)


@device
def rotate(x, y, cosine, sine):
    u, v = simd.load_f32(x), simd.load_f32(y)
    simd.store_f32(x, u * cosine - v * sine)
    simd.store_f32(y, u * sine + v * cosine)


@kernel
def rope(a, part, parts, thread):
    heads, head_dim, pairs = load_argument(a, ROPE.heads), load_argument(a, ROPE.head_dim), load_argument(a, ROPE.pairs)
    step, apart = load_argument(a, ROPE.step) * 4, load_argument(a, ROPE.apart) * 4
    total = simd.load_i64(load_argument(a, ROPE.count)) * heads
    for i in range(total * part // parts, total * (part + 1) // parts):
        table = load_argument(a, ROPE.table) + i // heads * pairs * 8
        head = i // heads * load_argument(a, ROPE.stride) + i % heads * head_dim * 4
        x, y = load_argument(a, ROPE.x) + head, load_argument(a, ROPE.y) + head
        if x != y:  # rotating in place after a copy is a fifth faster than rotating from x to y
            copy(x, y, head_dim)
        for k in range(pairs):
            first = y + k * step
            rotate(first, first + apart, simd.load_f32(table + k * 4), simd.load_f32(table + (pairs + k) * 4))


@device
def sum_values(x, count):
    sums, whole = simd.zero_f32x16(), count // 16 * 16
    for i in range(0, whole, 16):
        sums = sums + simd.load_f32x16(x + i * 4)
    total = simd.sum_f32x16(sums)
    for i in range(whole, count):
        total += simd.load_f32(x + i * 4)
    return total


@device
def sum_squares(x, count, center):
    squares, whole = simd.zero_f32x16(), count // 16 * 16
    for i in range(0, whole, 16):
        v = simd.load_f32x16(x + i * 4) - simd.splat_f32x16(center)
        squares = simd.fma_f32x16(v, v, squares)
    total = simd.sum_f32x16(squares)
    for i in range(whole, count):
        v = simd.load_f32(x + i * 4) - center
        total += v * v
    return total


@device
def compute_inverse_root(mean, epsilon):
    """Compute 1 / sqrt(mean + epsilon); NaN if the sum of squares has exceeded float32."""
    return float32(1.0) / float32(sqrt(mean + epsilon)) if mean < simd.INFINITY else simd.NAN


@kernel
def rms_norm(a, part, parts, thread):
    stride, columns, group = (
        load_argument(a, RMS_NORM.stride),
        load_argument(a, RMS_NORM.columns),
        load_argument(a, RMS_NORM.group),
    )
    groups, epsilon = columns // group, load_argument_f32(a, RMS_NORM.epsilon)
    total, whole = simd.load_i64(load_argument(a, RMS_NORM.count)) * groups, group // 16 * 16
    for i in range(total * part // parts, total * (part + 1) // parts):
        at, first = i // groups * stride + i % groups * group * 4, i % groups * group * 4
        x, y, weight = (
            load_argument(a, RMS_NORM.x) + at,
            load_argument(a, RMS_NORM.y) + at,
            load_argument(a, RMS_NORM.weight) + first,
        )
        scale = compute_inverse_root(sum_squares(x, group, float32(0.0)) / float32(group), epsilon)
        for k in range(0, whole * 4, 64):
            simd.store_f32x16(y + k, simd.load_f32x16(x + k) * simd.splat_f32x16(scale) * simd.load_f32x16(weight + k))
        for k in range(whole * 4, group * 4, 4):
            simd.store_f32(y + k, simd.load_f32(x + k) * scale * simd.load_f32(weight + k))


@kernel
def layer_norm(a, part, parts, thread):
    stride, group = load_argument(a, LAYER_NORM.stride), load_argument(a, LAYER_NORM.group)
    groups, epsilon = load_argument(a, LAYER_NORM.columns) // group, load_argument_f32(a, LAYER_NORM.epsilon)
    total, whole = simd.load_i64(load_argument(a, LAYER_NORM.count)) * groups, group // 16 * 16
    for i in range(total * part // parts, total * (part + 1) // parts):
        first = i % groups * group * 4
        at, weight = i // groups * stride + first, load_argument(a, LAYER_NORM.weight) + first
        x, y = load_argument(a, LAYER_NORM.x) + at, load_argument(a, LAYER_NORM.y) + at
        bias = load_argument(a, LAYER_NORM.bias) + first
        mean = sum_values(x, group) / float32(group)
        scale = compute_inverse_root(sum_squares(x, group, mean) / float32(group), epsilon)
        for k in range(0, whole * 4, 64):
            v = (simd.load_f32x16(x + k) - simd.splat_f32x16(mean)) * simd.splat_f32x16(scale)
            simd.store_f32x16(y + k, simd.fma_f32x16(v, simd.load_f32x16(weight + k), simd.load_f32x16(bias + k)))
        for k in range(whole * 4, group * 4, 4):
            simd.store_f32(
                y + k, (simd.load_f32(x + k) - mean) * scale * simd.load_f32(weight + k) + simd.load_f32(bias + k)
            )


# ---- orthonormal Hadamard matrices, by the fast Walsh-Hadamard transform. Its butterflies replace two values 1, 2, 4,
# ... apart by their sum and difference. The matrix is its own inverse.

butterfly_1, butterfly_2, butterfly_4, butterfly_8 = map(simd.make_butterfly, (1, 2, 4, 8))


@device
def transform_within_vectors(x, y, columns, block, factor):
    """Write x times `factor` to y, which may be x, with the butterflies of values up to 8 apart.

    These values are in one vector.
    """
    for i in range(0, columns * 4, 64):
        lanes = butterfly_1(simd.load_f32x16(x + i) * simd.splat_f32x16(factor))
        if block > 2:
            lanes = butterfly_2(lanes)
        if block > 4:
            lanes = butterfly_4(lanes)
        if block > 8:
            lanes = butterfly_8(lanes)
        simd.store_f32x16(y + i, lanes)


@device
def transform_across_vectors(y, columns, distance):
    """Compute the butterflies of values that are `distance` apart, a multiple of 16, in place."""
    for first in range(0, columns, 2 * distance):
        for i in range(first * 4, (first + distance) * 4, 64):
            u, v = simd.load_f32x16(y + i), simd.load_f32x16(y + i + distance * 4)
            simd.store_f32x16(y + i, u + v)
            simd.store_f32x16(y + i + distance * 4, u - v)


@kernel
def hadamard(a, part, parts, thread):
    columns, block = load_argument(a, HADAMARD.columns), load_argument(a, HADAMARD.block)
    factor, tokens = float32(1.0 / sqrt(block)), simd.load_i64(load_argument(a, HADAMARD.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x = load_argument(a, HADAMARD.x) + t * load_argument(a, HADAMARD.stride)
        y = load_argument(a, HADAMARD.y) + t * load_argument(a, HADAMARD.stride)
        transform_within_vectors(x, y, columns, block, factor)
        distance = 16
        while distance < block:
            transform_across_vectors(y, columns, distance)
            distance *= 2


@kernel
def as_column(a, part, parts, thread):
    ids, tokens = load_argument(a, AS_COLUMN.ids), simd.load_i64(load_argument(a, AS_COLUMN.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        simd.store_f32(
            load_argument(a, AS_COLUMN.y) + t * load_argument(a, AS_COLUMN.stride),
            float32(simd.load_i64(ids + t * 8) + 1),
        )


@kernel
def hash(a, part, parts, thread):
    end, factors, tokens = (
        load_argument(a, HASH.end),
        load_argument(a, HASH.factors),
        simd.load_i64(load_argument(a, HASH.count)),
    )
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        row, hashed, is_cut = load_argument(a, HASH.x) + t * load_argument(a, HASH.stride), 0, False
        for i in range(load_argument(a, HASH.length)):
            token = int(simd.load_f32(row + i * 4)) - 1
            is_cut = is_cut or (i > 0 and (token < 0 or token == end))
            hashed ^= (end if is_cut else token) * simd.load_i64(factors + i * 8)
        simd.store_i64(
            load_argument(a, HASH.y) + t * 8, hashed % load_argument(a, HASH.size) + load_argument(a, HASH.first)
        )


@device
def copy_logits(x, y, columns):
    """Copy x to y; return 0 if all values are finite, else NaN: the sum of 0 * value.

    Python would do this after the run, in one thread, when the values are no longer in the cores' caches: 49152 logits
    took 0.2 ms, this takes 0.02.
    """
    zeros = simd.zero_f32x16()
    for i in range(0, columns - 15, 16):
        numbers = simd.load_f32x16(x + i * 4)
        simd.store_f32x16(y + i * 4, numbers)
        zeros = simd.fma_f32x16(numbers, simd.zero_f32x16(), zeros)
    zero = simd.sum_f32x16(zeros)
    for i in range(columns // 16 * 16, columns):
        simd.store_f32(y + i * 4, simd.load_f32(x + i * 4))
        zero += simd.load_f32(x + i * 4) * 0
    return zero


@kernel
def logits(a, part, parts, thread):
    """Copy x to y, and count a flaw if a value is not finite. The parts share the columns."""
    columns, target = load_argument(a, LOGITS.columns), simd.load_i64(load_argument(a, LOGITS.y))
    first, last = columns * part // parts, columns * (part + 1) // parts
    for t in range(simd.load_i64(load_argument(a, LOGITS.count))):
        x, y = load_argument(a, LOGITS.x) + t * load_argument(a, LOGITS.stride), target + t * columns * 4
        if copy_logits(x + first * 4, y + first * 4, last - first) != 0:
            simd.atomic_add(load_argument(a, LOGITS.flaws), 1)


@device
def add_four(x, stride, tokens, sums):
    """Add x^2 over the tokens to the sums of 64 columns. Four independent sums hide the latency of each."""
    s0, s1 = simd.load_f32x16(sums), simd.load_f32x16(sums + 64)
    s2, s3 = simd.load_f32x16(sums + 128), simd.load_f32x16(sums + 192)
    for _ in range(tokens):
        v0, v1, v2 = simd.load_f32x16(x), simd.load_f32x16(x + 64), simd.load_f32x16(x + 128)
        v3 = simd.load_f32x16(x + 192)
        s0, s1 = simd.fma_f32x16(v0, v0, s0), simd.fma_f32x16(v1, v1, s1)
        s2, s3 = simd.fma_f32x16(v2, v2, s2), simd.fma_f32x16(v3, v3, s3)
        x += stride
    simd.store_f32x16(sums, s0)
    simd.store_f32x16(sums + 64, s1)
    simd.store_f32x16(sums + 128, s2)
    simd.store_f32x16(sums + 192, s3)


@device
def add_one(x, stride, tokens, sums):
    total = simd.load_f32x16(sums)
    for _ in range(tokens):
        v = simd.load_f32x16(x)
        total = simd.fma_f32x16(v, v, total)
        x += stride
    simd.store_f32x16(sums, total)


@device
def add_columns(x, stride, tokens, columns, sums, part, parts):
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

    The parts share the columns, so their count does not change the result.
    """
    tokens, stride = simd.load_i64(load_argument(a, ADD_SQUARES.count)), load_argument(a, ADD_SQUARES.stride)
    x, sums = load_argument(a, ADD_SQUARES.x), load_argument(a, ADD_SQUARES.sums)
    add_columns(x, stride, tokens, load_argument(a, ADD_SQUARES.columns), sums, part, parts)


@kernel
def add_expert_squares(a, part, parts, thread):
    x, stride = load_argument(a, ADD_EXPERT_SQUARES.x), load_argument(a, ADD_EXPERT_SQUARES.stride)
    columns, sums = load_argument(a, ADD_EXPERT_SQUARES.columns), load_argument(a, ADD_EXPERT_SQUARES.sums)
    for i in range(simd.load_i64(load_argument(a, ADD_EXPERT_SQUARES.active_count))):
        expert = load_argument(a, ADD_EXPERT_SQUARES.active) + i * 8 * len(EXPERT)
        number, rows = load_argument(expert, EXPERT.number), load_argument(expert, EXPERT.count)
        expert_sums = sums + number * load_argument(a, ADD_EXPERT_SQUARES.sums_stride)
        add_columns(x + load_argument(expert, EXPERT.first) * stride, stride, rows, columns, expert_sums, part, parts)
        if part == 0:
            place = load_argument(a, ADD_EXPERT_SQUARES.counts) + number * 8
            simd.store_i64(place, simd.load_i64(place) + rows)


@device
def add_rows(x, stride, columns, rows, y):
    for i in range(0, columns * 4, 64):
        total = simd.load_f32x16(x + i)
        for r in range(1, rows):
            total = total + simd.load_f32x16(x + r * stride + i)
        simd.store_f32x16(y + i, total)


@kernel
def pool(a, part, parts, thread):
    count, stride, columns = (
        simd.load_i64(load_argument(a, POOL.count)),
        load_argument(a, POOL.stride),
        load_argument(a, POOL.columns),
    )
    for i in range(count * part // parts, count * (part + 1) // parts):
        sequence, y = load_argument(a, POOL.sequences) + i * 8 * len(SEQUENCE), load_argument(a, POOL.y) + i * stride
        first, rows = load_argument(sequence, SEQUENCE.first), load_argument(sequence, SEQUENCE.count)
        if load_argument(a, POOL.kind) != 0:
            first, rows = first + (rows - 1 if load_argument(a, POOL.kind) == 2 else 0), 1
        add_rows(load_argument(a, POOL.x) + first * stride, stride, columns, rows, y)
        scale = simd.splat_f32x16(float32(1.0) / float32(rows))
        for k in range(0, columns * 4, 64):
            simd.store_f32x16(y + k, simd.load_f32x16(y + k) * scale)
