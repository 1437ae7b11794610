"""Rotations of pairs of numbers by angles that grow with the position (RoPE), and Hadamard rotations."""

import math

from numba import cuda, float64

from localllm.kernels.cuda.device import (
    cosine_of_turns,
    f32_value,
    float32,
    load_f32,
    load_f64,
    load_i64,
    sine_of_turns,
    store_f32,
)

TURNS = 0.5 / math.pi  # turns per radian


def angles(count, positions, before, frequencies, pairs, table, factor):
    """Write the cosine and the sine of every position's rotation angles to the table; a block for each position.

    Angles are computed in turns, in float64, and whole turns are dropped: after a million turns 20 bits of 53 are lost.
    """
    row = cuda.blockIdx.x
    if row >= load_i64(count):
        return
    position, target = float64(load_i64(positions + 8 * row) - before), table + 8 * row * pairs
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        turns = position * load_f64(frequencies + 8 * pair) * TURNS
        store_f32(target + 4 * pair, float32(cosine_of_turns(turns)) * f32_value(factor))
        store_f32(target + 4 * (pairs + pair), float32(sine_of_turns(turns)) * f32_value(factor))


def rope(count, x, y, stride, heads, head_dim, table, pairs, step, apart):
    """Write x with its pairs rotated to y; pairs are the first numbers of a head. A block for each row and head."""
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride + 4 * cuda.blockIdx.y * head_dim
    if row >= load_i64(count):
        return
    cosines = table + 8 * row * pairs
    for pair in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
        cosine, sine = load_f32(cosines + 4 * pair), load_f32(cosines + 4 * (pairs + pair))
        first, second = at + 4 * pair * step, at + 4 * (pair * step + apart)
        u, v = load_f32(x + first), load_f32(x + second)
        store_f32(y + first, u * cosine - v * sine)
        store_f32(y + second, u * sine + v * cosine)
    for number in range(2 * pairs + cuda.threadIdx.x, head_dim, cuda.blockDim.x):
        store_f32(y + at + 4 * number, load_f32(x + at + 4 * number))


def hadamard(count, x, y, stride, columns, block):
    """Write x to y, each `block` columns multiplied by an orthonormal Hadamard matrix; a block of threads for each.

    By the fast Walsh-Hadamard transform: numbers 1, 2, 4, ... apart are replaced by their sum and difference.
    """
    row, at = cuda.blockIdx.x, cuda.blockIdx.x * stride + 4 * cuda.blockIdx.y * block
    if row >= load_i64(count):
        return
    factor, distance = float32(1) / math.sqrt(float32(block)), 1
    for number in range(cuda.threadIdx.x, block, cuda.blockDim.x):
        store_f32(y + at + 4 * number, load_f32(x + at + 4 * number) * factor)
    while distance < block:
        cuda.syncthreads()
        for pair in range(cuda.threadIdx.x, block // 2, cuda.blockDim.x):
            first = y + at + 4 * (2 * pair - (pair & (distance - 1)))
            u, v = load_f32(first), load_f32(first + 4 * distance)
            store_f32(first, u + v)
            store_f32(first + 4 * distance, u - v)
        distance *= 2
