"""RMS norm and layer norm of rows, or of groups of their columns.

A group need not have a multiple of 16 columns, and y may be x, so no memory outside of the group is touched.
"""

from math import sqrt

from numba import float32

from localllm.kernels.cpu.signature import argument, argument_f32, device, kernel
from localllm.kernels.simd import (
    INFINITY,
    NAN,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32x16,
    store_f32,
    store_f32x16,
    sum_f32x16,
    zero_f32x16,
)
from localllm.kernels.table import LAYER_NORM, RMS_NORM


@device
def sum_of(x, count):
    """Compute the sum of `count` numbers."""
    sums, whole = zero_f32x16(), count // 16 * 16
    for i in range(0, whole, 16):
        sums = sums + load_f32x16(x + i * 4)
    total = sum_f32x16(sums)
    for i in range(whole, count):
        total += load_f32(x + i * 4)
    return total


@device
def sum_of_squares(x, count, center):
    """Compute the sum of (x - center)^2."""
    squares, whole = zero_f32x16(), count // 16 * 16
    for i in range(0, whole, 16):
        v = load_f32x16(x + i * 4) - splat_f32x16(center)
        squares = fma_f32x16(v, v, squares)
    total = sum_f32x16(squares)
    for i in range(whole, count):
        v = load_f32(x + i * 4) - center
        total += v * v
    return total


@device
def inverse_root(mean, epsilon):
    """Compute 1 / sqrt(mean + epsilon); NaN if the sum of squares has exceeded float32."""
    return float32(1.0) / float32(sqrt(mean + epsilon)) if mean < INFINITY else NAN


@kernel
def rms_norm(a, part, parts, thread):
    """Write x / sqrt(mean(x^2) + epsilon) * weight to y, with a mean for each group of columns."""
    stride, columns, group = argument(a, RMS_NORM.stride), argument(a, RMS_NORM.columns), argument(a, RMS_NORM.group)
    groups, epsilon = columns // group, argument_f32(a, RMS_NORM.epsilon)
    total, whole = load_i64(argument(a, RMS_NORM.count)) * groups, group // 16 * 16
    for i in range(total * part // parts, total * (part + 1) // parts):
        at, first = i // groups * stride + i % groups * group * 4, i % groups * group * 4
        x, y, weight = argument(a, RMS_NORM.x) + at, argument(a, RMS_NORM.y) + at, argument(a, RMS_NORM.weight) + first
        scale = inverse_root(sum_of_squares(x, group, float32(0.0)) / float32(group), epsilon)
        for k in range(0, whole * 4, 64):
            store_f32x16(y + k, load_f32x16(x + k) * splat_f32x16(scale) * load_f32x16(weight + k))
        for k in range(whole * 4, group * 4, 4):
            store_f32(y + k, load_f32(x + k) * scale * load_f32(weight + k))


@kernel
def layer_norm(a, part, parts, thread):
    """Write (x - mean) / sqrt(variance + epsilon) * weight + bias to y, for each group of columns."""
    stride, group = argument(a, LAYER_NORM.stride), argument(a, LAYER_NORM.group)
    groups, epsilon = argument(a, LAYER_NORM.columns) // group, argument_f32(a, LAYER_NORM.epsilon)
    total, whole = load_i64(argument(a, LAYER_NORM.count)) * groups, group // 16 * 16
    for i in range(total * part // parts, total * (part + 1) // parts):
        first = i % groups * group * 4
        at, weight = i // groups * stride + first, argument(a, LAYER_NORM.weight) + first
        x, y, bias = (
            argument(a, LAYER_NORM.x) + at,
            argument(a, LAYER_NORM.y) + at,
            argument(a, LAYER_NORM.bias) + first,
        )
        mean = sum_of(x, group) / float32(group)
        scale = inverse_root(sum_of_squares(x, group, mean) / float32(group), epsilon)
        for k in range(0, whole * 4, 64):
            v = (load_f32x16(x + k) - splat_f32x16(mean)) * splat_f32x16(scale)
            store_f32x16(y + k, fma_f32x16(v, load_f32x16(weight + k), load_f32x16(bias + k)))
        for k in range(whole * 4, group * 4, 4):
            store_f32(y + k, (load_f32(x + k) - mean) * scale * load_f32(weight + k) + load_f32(bias + k))
