"""Products with orthonormal Hadamard matrices, by the fast Walsh-Hadamard transform.

Its butterflies replace two numbers 1, 2, 4, ... apart by their sum and difference. The matrix is its own inverse.
"""

from math import sqrt

from numba import float32

from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import load_f32x16, load_i64, make_butterfly, splat_f32x16, store_f32x16
from localllm.kernels.table import HADAMARD

butterfly_1, butterfly_2, butterfly_4, butterfly_8 = map(make_butterfly, (1, 2, 4, 8))


@device
def within_vectors(x, y, columns, block, factor):
    """Write x times `factor` to y, with the butterflies of numbers up to 8 apart, which are in the same vector.

    y may be x.
    """
    for i in range(0, columns * 4, 64):
        lanes = butterfly_1(load_f32x16(x + i) * splat_f32x16(factor))
        if block > 2:
            lanes = butterfly_2(lanes)
        if block > 4:
            lanes = butterfly_4(lanes)
        if block > 8:
            lanes = butterfly_8(lanes)
        store_f32x16(y + i, lanes)


@device
def across_vectors(y, columns, distance):
    """Compute the butterflies of numbers that are `distance` apart, a multiple of 16, in place."""
    for first in range(0, columns, 2 * distance):
        for i in range(first * 4, (first + distance) * 4, 64):
            u, v = load_f32x16(y + i), load_f32x16(y + i + distance * 4)
            store_f32x16(y + i, u + v)
            store_f32x16(y + i + distance * 4, u - v)


@kernel
def hadamard(a, part, parts, thread):
    """Write x to y, with each `block` columns multiplied by a Hadamard matrix."""
    columns, block = argument(a, HADAMARD.columns), argument(a, HADAMARD.block)
    factor, tokens = float32(1.0 / sqrt(block)), load_i64(argument(a, HADAMARD.count))
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        x = argument(a, HADAMARD.x) + t * argument(a, HADAMARD.stride)
        y = argument(a, HADAMARD.y) + t * argument(a, HADAMARD.stride)
        within_vectors(x, y, columns, block, factor)
        distance = 16
        while distance < block:
            across_vectors(y, columns, distance)
            distance *= 2
