"""Activations for products on tensor cores: float16, or BF16 in two planes.

Float16 has 11 significant bits but a small range: each row is divided by a scale of its own first, and the row of the
product is multiplied by it. BF16, which weights in BF16 need for their range, has 8 significant bits: the rounding
error is a second plane, for a second product.
"""

from numba import cuda

from localllm.kernels.cuda.device import (
    f16_bits,
    f32_bits,
    f32_value,
    float32,
    load_f32,
    load_i64,
    store_f32,
    store_u16,
)
from localllm.kernels.cuda.reductions import block_max

LARGEST = float32(1024.0)  # of a row: sums of 65536 products of it with weights up to 1 stay far from float32's limits


def halve(count, x, stride, columns, y, y_stride, scales):
    """Write x / scale to y in float16, with a scale for each row.

    Columns up to a multiple of 8 are zero. scales: float32 [tokens].
    """
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    source, target = x + row * stride, y + row * y_stride
    largest = float32(0)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        size = abs(load_f32(source + 4 * column))
        largest = size if size > largest or size != size else largest
    largest = block_max(largest)
    scale = largest / LARGEST if largest != float32(0) else float32(1)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        store_u16(target + 2 * column, f16_bits(load_f32(source + 4 * column) / scale))
    if cuda.threadIdx.x == 0:
        store_f32(scales + 4 * row, scale)


def scale_rows(count, y, stride, columns, scales):
    """Multiply row i of y by scales[i]."""
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    scale = load_f32(scales + 4 * row)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        place = y + row * stride + 4 * column
        store_f32(place, load_f32(place) * scale)


def split_bf16(count, x, stride, columns, high, low, y_stride):
    """Write two planes of x in BF16, with x = high + low: 16 significant bits together."""
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = load_f32(x + row * stride + 4 * column)
        upper = (f32_bits(value) >> 16) & 0xFFFF  # cut, not rounded: the rest has the same sign
        store_u16(high + row * y_stride + 2 * column, upper)
        rest = value - f32_value(upper << 16)
        store_u16(low + row * y_stride + 2 * column, (f32_bits(rest) >> 16) & 0xFFFF)
