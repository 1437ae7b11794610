"""Looks up rows of the embedding matrix: x[t] = row ids[t], float32; a block of threads for each token."""

from numba import cuda

from localllm.kernels.cuda.device import (
    f16_value,
    f32_bits,
    f32_value,
    load_f32,
    load_i64,
    load_u16,
    store_4i32,
    store_f32,
)
from localllm.kernels.cuda.matmul.planes import PLAIN, UNIT
from localllm.kernels.cuda.matmul.units import UNITS
from localllm.kernels.cuda.matmul.unpack import LANES, eight


def make(name):
    """Make the kernel for one format."""
    return make_plain(name) if name in PLAIN else make_planes(name)


def make_planes(name):
    """Make the kernel for a format in planes."""
    read = UNITS[name].read

    def embed(count, weights, row_bytes, columns, ids, x, stride):
        token = cuda.blockIdx.x
        if token >= load_i64(count):
            return
        row, units = weights + load_i64(ids + 8 * token) * row_bytes, columns // UNIT
        number = cuda.threadIdx.x
        while number < units * LANES:
            a, b = eight(read(row, units, number // LANES), number % LANES)
            target = x + token * stride + 32 * number
            store_4i32(target, f32_bits(a[0]), f32_bits(a[1]), f32_bits(a[2]), f32_bits(a[3]))
            store_4i32(target + 16, f32_bits(b[0]), f32_bits(b[1]), f32_bits(b[2]), f32_bits(b[3]))
            number += cuda.blockDim.x

    return embed


def make_plain(name):
    """Make the kernel for F32, F16 or BF16."""
    size = 4 if name == "F32" else 2

    def embed(count, weights, row_bytes, columns, ids, x, stride):
        token = cuda.blockIdx.x
        if token >= load_i64(count):
            return
        row, column = weights + load_i64(ids + 8 * token) * row_bytes, cuda.threadIdx.x
        while column < columns:
            place = row + size * column
            if name == "F32":
                weight = load_f32(place)
            elif name == "F16":
                weight = f16_value(load_u16(place))
            else:
                weight = f32_value(load_u16(place) << 16)
            store_f32(x + token * stride + 4 * column, weight)
            column += cuda.blockDim.x

    return embed
