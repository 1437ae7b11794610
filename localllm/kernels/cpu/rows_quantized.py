"""The dot products of one to four rows of block-quantized weights with a few tokens: a decode step, and small batches.

A row is read once, in the file's layout, as a stream, and all tokens share the unpacking; for one, memory speed is the
limit. With weight = s * (code - offset) or s * code + m, and activation = c * q, in both planes or the high one:
y = sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations).
"""

from numba import types

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu.row_one import OneToken
from localllm.kernels.cpu.row_steps import Steps
from localllm.kernels.cpu.row_tails import make_tail
from localllm.kernels.cpu.signature import argument, device, inlined
from localllm.kernels.simd import I64, operation, prefetch_line, splat_f32x8, splat_f32x16

# Bytes between the weights in use and those asked for: far ahead for the second cache, in the order of the file even if
# two rows are read side by side, then for the first. One core of two reads Q4_K at 22 GB/s in rows of 2048 columns or
# 8192; with nothing but 4096 ahead for the first cache that was 22 and 15, with 8192 ahead for the second 19 and 22.
AHEAD, NEAR = 8192, 1024
int64 = types.int64


def make_ask_for(size, locality):
    """An intrinsic that prefetches `size` bytes."""

    @operation(None, int64)
    def ask_for(builder, address):
        for line in range(0, size, 64):
            prefetch_line(builder, builder.add(address, I64(line)), locality)

    return ask_for


@inlined
def activations(a, sums):
    """Where the first token's lie: high and low plane, scales, sums (the argument `sums`)."""
    return argument(a, LINEAR.high), argument(a, LINEAR.low), argument(a, LINEAR.scales), argument(a, sums)


def make_each(function, rows):
    """A function (w, bytes between rows) -> what `function` finds at each row: a tuple."""
    return make_joined(inlined(lambda w, step: (function(w),)), rows)


def make_joined(function, rows):
    """A function (w, bytes between rows) -> the tuples that `function` finds at each row, as one."""
    if rows == 1:
        return inlined(lambda w, step: function(w, step))
    half, distance = make_joined(function, rows // 2), rows // 2
    return inlined(lambda w, step: half(w, step) + half(w + distance * step, step))


def make_codes(codes, rows):
    """The same for the four vectors of codes."""
    return make_joined(inlined(lambda w, step: codes(w)), rows)


def make_from_offset(format):
    """What an offset of the codes comes to: a minimum of -offset * scale."""
    scales, factor = format.scales, -float(format.offset)
    splat = splat_f32x8 if format.sub_block == 32 else splat_f32x16
    return device(lambda w: scales(w) * splat(factor))


def make_group(format, steps):
    """A function (w, bytes between rows) -> what `add` takes of a group: codes, scales and minimums."""
    codes, scales = make_codes(format.codes, steps.rows), make_each(format.scales, steps.rows)
    minimums = make_each(format.minimums or make_from_offset(format), steps.rows)
    mix, spread = steps.make_mix(), steps.make_spread()

    @inlined
    def group(w, step):
        return mix(codes(w, step)), spread(scales(w, step)), spread(minimums(w, step))

    return group


def make_fetch(format, rows):
    """A function (w, bytes between rows, `ahead`) that asks for the weights that a group's turn is for."""
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


def make_fetch_tails(format, rows):
    """A function (ahead, columns) that asks for what lies behind a row's last group, and returns where that ends."""
    chunk_bytes = rows * 2 * format.chunk.block_bytes if format.chunk else 0
    fetch = make_ask_for(chunk_bytes, 2)

    @inlined
    def ask(ahead, columns):
        for _ in range(columns % 256 // 64):
            fetch(ahead)
            ahead += chunk_bytes
        return ahead

    return ask


def make_tails(format, steps):
    """(arguments of the kernel, w, bytes between rows, token) -> the totals to begin with."""
    of_rows, start = make_of_rows(make_tail(format, steps.planes), steps.rows), steps.make_start()
    group_bytes, sums = format.group_bytes, LINEAR.sums if steps.planes == 2 else LINEAR.high_sums

    @inlined
    def tails(a, w, step, token):
        columns = argument(a, LINEAR.columns)
        groups, chunks = columns // 256, columns % 256 // 64
        x, low, c, n = activations(a, sums)
        place = token * columns + groups * 256
        x, low, c, n, w = x + place, low + place, c + place // 4, n + place // 4, w + groups * group_bytes
        return start(of_rows(w, step, x, low, c, n, chunks))

    return tails


def make_of_rows(tail, rows):
    """A function (w, bytes between rows, ...) -> `tail` of each row: a tuple."""
    if rows == 1:
        return inlined(lambda w, step, x, low, c, n, chunks: (tail(w, x, low, c, n, chunks),))
    half, distance = make_of_rows(tail, rows // 2), rows // 2

    @inlined
    def both(w, step, x, low, c, n, chunks):
        return half(w, step, x, low, c, n, chunks) + half(w + distance * step, step, x, low, c, n, chunks)

    return both


def make_row(format, rows, planes):
    """A function (arguments of the kernel, address of a row, bytes to the next, y, tokens, scratch) for 2 or 4 rows.

    The tokens' totals wait in the scratch memory, so that any number of tokens shares the unpacking. Two rows share
    what is read of the activations, which is more than half of all loads.
    """
    steps = Steps(format.sub_block, rows, planes, format.largest)
    group, fetch, start = make_group(format, steps), make_fetch(format, rows), make_tails(format, steps)
    fetch_tails = make_fetch_tails(format, rows)
    add, finish, load, store = steps.make_add(), steps.make_finish(), steps.make_load(), steps.make_store()
    group_bytes, size, sums = (
        format.group_bytes,
        64 * steps.count,
        LINEAR.sums if planes == 2 else LINEAR.high_sums,
    )

    @inlined
    def row(a, w, step, y, tokens, scratch):
        columns, ahead = argument(a, LINEAR.columns), w + (rows - 1) * step + AHEAD
        for t in range(tokens):
            store(scratch + t * size, start(a, w, step, t))
        ahead = fetch_tails(ahead, columns)
        high, rest, c_first, n_first = activations(a, sums)
        for _ in range(columns // 256):
            fetch(w, step, ahead)
            codes, scales, minimums = group(w, step)
            x, low, c, n, place = high, rest, c_first, n_first, scratch
            for _ in range(tokens):
                store(place, add(load(place), codes, scales, minimums, x, low, c, n))
                x, low, c, n, place = x + columns, low + columns, c + columns // 4, n + columns // 4, place + size
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            high, rest, c_first, n_first = high + 256, rest + 256, c_first + 64, n_first + 64
        for t in range(tokens):
            finish(load(scratch + t * size), y + t * argument(a, LINEAR.y_stride))

    return row


def make_one(format, rows):
    """A function (arguments of the kernel, address of a row, bytes to the next, y) for one token, in both planes."""
    steps, fetch, tail = (
        OneToken(format.sub_block, rows, format.largest),
        make_fetch(format, rows),
        make_tail(format, 2),
    )
    codes, scales = make_codes(format.codes, rows), make_each(format.scales, rows)
    minimums = make_each(format.minimums or make_from_offset(format), rows)
    fetch_tails, group_bytes = make_fetch_tails(format, rows), format.group_bytes
    start, add, finish = steps.make_start(), steps.make_add(), steps.make_finish()

    @inlined
    def one(a, w, step, y):
        columns = argument(a, LINEAR.columns)
        groups, chunks = columns // 256, columns % 256 // 64
        x, low, c, n = activations(a, LINEAR.sums)
        end, place = w + groups * group_bytes, groups * 256
        first = tail(end, x + place, low + place, c + place // 4, n + place // 4, chunks)
        other = first
        if rows == 2:
            other = tail(end + step, x + place, low + place, c + place // 4, n + place // 4, chunks)
        totals, ahead = start(first, other), fetch_tails(w + step + AHEAD, columns)
        for _ in range(groups):
            fetch(w, step, ahead)
            totals = add(totals, codes(w, step), scales(w, step), minimums(w, step), x, low, c, n)
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            x, low, c, n = x + 256, low + 256, c + 64, n + 64
        finish(totals, y)

    return one
