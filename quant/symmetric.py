"""Search for blocks of `scale * code` with codes bottom..top: Q2_0, Q4_0, Q5_0, Q3_K, Q6_K, Q8_0.

The search is that of affine.py without the low: for given codes the best scale is a quotient of two sums. A scale may
be negative, which mirrors the range of codes. In a super-block scale = factor * k, with integers k in -steps..steps -
1, found in the same three stages.

With the 255 codes of Q8_0 the error depends little on the size of the scale, but on the positions of the weights
between its multiples: trying a few scales above the smallest possible one reduces the error by a sixth.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.quant.blocks import (
    SMALLEST_HALF,
    build_group_packer,
    build_packer,
    compute_unit,
    find_largest,
    load_block,
    round_to_float16,
    store_half,
)
from localllm.quant.formats import BY_NAME, LAYOUTS
from localllm.quant.numba_cache import compile_cached, compile_encoder, compile_inline

f32 = np.float32
ZERO, ONE, TWO, HUGE = f32(0), f32(1), f32(2), f32(3e38)

GRID_START, GRID_SPACING = f32(-0.6), f32(0.45)  # see Search; for formats with 16 codes or more
FACTOR_COUNT = 32  # factors tried: the largest scale by steps, steps * 63 / 64, ...


class SearchParameters(NamedTuple):
    """The range of codes, and the size of the search.

    The grid of scales: those with which the weight of largest magnitude gets the code bottom - start, top + start,
    bottom - start - spacing, top + start + spacing, ...
    """

    bottom: f32
    top: f32
    grid: int  # number of candidate scales in a sub-block
    start: f32
    spacing: f32
    refits: int  # how often each candidate scale is fitted to its codes
    rounds: int  # maximum number of rounds of stage 3
    steps: f32 = ONE  # integers k are -steps .. steps - 1
    reach: int = 0  # stage 3 tries k - reach .. k + reach


class SymmetricSuperBlock(NamedTuple):
    """The state of a search. x, weight: float32 [sub-blocks, size]; all other fields [sub-blocks] unless noted."""

    x: NDArray
    weight: NDArray
    sum_wxx: NDArray
    scale: NDArray  # the result of stage 1, any float32
    sum_wll: NDArray  # sums with the latest codes l
    sum_wlx: NDArray
    k: NDArray  # the integers of stage 3
    best_k: NDArray
    grid_scale: NDArray  # [grid], for stage 1
    factor: NDArray  # [FACTORS], for stage 2
    error: NDArray


@compile_inline
def allocate_super_block(blocks, size, search):
    x, w, rows = np.zeros((blocks, size), f32), np.zeros((blocks, size), f32), np.zeros((6, blocks), f32)
    grid, factors = np.zeros(search.grid, f32), np.zeros((2, FACTOR_COUNT), f32)
    return SymmetricSuperBlock(x, w, rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], grid, factors[0], factors[1])


@compile_inline
def round_to_code(x, inverse, bottom, top):
    return min(max(np.rint(x * inverse), bottom), top)


@compile_inline
def invert(scale):
    return ONE / scale if scale != ZERO else ZERO


@compile_inline
def round_scale(value, unit):
    """Round `value` so that value * unit is a float16, and 0 only if `value` is 0."""
    size = max(round_to_float16(abs(value) * unit), f32(2.0**-24)) / unit if value != ZERO else ZERO
    return size if value > ZERO else -size


@compile_inline
def sum_codes(x, weight, b, scale, bottom, top):
    """Return Σwll and Σwlx over sub-block b with the nearest codes l."""
    inverse = invert(scale)
    wll, wlx = ZERO, ZERO
    for i in range(x.shape[1]):
        code = round_to_code(x[b, i], inverse, bottom, top)
        product = weight[b, i] * code
        wll += product * code
        wlx += product * x[b, i]
    return wll, wlx


@compile_inline
def predict_error(wxx, wll, wlx, scale):
    """Return the error Σw(x - scale * l)² without the weights, from Σwxx, Σwll and Σwlx."""
    return wxx + scale * (scale * wll - TWO * wlx)


@compile_inline
def search_block(s, b, search):
    """Find the scale of sub-block b, and the sums over its codes: stage 1."""
    x, weight, bottom, top = s.x, s.weight, search.bottom, search.top
    lowest, largest, wxx = x[b, 0], x[b, 0], ZERO
    for i in range(x.shape[1]):
        lowest, largest = min(lowest, x[b, i]), max(largest, x[b, i])
        wxx += weight[b, i] * x[b, i] * x[b, i]
    s.sum_wxx[b] = wxx
    extreme = largest if largest > -lowest else lowest
    for step in range(search.grid):
        margin = search.start + search.spacing * f32(step // 2)
        s.grid_scale[step] = extreme / (top + margin if step % 2 else bottom - margin)
    least = HUGE
    for refit in range(search.refits):  # the outer loop, so that the processor works on several scales at once
        for step in range(search.grid):
            wll, wlx = sum_codes(x, weight, b, s.grid_scale[step], bottom, top)
            scale = wlx * invert(wll)
            s.grid_scale[step] = scale
            error = predict_error(wxx, wll, wlx, scale)
            if refit == search.refits - 1 and error < least:
                least = error
                s.scale[b], s.sum_wll[b], s.sum_wlx[b] = scale, wll, wlx


@compile_cached
def search_plain_block(s, search, unit):
    """Return the float16 scale of a block without sub-blocks."""
    search_block(s, 0, search)
    scale, best, least = s.scale[0], ZERO, HUGE
    for _ in range(search.rounds):
        scale = round_scale(scale, unit)
        wll, wlx = sum_codes(s.x, s.weight, 0, scale, search.bottom, search.top)
        error = predict_error(s.sum_wxx[0], wll, wlx, scale)
        if error >= least:
            break
        best, least = scale, error
        scale = wlx * invert(wll)
    return best


@compile_inline
def search_factor(s, steps, unit):
    """Return the factor whose multiples are nearest to the scales, by predicted error: stage 2.

    The integers are written to s.k.
    """
    lowest, largest = s.scale[0], s.scale[0]
    for b in range(s.k.size):
        lowest, largest = min(lowest, s.scale[b]), max(largest, s.scale[b])
    extreme = largest if largest > -lowest else lowest
    spacing = steps / f32(64)
    for i in range(FACTOR_COUNT):
        s.factor[i] = round_scale(extreme / (f32(i) * spacing - steps), unit)
        s.error[i] = ZERO
    for b in range(s.k.size):
        for i in range(FACTOR_COUNT):
            k = round_to_code(s.scale[b], invert(s.factor[i]), -steps, steps - ONE)
            distance = s.scale[b] - s.factor[i] * k
            s.error[i] += distance * distance * s.sum_wll[b]
    factor = s.factor[np.argmin(s.error)]
    for b in range(s.k.size):
        s.k[b] = round_to_code(s.scale[b], invert(factor), -steps, steps - ONE)
    return factor


@compile_inline
def round_block(s, b, search, factor):
    """Choose k near the present one, update the sums, and return the error: stage 3."""
    start_k, least = s.k[b], HUGE
    for step in range(-search.reach, search.reach + 1):
        k = start_k + f32(step)
        wll, wlx = sum_codes(s.x, s.weight, b, factor * k, search.bottom, search.top)
        error = predict_error(s.sum_wxx[b], wll, wlx, factor * k)
        if error < least and k >= -search.steps and k < search.steps:
            least = error
            s.k[b], s.sum_wll[b], s.sum_wlx[b] = k, wll, wlx
    return least


@compile_cached
def search_super_block(s, search, unit):
    """Run all three stages; return the factor, and write the integers to s.best_k."""
    for b in range(s.k.size):
        search_block(s, b, search)
    factor = search_factor(s, search.steps, unit)
    best_factor, least = factor, HUGE
    for _ in range(search.rounds):
        error = ZERO
        for b in range(s.k.size):
            error += round_block(s, b, search, factor)
        if error >= least:
            break
        best_factor, least = factor, error
        kk, kx = ZERO, ZERO
        for b in range(s.k.size):
            s.best_k[b] = s.k[b]
            kk += s.k[b] * s.k[b] * s.sum_wll[b]
            kx += s.k[b] * s.sum_wlx[b]
        factor = round_scale(kx * invert(kk), unit)
    return best_factor


def build_super_block_encoder(name, *how, **more):
    """Build the encoder of a format with super-blocks: d per block, an integer scale per sub-block.

    how, more: arguments of SearchParameters.
    """
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes
    size, blocks = layout.group, 256 // layout.group
    bottom, top = get_code_range(layout)
    steps = f32(1 << sum(field.bits for field in layout.scales) - 1)
    search = SearchParameters(bottom, top, *how, steps=steps, **more)
    put_code, put_scale, d, centre = (
        build_packer(layout.codes, size),
        build_group_packer(layout.scales),
        layout.d,
        layout.scale_centre,
    )

    def encode(weights, importance, out):
        s = allocate_super_block(blocks, size, search)
        for row in range(weights.shape[0]):
            for block in range(weights.shape[1] // 256):
                into = out[row, block * block_bytes : (block + 1) * block_bytes]
                into[:] = 0
                unit = load_block(weights, importance, row, block * 256, 256, s)
                if unit == 0:
                    continue
                factor = search_super_block(s, search, unit)
                store_half(into, d, factor * unit)
                for b in range(blocks):
                    put_scale(into, b, np.uint8(np.int16(s.best_k[b]) + centre))
                for b in range(blocks):
                    put_codes(put_code, into, s.x, b, factor * s.best_k[b], bottom, top)

    return compile_encoder(name, encode)


def build_block_encoder(name, grid=12, start=GRID_START, spacing=GRID_SPACING):
    """Build the encoder of a format with one float16 scale per block.

    grid, start, spacing: see SearchParameters.
    """
    layout, block_bytes, size = LAYOUTS[name], BY_NAME[name].bytes, BY_NAME[name].block
    bottom, top = get_code_range(layout)
    search = SearchParameters(bottom, top, grid, start, spacing, refits=2, rounds=4)
    put_code, d = build_packer(layout.codes, size), layout.d

    def encode(weights, importance, out):
        s = allocate_super_block(1, size, search)
        for row in range(weights.shape[0]):
            for block in range(weights.shape[1] // size):
                into = out[row, block * block_bytes : (block + 1) * block_bytes]
                into[:] = 0
                unit = load_block(weights, importance, row, block * size, size, s)
                scale = search_plain_block(s, search, unit) if unit > 0 else ZERO
                store_half(into, d, scale * unit)
                put_codes(put_code, into, s.x, 0, scale, bottom, top)

    return compile_encoder(name, encode)


def get_code_range(layout):
    """Return the lowest and the highest code, minus the centre, as float32."""
    return f32(-layout.centre), f32((1 << layout.bits) - 1 - layout.centre)


@compile_inline
def put_codes(put, out, x, b, scale, bottom, top):
    inverse = invert(scale)
    for i in range(x.shape[1]):
        code = np.uint8(round_to_code(x[b, i], inverse, bottom, top) - bottom)
        put(out, b * x.shape[1], i, code)


Q8_BYTES, Q8_CODES, Q8_D = BY_NAME["Q8_0"].bytes, LAYOUTS["Q8_0"].codes[0].at, LAYOUTS["Q8_0"].d
MAX_CODE = f32(127)
SCALE_COUNT = (
    6  # scales tried: the largest |weight| / 127, / 126, ...; integer divisors, so that encoding is idempotent
)


@compile_inline
def compute_error(weights, importance, row, start, scale):
    inverse, error = f32(1) / scale, f32(0)
    for i in range(start, start + 32):
        distance = weights[row, i] - scale * round_to_code(weights[row, i], inverse, -MAX_CODE, MAX_CODE)
        error += importance[i] * distance * distance
    return error


@compile_inline
def search_scale(weights, importance, row, start, largest):
    best, least = max(round_to_float16(largest / MAX_CODE), SMALLEST_HALF), HUGE
    for i in range(SCALE_COUNT):
        scale = max(round_to_float16(largest / (MAX_CODE - f32(i))), SMALLEST_HALF)
        error = compute_error(weights, importance, row, start, scale)
        if error < least:
            best, least = scale, error
    return best


@compile_cached
def encode_q8_0(weights, importance, out):
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            into = out[row, block * Q8_BYTES : (block + 1) * Q8_BYTES]
            largest = find_largest(weights, row, block * 32, 32)
            if compute_unit(largest) == 0:
                into[:] = 0
                continue
            scale = search_scale(weights, importance, row, block * 32, largest)
            store_half(into, Q8_D, scale)
            inverse = f32(1) / scale
            for i in range(32):
                into[Q8_CODES + i] = np.uint8(
                    np.int8(round_to_code(weights[row, block * 32 + i], inverse, -MAX_CODE, MAX_CODE))
                )
