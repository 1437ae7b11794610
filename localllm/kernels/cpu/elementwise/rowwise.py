"""Operations between the matrix products that treat tokens one by one.

Rows of activations, norms and biases are padded to a multiple of 16 columns, and the padding has no meaning. A stride
may be longer than that, but only the columns and their padding are touched.
"""

from math import cos, sin

from numba import float32

from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.simd import (
    load_f32,
    load_f32x16,
    load_f64,
    load_i64,
    store_bf16x16,
    store_f32,
    store_f32x16,
    store_i64,
)
from localllm.kernels.table import (
    ANGLES,
    CONCAT_HEADS,
    REPLACE_IDS,
    ROPE,
    ROUND_BF16,
    SELECT,
    SLICE_COLUMNS,
)


@kernel
def round_bf16(a, part, parts, thread):
    """Write x, rounded to BF16, to y."""
    stride, y_stride = argument(a, ROUND_BF16.stride), argument(a, ROUND_BF16.y_stride)
    tokens, columns = load_i64(argument(a, ROUND_BF16.count)), argument(a, ROUND_BF16.columns)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x, y = argument(a, ROUND_BF16.x) + t * stride, argument(a, ROUND_BF16.y) + t * y_stride
        for i in range(0, columns, 16):
            store_bf16x16(y + i * 2, load_f32x16(x + i * 4))


@kernel
def select(a, part, parts, thread):
    """Copy row rows[i] of x to row i of y."""
    stride, columns = argument(a, SELECT.stride), argument(a, SELECT.columns)
    count = load_i64(argument(a, SELECT.count))
    for t in range(count * part // parts, count * (part + 1) // parts):
        row = load_i64(argument(a, SELECT.rows) + t * 8)
        x, y = argument(a, SELECT.x) + row * stride, argument(a, SELECT.y) + t * stride
        for i in range(0, columns * 4, 64):
            store_f32x16(y + i, load_f32x16(x + i))


@kernel
def replace_ids(a, part, parts, thread):
    """Write table[ids[t]] to y[t]."""
    table, ids, count = argument(a, REPLACE_IDS.table), argument(a, REPLACE_IDS.ids), argument(a, REPLACE_IDS.count)
    tokens = load_i64(count)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        store_i64(argument(a, REPLACE_IDS.y) + t * 8, load_i64(table + load_i64(ids + t * 8) * 8))


@device
def copy(x, y, columns):
    """Copy exactly `columns` numbers, without their padding."""
    for i in range(0, columns - 15, 16):
        store_f32x16(y + i * 4, load_f32x16(x + i * 4))
    for i in range(columns // 16 * 16, columns):
        store_f32(y + i * 4, load_f32(x + i * 4))


@kernel
def slice_columns(a, part, parts, thread):
    """Copy some columns of every period of x to y, see SLICE_COLUMNS in table.py."""
    tokens, groups = load_i64(argument(a, SLICE_COLUMNS.count)), argument(a, SLICE_COLUMNS.groups)
    count = argument(a, SLICE_COLUMNS.columns) // groups
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x = (
            argument(a, SLICE_COLUMNS.x)
            + t * argument(a, SLICE_COLUMNS.x_stride)
            + argument(a, SLICE_COLUMNS.first) * 4
        )
        y = argument(a, SLICE_COLUMNS.y) + t * argument(a, SLICE_COLUMNS.stride)
        for g in range(groups):
            copy(x + g * argument(a, SLICE_COLUMNS.period) * 4, y + g * count * 4, count)


@kernel
def concat_heads(a, part, parts, thread):
    """Write to y, for each head, its columns of x and then its columns of z."""
    tokens, heads, shared = (
        load_i64(argument(a, CONCAT_HEADS.count)),
        argument(a, CONCAT_HEADS.heads),
        argument(a, CONCAT_HEADS.shared),
    )
    x_columns, z_columns = argument(a, CONCAT_HEADS.x_columns), argument(a, CONCAT_HEADS.z_columns)
    for i in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
        t, head = i // heads, i % heads
        x = argument(a, CONCAT_HEADS.x) + t * argument(a, CONCAT_HEADS.x_stride) + head * x_columns * 4
        z = (
            argument(a, CONCAT_HEADS.z)
            + t * argument(a, CONCAT_HEADS.z_stride)
            + (0 if shared == 1 else head * z_columns * 4)
        )
        y = argument(a, CONCAT_HEADS.y) + t * argument(a, CONCAT_HEADS.stride) + head * (x_columns + z_columns) * 4
        copy(x, y, x_columns)
        copy(z, y + x_columns * 4, z_columns)


@kernel
def angles(a, part, parts, thread):
    """Write the cosine and the sine of every position's rotation angles to the table."""
    pairs, factor = argument(a, ANGLES.pairs), argument_f32(a, ANGLES.factor)
    tokens = load_i64(argument(a, ANGLES.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        position = float(load_i64(argument(a, ANGLES.positions) + t * 8) - argument(a, ANGLES.before))
        table = argument(a, ANGLES.table) + t * pairs * 8
        for i in range(pairs):
            angle = position * load_f64(argument(a, ANGLES.frequencies) + i * 8)
            store_f32(table + i * 4, float32(cos(angle)) * factor)
            store_f32(table + (pairs + i) * 4, float32(sin(angle)) * factor)


@device
def rotate(x, y, cosine, sine):
    """Rotate the pair of numbers at addresses x and y by an angle, given by its cosine and sine."""
    u, v = load_f32(x), load_f32(y)
    store_f32(x, u * cosine - v * sine)
    store_f32(y, u * sine + v * cosine)


@kernel
def rope(a, part, parts, thread):
    """Write x with its pairs rotated to y (rotary position embedding)."""
    heads, head_dim, pairs = argument(a, ROPE.heads), argument(a, ROPE.head_dim), argument(a, ROPE.pairs)
    step, apart = argument(a, ROPE.step) * 4, argument(a, ROPE.apart) * 4
    total = load_i64(argument(a, ROPE.count)) * heads
    for i in range(total * part // parts, total * (part + 1) // parts):
        table = argument(a, ROPE.table) + i // heads * pairs * 8
        head = i // heads * argument(a, ROPE.stride) + i % heads * head_dim * 4
        x, y = argument(a, ROPE.x) + head, argument(a, ROPE.y) + head
        if x != y:  # copied first: rotating in place is a fifth faster than from x to y
            copy(x, y, head_dim)
        for k in range(pairs):
            first = y + k * step
            rotate(first, first + apart, load_f32(table + k * 4), load_f32(table + (pairs + k) * 4))
