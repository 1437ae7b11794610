"""Low-rank updates of matrix products: y + scale * (x A^T) B^T, the second product and the sum.

LoRA: Hu et al. 2021, arXiv 2106.09685. B is stored transposed, so that a vector holds 16 columns of y. An update has
few rows, so it is divided by columns of y: for one token as well as for many. The scale is multiplied into x A^T, in
scratch memory; all methods add in the same order.

`adapted_linear` computes a matrix product and its update slice by slice. As separate steps they read and write all of y
twice: adapters of rank 16 on all matrices of a layer took 21 % of the time of prefill (512 tokens, Qwen 0.5B, F16, Zen
4), and take 5 % like this.
"""

from localllm.kernels import simd
from localllm.kernels.cpu import MIN_SLICED_TOKENS, SLICE_UNIT, UPDATE_CALL, UPDATE_SCRATCH
from localllm.kernels.cpu.matmul.matmul_float import PLAIN, make_load_rows
from localllm.kernels.cpu.matmul.tiles_f32 import (
    COLUMNS,
    ROWS,
    make_add,
    make_load,
    make_outer,
    make_splats_apart,
    make_store,
    make_zeros,
)
from localllm.kernels.cpu.signature import device, inlined, kernel, load_argument, load_argument_f32
from localllm.kernels.table import ADAPTED_LINEAR, ADD_LOW_RANK, ADD_SCALED, MAX_ADAPTERS
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR


@device
def load_adapter_scale(t, scales, adapter, pairs, used, rows):
    """Return the adapter's scale for row t of an activation."""
    if pairs != 0:
        t = simd.load_i64(pairs + t * 8) // used
    if rows != 0:
        t = simd.load_i64(rows + t * 8)
    return simd.load_f32(scales + (t * MAX_ADAPTERS + adapter) * 4)


@inlined
def load_row_scale(a, row, t):
    scale = load_adapter_scale(
        t, load_argument(a, row.scales), load_argument(a, row.adapter), load_argument(a, row.pairs), load_argument(a,
        row.used),
        load_argument(a, row.rows),
    )  # fmt: skip
    return scale * load_argument_f32(a, row.factor)


@device
def scale_rows(a, first, rows, scratch):
    """Write `rows` rows of x times their scales to scratch memory; return whether a scale is not 0."""
    rank, x_stride = load_argument(a, ADD_LOW_RANK.rank), load_argument(a, ADD_LOW_RANK.x_stride)
    is_active = False
    for t in range(first, first + rows):
        scale = load_row_scale(a, ADD_LOW_RANK, t)
        x, scaled = load_argument(a, ADD_LOW_RANK.x) + t * x_stride, scratch + (t - first) * padded_bytes(rank)
        is_active = is_active or scale != 0
        factor = simd.splat_f32x16(scale)
        for i in range(0, rank, 16):
            values = simd.load_lanes_f32x16(x + i * 4, min(16, rank - i)) if scale != 0 else simd.zero_f32x16()
            simd.store_f32x16(scaled + i * 4, values * factor)
    return is_active


@inlined
def padded_bytes(rank):
    return (rank + 15) // 16 * 64


def make_add_tile(format_name, rows, columns):
    """Build a function that adds x W to `rows` rows of y, for 16 * `columns` columns."""
    width, _, load_16 = PLAIN[format_name]
    outer, zeros, load_columns = make_outer(rows, columns), make_zeros(rows * columns), make_load_rows(columns, load_16)
    load, store, add_tiles = make_load(rows, columns), make_store(rows, columns), make_add(rows * columns)
    splats = make_splats_apart(rows)

    @inlined
    def add_tile(x, rank, w, row_bytes, y, stride):
        tile, x_stride = zeros(), padded_bytes(rank)
        for r in range(rank):
            tile = outer(tile, splats(x + r * 4, x_stride), load_columns(w + r * row_bytes, 16 * width))
        store(add_tiles(load(y, stride, 64), tile), y, stride, 64)

    return add_tile


def make_add_rows(format_name, rows, columns):
    """Build a function that adds x W to `rows` rows of y, in tiles of 16 * `columns` columns, then of 16."""
    width = PLAIN[format_name][0]
    wide, narrow = (make_add_tile(format_name, rows, count) for count in (columns, 1))

    @device
    def add_rows(a, t, first, end, x):
        rank, row_bytes = load_argument(a, ADD_LOW_RANK.rank), load_argument(a, ADD_LOW_RANK.row_bytes)
        w, stride = load_argument(a, ADD_LOW_RANK.weights), load_argument(a, ADD_LOW_RANK.stride)
        y, last_wide = load_argument(a, ADD_LOW_RANK.y) + t * stride, end - (end - first) % (16 * columns)
        for column in range(first, last_wide, 16 * columns):
            wide(x, rank, w + column * width, row_bytes, y + column * 4, stride)
        for column in range(last_wide, end, 16):
            narrow(x, rank, w + column * width, row_bytes, y + column * 4, stride)

    return add_rows


def make_add_low_rank(format_name):
    add_rows, add_row = make_add_rows(format_name, ROWS, COLUMNS), make_add_rows(format_name, 1, 4)

    @kernel
    def add_low_rank(a, part, parts, thread):
        count, vectors = simd.load_i64(load_argument(a, ADD_LOW_RANK.count)), load_argument(a, ADD_LOW_RANK.columns)
        vectors = (vectors + 15) // 16
        first, end = vectors * part // parts * 16, vectors * (part + 1) // parts * 16
        x = load_argument(a, ADD_LOW_RANK.scratch) + thread * load_argument(a, ADD_LOW_RANK.scratch_bytes)
        together = count // ROWS * ROWS
        for t in range(0, together, ROWS):
            if scale_rows(a, t, ROWS, x):
                add_rows(a, t, first, end, x)
        for t in range(together, count):
            if scale_rows(a, t, 1, x):
                add_row(a, t, first, end, x)

    return add_low_rank


@kernel
def adapted_linear(a, part, parts, thread):
    scratch = load_argument(a, ADAPTED_LINEAR.scratch)
    call = scratch + thread * load_argument(a, ADAPTED_LINEAR.scratch_bytes)
    update = call + UPDATE_CALL
    product, low_rank = load_argument(a, ADAPTED_LINEAR.product), load_argument(a, ADAPTED_LINEAR.update)
    copy_words(product + 8, call, load_argument(a, ADAPTED_LINEAR.product_words))
    copy_words(low_rank + 8, update, len(ADD_LOW_RANK))
    y_at, rows = load_argument(a, ADAPTED_LINEAR.y_at), load_argument(a, ADAPTED_LINEAR.rows)
    product_scratch = scratch + load_argument(a, ADAPTED_LINEAR.product_scratch)
    simd.store_i64(call + load_argument(a, ADAPTED_LINEAR.scratch_at) * 8, product_scratch)
    simd.store_i64(update + ADD_LOW_RANK.scratch * 8, scratch + UPDATE_SCRATCH)
    w, row_bytes = load_argument(call, LINEAR.weights), load_argument(call, LINEAR.row_bytes)
    y, b = load_argument(call, y_at), load_argument(update, ADD_LOW_RANK.weights)
    b_bytes = load_argument(a, ADAPTED_LINEAR.b_bytes)
    units = (rows + SLICE_UNIT - 1) // SLICE_UNIT
    first, end = units * part // parts * SLICE_UNIT, min(units * (part + 1) // parts * SLICE_UNIT, rows)
    step = load_argument(a, ADAPTED_LINEAR.slice_rows)
    if simd.load_i64(load_argument(a, ADAPTED_LINEAR.count)) < MIN_SLICED_TOKENS:
        step = max(end - first, 1)
    for row in range(first, end, step):
        count = min(step, end - row)
        simd.store_i64(call + LINEAR.weights * 8, w + row * row_bytes)
        simd.store_i64(call + LINEAR.rows * 8, count)
        simd.store_i64(call + y_at * 8, y + row * 4)
        simd.call_kernel(simd.load_i64(product), call, 0, 1, thread)
        simd.store_i64(update + ADD_LOW_RANK.weights * 8, b + row * b_bytes)
        simd.store_i64(update + ADD_LOW_RANK.y * 8, y + row * 4)
        simd.store_i64(update + ADD_LOW_RANK.columns * 8, count)
        simd.call_kernel(simd.load_i64(low_rank), update, 0, 1, thread)


@inlined
def copy_words(source, target, words):
    for i in range(words):
        simd.store_i64(target + i * 8, simd.load_i64(source + i * 8))


@inlined
def add(y, numbers, scale, lanes):
    """Add scale * numbers to y; nothing for a scale of 0, so that an unused adapter changes no bit."""
    if scale != 0:
        total = simd.fma_f32x16(numbers, simd.splat_f32x16(scale), simd.load_lanes_f32x16(y, lanes))
        simd.store_lanes_f32x16(y, total, lanes)


@kernel
def add_scaled(a, part, parts, thread):
    count, columns = simd.load_i64(load_argument(a, ADD_SCALED.count)), load_argument(a, ADD_SCALED.columns)
    for t in range(count * part // parts, count * (part + 1) // parts):
        x = load_argument(a, ADD_SCALED.x) + t * load_argument(a, ADD_SCALED.x_stride)
        y, scale = (
            load_argument(a, ADD_SCALED.y) + t * load_argument(a, ADD_SCALED.stride),
            load_row_scale(a, ADD_SCALED, t),
        )
        for i in range(0, columns, 16):
            lanes = min(16, columns - i)
            add(y + i * 4, simd.load_lanes_f32x16(x + i * 4, lanes), scale, lanes)
