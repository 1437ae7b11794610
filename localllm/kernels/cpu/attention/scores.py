"""Turns a row's scores of a block of keys into weights: caps, biases, masks, and the online softmax."""

import math

from numba import float32

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    abs_f32x16,
    any_above_f32x16,
    constant_f32,
    exp2_f32x16,
    f32x16,
    fma_f32x16,
    keep_lanes,
    largest_f32x16,
    load_f32x16,
    load_u16,
    max_f32x16,
    skip_lanes,
    splat_f32x16,
    store_f32,
    store_f32x16,
    tanh_f32x16,
)

MINUS_INFINITY, LOG2_E = float32(-math.inf), float32(math.log2(math.e))
distances = constant_f32(f32x16, *range(16))


@device
def cap_scores(scores, keys, softcap):
    """Replace scores by softcap * tanh(score) * log2(e). They have been divided by softcap already."""
    factor = splat_f32x16(softcap * LOG2_E)
    for i in range(0, keys, 16):
        store_f32x16(scores + i * 4, tanh_f32x16(load_f32x16(scores + i * 4)) * factor)


@device
def subtract_distances(scores, keys, slope, distance):
    """Subtract slope * |distance| * log2(e) from each score (ALiBi).

    distance: the query's position minus the first key's. It decreases by one from key to key.
    """
    lanes = distances()
    for i in range(0, keys, 16):
        away = abs_f32x16(splat_f32x16(float32(distance - i)) - lanes)
        store_f32x16(scores + i * 4, fma_f32x16(away, splat_f32x16(-slope * LOG2_E), load_f32x16(scores + i * 4)))


@device
def add_biases(scores, keys, biases, reach, relative):
    """Add a head's biases, times log2(e), to scores.

    biases: by position of the key relative to the query, see ATTEND in table.py; relative: the first key's position
    minus the query's.
    """
    factor = splat_f32x16(LOG2_E)
    for i in range(0, keys, 16):
        number = min(max(relative + i + reach, -16), 2 * reach + 1) + 16
        bias = load_f32x16(biases + number * 4)
        store_f32x16(scores + i * 4, fma_f32x16(bias, factor, load_f32x16(scores + i * 4)))


@device
def mask_outside(scores, keys, hidden, visible):
    """Set all scores to minus infinity except those from number `hidden` up to number `visible`."""
    for i in range(0, min(hidden, keys), 16):
        store_f32x16(scores + i * 4, skip_lanes(load_f32x16(scores + i * 4), hidden - i, MINUS_INFINITY))
    if visible < keys:
        for i in range(0, keys, 16):
            store_f32x16(scores + i * 4, keep_lanes(load_f32x16(scores + i * 4), visible - i, MINUS_INFINITY))


@device
def mask_unselected(scores, keys, bits):
    """Set the scores of keys whose bits are not set to minus infinity; bits: address of the first key's bit."""
    for i in range(0, keys, 16):
        flags = load_u16(bits + i // 8)
        if flags == 0:
            store_f32x16(scores + i * 4, splat_f32x16(MINUS_INFINITY))
        elif flags != 65535:
            for lane in range(16):
                if flags >> lane & 1 == 0:
                    store_f32(scores + (i + lane) * 4, MINUS_INFINITY)


@device
def mask_between(scores, keys, start, period):
    """Set all scores to minus infinity except that of the last key of every `period`.

    start: position of the first key.
    """
    for i in range(keys):
        if (start + i + 1) % period != 0:
            store_f32(scores + i * 4, MINUS_INFINITY)


@device
def rescale(top, state, output, value_dim):
    """Multiply a row's sum and output by 2 ** (old maximum - new maximum `top`), and store the new maximum."""
    fade = exp2_f32x16(load_f32x16(state + 64) - top)
    store_f32x16(state, load_f32x16(state) * fade)
    store_f32x16(state + 64, top)
    for i in range(0, value_dim, 16):
        store_f32x16(output + i * 4, load_f32x16(output + i * 4) * fade)


@device
def update_softmax(scores, keys, state, output, value_dim):
    """Turn `keys` scores of a row, a multiple of 16, into weights, and update the row's state and output.

    A score of minus infinity gets the weight 0. state: f32 [32], the row's sum of weights in 16 lanes, then its maximum
    in every lane.
    """
    largest = load_f32x16(state + 64)
    for i in range(0, keys, 16):
        largest = max_f32x16(largest, load_f32x16(scores + i * 4))
    if any_above_f32x16(largest, load_f32x16(state + 64)):  # seldom, after the first blocks
        rescale(splat_f32x16(largest_f32x16(largest)), state, output, value_dim)
    total, top = load_f32x16(state), load_f32x16(state + 64)
    for i in range(0, keys, 16):
        weight = exp2_f32x16(load_f32x16(scores + i * 4) - top)
        store_f32x16(scores + i * 4, weight)
        total = total + weight
    store_f32x16(state, total)
