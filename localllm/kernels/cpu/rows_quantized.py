"""The dot products of one or two rows of block-quantized weights with 1 or 4 tokens: a decode step, and small batches.

A row is read once, in the file's layout, as a stream; memory speed is the limit. Four tokens share the unpacking.
With weight = s * (code - offset) or s * code + m, and activation = c * q, in both planes or the high one:
y = sum over sub-blocks of s * c * dot(code, q) + (m or -offset * s) * sum(activations).
"""

from numba import types

from localllm.kernels.arguments import LINEAR_QUANTIZED as LINEAR
from localllm.kernels.cpu.row_steps import Steps
from localllm.kernels.cpu.row_tails import make_tails
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
def token_strides(a, sub_block):
    """Bytes between tokens: of the planes, the scales and the sums."""
    columns = argument(a, LINEAR.columns)
    return columns, columns // 8, columns // sub_block * 4


@inlined
def token_at(a, token, sub_block, sums):
    """Where a token's activations lie: high and low plane, scales, sums (the argument `sums`)."""
    x_stride, c_stride, n_stride = token_strides(a, sub_block)
    return (
        argument(a, LINEAR.high) + token * x_stride, argument(a, LINEAR.low) + token * x_stride,
        argument(a, LINEAR.scales) + token * c_stride, argument(a, sums) + token * n_stride,
    )  # fmt: skip


def make_each(function, rows):
    """A function (w, bytes between rows) -> what `function` finds at each row: a tuple."""
    if rows == 1:
        return inlined(lambda w, step: (function(w),))
    return inlined(lambda w, step: (function(w), function(w + step)))


def make_codes(codes, rows):
    """The same for the four vectors of codes."""
    if rows == 1:
        return inlined(lambda w, step: codes(w))
    return inlined(lambda w, step: codes(w) + codes(w + step))


def make_from_offset(format):
    """What an offset of the codes comes to: a minimum of -offset * scale."""
    scales, factor = format.scales, -float(format.offset)
    splat = splat_f32x8 if format.sub_block == 32 else splat_f32x16
    return device(lambda w: scales(w) * splat(factor))


def make_row(format, tokens, rows, planes):
    """A function (arguments of the kernel, address of a row, bytes to the next, first token, y) for one or two rows.

    Two rows share what is read of the activations, which is more than half of all loads.
    """
    steps = Steps(format.sub_block, tokens, rows, planes)
    dots, add, finish = steps.make_dots(), steps.make_add(), steps.make_finish()
    codes, scales = make_codes(format.codes, rows), make_each(format.scales, rows)
    minimums = make_each(format.minimums or make_from_offset(format), rows)
    sub_block, group_bytes, sums_bytes = format.sub_block, format.group_bytes, 1024 // format.sub_block
    chunk_bytes = 2 * format.chunk.block_bytes if format.chunk else 0
    fetch, fetch_chunks = make_ask_for(rows * group_bytes, 2), make_ask_for(rows * chunk_bytes, 2)
    fetch_near = make_ask_for(group_bytes, 3)
    start = make_tails(format, tokens, rows, planes) if format.chunk else steps.make_no_tails()
    sums = LINEAR.sums if planes == 2 else LINEAR.high_sums

    @inlined
    def row(a, w, step, token, y):
        x, low, c, n = token_at(a, token, sub_block, sums)
        x_stride, c_stride, n_stride = token_strides(a, sub_block)
        totals, ahead = start(w, step, x, low, x_stride, c, c_stride, n, n_stride), w + step + AHEAD
        for _ in range(x_stride % 256 // 64):
            fetch_chunks(ahead)
            ahead += rows * chunk_bytes
        for _ in range(x_stride // 256):
            fetch(ahead)
            fetch_near(w + NEAR)
            if rows == 2:
                fetch_near(w + step + NEAR)
            products = dots(codes(w, step), x, low, x_stride)
            totals = add(totals, products, scales(w, step), minimums(w, step), c, c_stride, n, n_stride)
            w, ahead = w + group_bytes, ahead + rows * group_bytes
            x, low, c, n = x + 256, low + 256, c + 32, n + sums_bytes
        finish(totals, y, argument(a, LINEAR.y_stride))

    return row
