"""y = W x in float32, for float weights and, correct but untuned, for every block format.

A row is converted to float32 (`load_row`), then multiplied: one token takes the dot product, more tokens share a tile
of 16 rows, transposed so that a vector holds one column of them.

Arguments: 0 address of the token count, 1 weights, 2 bytes per row, 3 rows, 4 columns, 5 x f32, 6 bytes between
tokens of x, 7 y f32, 8 bytes between tokens of y, 9 scratch memory, 10 bytes of it per thread.
"""

from localllm.kernels.cpu.rows_f32 import rows_8
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    fma_f32x16,
    load_bf16,
    load_bf16x16,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i64,
    prefetch,
    store_f32,
    store_f32x16,
    sum_f32x16,
    transpose_f32,
    zero_f32x16,
)

AHEAD = 2048  # bytes between the weights in use and those asked for

PLAIN = {
    "F32": (4, load_f32, load_f32x16),
    "F16": (2, load_f16, load_f16x16),
    "BF16": (2, load_bf16, load_bf16x16),
}


def make_plain(width, load_one, load_16):
    """`load_row` and `dot` for numbers of `width` bytes."""

    @device
    def load_row(w, columns, out):
        for i in range(0, columns - 15, 16):
            store_f32x16(out + i * 4, load_16(w + i * width))
        for i in range(columns // 16 * 16, columns):
            store_f32(out + i * 4, load_one(w + i * width))

    @device
    def dot(w, columns, x, scratch):
        t0 = t1 = t2 = t3 = zero_f32x16()
        for i in range(0, columns - 63, 64):
            v, k = w + i * width, x + i * 4
            for line in range(width):
                prefetch(v + AHEAD + line * 64)
            t0 = fma_f32x16(load_16(v), load_f32x16(k), t0)
            t1 = fma_f32x16(load_16(v + 16 * width), load_f32x16(k + 64), t1)
            t2 = fma_f32x16(load_16(v + 32 * width), load_f32x16(k + 128), t2)
            t3 = fma_f32x16(load_16(v + 48 * width), load_f32x16(k + 192), t3)
        total = sum_f32x16((t0 + t1) + (t2 + t3))
        for i in range(columns // 64 * 64, columns):
            total += load_one(w + i * width) * load_f32(x + i * 4)
        return total

    return load_row, dot


def make_blocks(format_name):
    """`load_row` and `dot` for a block format, one block after the other."""
    from localllm.kernels.cpu.blocks import UNPACK
    from quant.formats import BY_NAME

    unpack, block, block_bytes = UNPACK[format_name], BY_NAME[format_name].block, BY_NAME[format_name].bytes

    @device
    def load_row(w, columns, out):
        for i in range(columns // block):
            unpack(w + i * block_bytes, out + i * block * 4)

    @device
    def dot(w, columns, x, scratch):
        load_row(w, columns, scratch)
        total = zero_f32x16()
        for i in range(0, columns, 16):
            total = fma_f32x16(load_f32x16(scratch + i * 4), load_f32x16(x + i * 4), total)
        return sum_f32x16(total)

    return load_row, dot


def make(format_name):
    """The kernel for one format."""
    load_row, dot = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)

    @device
    def decode(a, first, last, scratch):
        w, row_bytes, columns = argument(a, 1), argument(a, 2), argument(a, 4)
        x, y = argument(a, 5), argument(a, 7)
        for r in range(first, last):
            store_f32(y + r * 4, dot(w + r * row_bytes, columns, x, scratch))

    @device
    def unpack_tile(a, t, rows, stride, padded, as_rows, tile):
        """16 rows to f32 [columns padded to 16][16 rows]; the last row stands for those beyond it."""
        for i in range(16):
            r = min(t * 16 + i, rows - 1)
            load_row(argument(a, 1) + r * argument(a, 2), argument(a, 4), as_rows + i * stride)
        for k in range(0, padded, 16):
            transpose_f32(as_rows + k * 4, stride, tile + k * 64)

    @device
    def prefill(a, first, last, tokens, scratch):
        rows, columns, x, x_stride = argument(a, 3), argument(a, 4), argument(a, 5), argument(a, 6)
        y, y_stride, padded = argument(a, 7), argument(a, 8), (columns + 15) // 16 * 16
        tile = scratch + 64 * padded
        for t in range(first, last):
            unpack_tile(a, t, rows, padded * 4, padded, scratch, tile)
            for i in range(0, tokens, 8):
                target = y + t * 64 + i * y_stride
                for k in range(8):
                    store_f32x16(target + k * y_stride, zero_f32x16())
                rows_8(x + i * x_stride, x_stride, tile, 64, columns, target, y_stride)

    @kernel
    def linear(a, part, parts, thread):
        tokens, rows = load_i64(argument(a, 0)), argument(a, 3)
        scratch = argument(a, 9) + thread * argument(a, 10)
        if tokens == 1:
            decode(a, rows * part // parts, rows * (part + 1) // parts, scratch)
        elif tokens > 1:
            tiles = (rows + 15) // 16
            prefill(a, tiles * part // parts, tiles * (part + 1) // parts, tokens, scratch)

    return linear
