"""Products of one to four rows of quantized weights with a few tokens: decode and small batches.

A row is read once, in the file's layout, as a stream, and is unpacked once for all tokens; for one token, the speed of
memory is the limit. With weight = s * (code - offset) or s * code + m, and activation = c * q (q in both planes, or the
high one):

    y = the sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations)
"""

from numba import types

from localllm.kernels.cpu.matmul.gemv_int8_1 import OneToken
from localllm.kernels.cpu.matmul.gemv_int8_pairs import RowTotals
from localllm.kernels.cpu.matmul.row_shape import chunk_shape, group_shape
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.simd import I64, constant_f32, f32x8, four_times_f32x2, operation, prefetch_line
from localllm.kernels.table import LINEAR_QUANTIZED as LINEAR

# Distance, in bytes, of prefetches: AHEAD into the L2 cache, in the order of the file even if two rows are read side by
# side, then NEAR into the L1 cache. One of two cores reads Q4_K at 22 GB/s in rows of 2048 or 8192 columns; with 4096
# bytes ahead into the L1 cache only, that was 22 and 15, with 8192 ahead into the L2 cache only, 19 and 22.
AHEAD, NEAR = 8192, 1024
int64, quarter = types.int64, constant_f32(f32x8, 0.25)


def make_ask_for(size, locality):
    """Return an intrinsic (address) that prefetches `size` bytes; locality: see prefetch_line."""

    @operation(None, int64)
    def ask_for(builder, address):
        for line in range(0, size, 64):
            prefetch_line(builder, builder.add(address, I64(line)), locality)

    return ask_for


@inlined
def activations(a, sums, token=0):
    """Return the addresses of a token's high plane, low plane, scales and sums.

    sums: the argument with the sums.
    """
    x, n = token * argument(a, LINEAR.columns), token * argument(a, LINEAR.columns) // 4
    high, low = argument(a, LINEAR.high) + x, argument(a, LINEAR.low) + x
    return high, low, argument(a, LINEAR.scales) + n, argument(a, sums) + n


def make_each(function, rows):
    """Make a function (w, step) that returns the results of `function` at `rows` rows as a tuple."""
    return make_joined(inlined(lambda w, step: (function(w),)), rows)


def make_joined(function, rows):
    """Make a function (w, step) that joins the tuples that `function` returns at `rows` rows."""
    if rows == 1:
        return inlined(lambda w, step: function(w, step))
    half, distance = make_joined(function, rows // 2), rows // 2
    return inlined(lambda w, step: half(w, step) + half(w + distance * step, step))


def make_codes(codes, rows):
    """Make a function (w, step) that reads the codes of a group of `rows` rows."""
    return make_joined(inlined(lambda w, step: codes(w)), rows)


def make_factors(scales, minimums, rows):
    """Make a function (w, step) that reads the scales, and the minimums if there are some, of `rows` rows."""
    scales = make_each(scales, rows)
    if minimums is None:
        return scales
    minimums = make_each(minimums, rows)
    return inlined(lambda w, step: scales(w, step) + minimums(w, step))


def make_group(format, rows):
    """Return two functions (w, step) for a group of `rows` rows: one reads the codes, one the scales and minimums."""
    return make_codes(format.codes, rows), make_factors(format.scales, format.minimums, rows)


def make_chunk(format, rows):
    """Return two functions (w, step) for a chunk of `rows` rows: one reads the codes, one the scales and minimums.

    The two scales of a chunk are repeated as row_shape.py expects.
    """
    codes, scales_of, minimums_of = format.chunk
    scales = device(lambda w: four_times_f32x2(scales_of(w)))
    minimums = device(lambda w: four_times_f32x2(minimums_of(w)) * quarter()) if minimums_of else None
    return make_each(codes, rows), make_factors(scales, minimums, rows)


def make_fetch(format, rows):
    """Make a function (w, step, ahead) that prefetches weights: a group of all rows from `ahead` on, and near ones."""
    fetch, fetch_near = make_ask_for(rows * format.group_bytes, 2), make_ask_for(format.group_bytes, 3)

    @inlined
    def ask(w, step, ahead):
        fetch(ahead)
        fetch_near(w + NEAR)
        if rows > 1:
            fetch_near(w + step + NEAR)
        if rows > 2:
            fetch_near(w + 2 * step + NEAR)
            fetch_near(w + 3 * step + NEAR)

    return ask


def make_take(format, shape, read, rows, planes):
    """Make a function that adds the products of a group or a chunk of `rows` rows to the totals of all tokens.

    Its parameters: w, step, high, low, scales, sums, columns, tokens, scratch. read: make_group or make_chunk. Totals
    are in scratch memory.
    """
    steps, (codes, factors) = RowTotals(shape, rows, planes), read(format, rows)
    mix, spread, add, size = steps.make_mix(), steps.make_spread(), steps.make_add(), steps.size
    load, store = steps.make_load(), steps.make_store()

    @inlined
    def take(w, step, x, low, c, n, columns, tokens, scratch):
        mixed, spread_factors = mix(codes(w, step)), spread(factors(w, step))
        for _ in range(tokens):
            store(scratch, add(load(scratch), mixed, spread_factors, x, low, c, n))
            x, low, c, n, scratch = x + columns, low + columns, c + columns // 4, n + columns // 4, scratch + size

    return take


def make_row(format, rows, planes):
    """Make a function (arguments, w, step, y, first, tokens, scratch) that multiplies `rows` rows with a few tokens.

    y: address of the first token's results; first: the first token; planes: 2, or 1 for the high plane. Totals are kept
    in scratch memory.
    """
    steps, fetch = RowTotals(group_shape(format), rows, planes), make_fetch(format, rows)
    take_group = make_take(format, group_shape(format), make_group, rows, planes)
    take_chunk = make_take(format, chunk_shape(format), make_chunk, rows, planes) if format.chunk else None
    zero, load, store, finish = steps.make_zero(), steps.make_load(), steps.make_store(), steps.make_finish()
    size = steps.size
    group_bytes, chunk_bytes = format.group_bytes, format.group_bytes // 4 if format.chunk else 0
    fetch_chunk, sums = make_ask_for(rows * chunk_bytes, 2), LINEAR.sums if planes == 2 else LINEAR.high_sums

    @inlined
    def row(a, w, step, y, first, tokens, scratch):
        columns, ahead = argument(a, LINEAR.columns), w + (rows - 1) * step + AHEAD
        for t in range(tokens):
            store(scratch + t * size, zero())
        x, low, c, n = activations(a, sums, first)
        for _ in range(columns // 256):
            fetch(w, step, ahead)
            take_group(w, step, x, low, c, n, columns, tokens, scratch)
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            x, low, c, n = x + 256, low + 256, c + 64, n + 64
        if take_chunk is not None:
            for _ in range(columns % 256 // 64):
                fetch_chunk(ahead)
                take_chunk(w, step, x, low, c, n, columns, tokens, scratch)
                w, ahead = w + chunk_bytes, ahead + rows * chunk_bytes
                x, low, c, n = x + 64, low + 64, c + 16, n + 16
        for t in range(tokens):
            finish(load(scratch + t * size), y + t * argument(a, LINEAR.y_stride))

    return row


def make_one(format, rows):
    """Make a function (arguments, w, step, y) that multiplies `rows` rows with one token, in both planes."""
    steps, fetch = OneToken(group_shape(format), rows), make_fetch(format, rows)
    codes, factors = make_group(format, rows)
    zero, add, finish = steps.make_zero(), steps.make_add(), steps.make_finish()
    add_chunk, chunk_codes, chunk_factors = None, None, None
    if format.chunk:
        add_chunk, (chunk_codes, chunk_factors) = (
            OneToken(chunk_shape(format), rows).make_add(),
            make_chunk(format, rows),
        )
    group_bytes, chunk_bytes = format.group_bytes, format.group_bytes // 4 if format.chunk else 0
    fetch_chunk = make_ask_for(rows * chunk_bytes, 2)

    @inlined
    def one(a, w, step, y):
        columns, ahead, totals = argument(a, LINEAR.columns), w + (rows - 1) * step + AHEAD, zero()
        x, low, c, n = activations(a, LINEAR.sums)
        for _ in range(columns // 256):
            fetch(w, step, ahead)
            totals = add(totals, codes(w, step), factors(w, step), x, low, c, n)
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            x, low, c, n = x + 256, low + 256, c + 64, n + 64
        if add_chunk is not None:
            for _ in range(columns % 256 // 64):
                fetch_chunk(ahead)
                totals = add_chunk(totals, chunk_codes(w, step), chunk_factors(w, step), x, low, c, n)
                w, ahead = w + chunk_bytes, ahead + rows * chunk_bytes
                x, low, c, n = x + 64, low + 64, c + 16, n + 16
        finish(totals, y)

    return one
