"""Search for blocks of `low + scale * code` with codes 0..top: Q4_1, Q5_1, Q2_K, Q4_K, Q5_K.

All errors are weighted: Σw(x - decoded)². For given codes the best scale and low solve two linear equations in five
sums over the block, and the error follows from the sums, without a second pass over the weights.

A super-block has one pair of factors for all its sub-blocks: scale = factor * k, low = -low_factor * m, with integers k
and m in 0..steps. The search has three stages:

1. for each sub-block alone and each scale of a grid: round to codes, compute the best scale and low, three times;
2. choose the factors whose multiples come nearest to the scales and lows, by the error that the sums predict;
3. until nothing improves: fit integers and codes to the factors, then factors to the integers and codes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.quant.blocks import build_group_packer, build_packer, load_block, round_to_float16, store_half
from localllm.quant.formats import BY_NAME, LAYOUTS
from localllm.quant.numba_cache import compile_cached, compile_encoder, compile_inline

f32 = np.float32
ZERO, ONE, TWO, HUGE, TINY = f32(0), f32(1), f32(2), f32(3e38), f32(1e-6)

GRID_SIZE = 12  # scales tried per sub-block, from (largest - lowest) / (top - 1.4) to (largest - lowest) / (top + 2.45)
GRID_START, GRID_STEP = f32(-1.4), f32(0.35)
REFITS = 3
FACTOR_COUNT = 32  # factors tried: the largest scale by steps, steps - 1, ... for 63 steps, steps - 1/4, ... for 15
ROUNDS = 4


class AffineSuperBlock(NamedTuple):
    """The state of a search. x, weight: float32 [sub-blocks, size]; all other fields [sub-blocks] unless noted."""

    x: NDArray
    weight: NDArray
    sum_w: NDArray
    sum_wx: NDArray
    sum_wxx: NDArray
    scale: NDArray  # the result of stage 1, any float32
    low: NDArray
    sum_wl: NDArray  # sums with the latest codes l
    sum_wll: NDArray
    sum_wlx: NDArray
    k: NDArray  # the integers of stage 3
    m: NDArray
    best_k: NDArray
    best_m: NDArray
    grid_scale: NDArray  # [GRID], for stage 1
    grid_low: NDArray
    factor: NDArray  # [FACTORS], for stage 2
    error: NDArray


@compile_inline
def allocate_super_block(blocks, size):
    x, w, rows = np.zeros((blocks, size), f32), np.zeros((blocks, size), f32), np.zeros((12, blocks), f32)
    grid, factors = np.zeros((2, GRID_SIZE), f32), np.zeros((2, FACTOR_COUNT), f32)
    return AffineSuperBlock(
        x, w, rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7], rows[8], rows[9], rows[10],
        rows[11], grid[0], grid[1], factors[0], factors[1],
    )  # fmt: skip


@compile_inline
def round_to_code(x, low, inverse, top):
    """Return the nearest code of a weight.

    inverse: 1 / scale.
    """
    return min(max(np.rint((x - low) * inverse), ZERO), top)


@compile_inline
def invert(scale):
    return ONE / scale if scale > ZERO else ZERO


@compile_inline
def sum_codes(x, weight, b, scale, low, top):
    """Return Σwl, Σwll and Σwlx over sub-block b with the nearest codes l."""
    inverse = invert(scale)
    wl, wll, wlx = ZERO, ZERO, ZERO
    for i in range(x.shape[1]):
        code = round_to_code(x[b, i], low, inverse, top)
        product = weight[b, i] * code
        wl += product
        wll += product * code
        wlx += product * x[b, i]
    return wl, wll, wlx


@compile_inline
def compute_error(x, weight, b, scale, low, top):
    inverse, error = invert(scale), ZERO
    for i in range(x.shape[1]):
        distance = x[b, i] - low - scale * round_to_code(x[b, i], low, inverse, top)
        error += weight[b, i] * distance * distance
    return error


@compile_inline
def fit_scale_and_low(w, wx, wl, wll, wlx, highest):
    """Return the scale and the low (at most `highest`) with the least error.

    The arguments are Σw, Σwx, Σwl, Σwll and Σwlx over the block.
    """
    determinant = w * wll - wl * wl
    scale = (w * wlx - wx * wl) / determinant if determinant > TINY * w * wll else ZERO  # else one code for all
    low = (wx - scale * wl) / w
    if low > highest:
        low = highest
        scale = (wlx - low * wl) / wll if wll > ZERO else ZERO
    return max(scale, ZERO), low


@compile_inline
def predict_error(w, wx, wxx, wl, wll, wlx, scale, low):
    """Return the error Σw(x - low - scale * l)² without the weights, from Σw, Σwx, Σwxx, Σwl, Σwll and Σwlx."""
    return wxx + scale * (scale * wll - TWO * wlx) + low * (low * w - TWO * wx + TWO * scale * wl)


@compile_inline
def round_scale(value, unit):
    """Round `value` so that value * unit is a float16, and 0 only if `value` is not positive."""
    return max(round_to_float16(value * unit), f32(2.0**-24)) / unit if value > ZERO else ZERO


@compile_inline
def search_block(s, b, top, highest):
    """Find the scale and the low of sub-block b, and the sums over its codes: stage 1."""
    x, weight = s.x, s.weight
    lowest, largest = min(x[b, 0], highest), x[b, 0]
    w, wx, wxx = ZERO, ZERO, ZERO
    for i in range(x.shape[1]):
        lowest, largest = min(lowest, x[b, i]), max(largest, x[b, i])
        w += weight[b, i]
        wx += weight[b, i] * x[b, i]
        wxx += weight[b, i] * x[b, i] * x[b, i]
    s.sum_w[b], s.sum_wx[b], s.sum_wxx[b] = w, wx, wxx
    for step in range(GRID_SIZE):
        scale = (largest - lowest) / (top + GRID_START + GRID_STEP * f32(step))
        s.grid_scale[step] = scale
        s.grid_low[step] = lowest if step % 2 else largest - scale * top  # clips either end in turn
    least = HUGE
    for refit in range(REFITS):  # the outer loop, so that the processor works on several scales at once
        for step in range(GRID_SIZE):
            wl, wll, wlx = sum_codes(x, weight, b, s.grid_scale[step], s.grid_low[step], top)
            scale, low = fit_scale_and_low(w, wx, wl, wll, wlx, highest)
            s.grid_scale[step], s.grid_low[step] = scale, low
            error = predict_error(w, wx, wxx, wl, wll, wlx, scale, low)
            if refit == REFITS - 1 and error < least:
                least = error
                s.scale[b], s.low[b] = scale, low
                s.sum_wl[b], s.sum_wll[b], s.sum_wlx[b] = wl, wll, wlx


@compile_inline
def search_factor(s, target, curvature, steps, unit):
    """Return the factor whose multiples 0..steps come nearest to `target`: stage 2.

    target: [sub-blocks], none negative. curvature: [sub-blocks], the weights of squared differences.
    """
    largest = ZERO
    for b in range(target.size):
        largest = max(largest, target[b])
    spacing = (steps + ONE) / f32(64)
    for i in range(FACTOR_COUNT):
        s.factor[i] = round_scale(largest / (steps - f32(i) * spacing), unit)
        s.error[i] = ZERO
    for b in range(target.size):
        for i in range(FACTOR_COUNT):
            distance = target[b] - s.factor[i] * min(np.rint(target[b] * invert(s.factor[i])), steps)
            s.error[i] += distance * distance * curvature[b]
    return s.factor[np.argmin(s.error)]


@compile_inline
def search_factors(s, steps, unit):
    """Return both factors, and write the nearest integers for them to s.k and s.m: stage 2."""
    curvature, depth = s.best_k, s.best_m  # temporary memory: stage 3 fills these arrays later
    for b in range(s.k.size):  # curvature: the cost of changing the scale, to which a low below 0 is adapted
        along = s.sum_wl[b] * s.sum_wl[b] / s.sum_w[b] if s.low[b] < ZERO else ZERO
        curvature[b] = max(s.sum_wll[b] - along, ZERO)
    factor = search_factor(s, s.scale, curvature, steps, unit)
    for b in range(s.k.size):
        s.k[b] = min(np.rint(s.scale[b] * invert(factor)), steps)
        depth[b] = max((factor * s.k[b] * s.sum_wl[b] - s.sum_wx[b]) / s.sum_w[b], ZERO)
    low_factor = search_factor(s, depth, s.sum_w, steps, unit)
    for b in range(s.k.size):
        s.m[b] = min(np.rint(depth[b] * invert(low_factor)), steps)
    return factor, low_factor


@compile_inline
def round_block(s, b, top, steps, factor, low_factor):
    """Choose k and m near the present ones, update the sums, and return the error: stage 3."""
    w, wx, wxx = s.sum_w[b], s.sum_wx[b], s.sum_wxx[b]
    low_inverse = invert(low_factor)
    start_k, start_low = s.k[b], -low_factor * s.m[b]
    least = HUGE
    for step in range(-1, 2):
        k = start_k + f32(step)
        if k < ZERO or k > steps:
            continue
        scale = factor * k
        wl, wll, wlx = sum_codes(s.x, s.weight, b, scale, start_low, top)
        m = min(max(np.rint((scale * wl - wx) / w * low_inverse), ZERO), steps)
        error = predict_error(w, wx, wxx, wl, wll, wlx, scale, -low_factor * m)
        if error < least:
            least = error
            s.k[b], s.m[b] = k, m
    scale, low = factor * s.k[b], -low_factor * s.m[b]
    wl, wll, wlx = sum_codes(s.x, s.weight, b, scale, low, top)
    s.sum_wl[b], s.sum_wll[b], s.sum_wlx[b] = wl, wll, wlx
    return predict_error(w, wx, wxx, wl, wll, wlx, scale, low)


@compile_inline
def refit_factors(s, unit, factor, low_factor):
    """Return the factors with the least error for the present integers and codes: stage 3."""
    kk, km, mm, kx, mx = ZERO, ZERO, ZERO, ZERO, ZERO
    for b in range(s.k.size):
        k, m = s.k[b], s.m[b]
        kk += k * k * s.sum_wll[b]
        km += k * m * s.sum_wl[b]
        mm += m * m * s.sum_w[b]
        kx += k * s.sum_wlx[b]
        mx += m * s.sum_wx[b]
    determinant = kk * mm - km * km
    if determinant > TINY * kk * mm:
        factor = round_scale((kx * mm - mx * km) / determinant, unit)
    elif kk > ZERO:
        factor = round_scale((kx + low_factor * km) / kk, unit)
    if mm > ZERO:
        low_factor = round_scale((factor * km - mx) / mm, unit)
    return factor, low_factor


@compile_cached
def search_super_block(s, top, steps, unit):
    """Run all three stages; return both factors, and write the integers to s.best_k and s.best_m."""
    for b in range(s.k.size):
        search_block(s, b, top, ZERO)
    factor, low_factor = search_factors(s, steps, unit)
    best_factor, best_low_factor, least = factor, low_factor, HUGE
    for _ in range(ROUNDS):
        error = ZERO
        for b in range(s.k.size):
            error += round_block(s, b, top, steps, factor, low_factor)
        if error >= least:
            break
        best_factor, best_low_factor, least = factor, low_factor, error
        for b in range(s.k.size):
            s.best_k[b], s.best_m[b] = s.k[b], s.m[b]
        factor, low_factor = refit_factors(s, unit, factor, low_factor)
    return best_factor, best_low_factor


@compile_cached
def search_plain_block(s, top, unit):
    """Return the scale and the low, both float16 and of any sign, of a block without sub-blocks."""
    search_block(s, 0, top, HUGE)
    w, wx, wxx = s.sum_w[0], s.sum_wx[0], s.sum_wxx[0]
    scale, low, wl, wll, wlx = s.scale[0], s.low[0], s.sum_wl[0], s.sum_wll[0], s.sum_wlx[0]
    best_scale, best_low, least = scale, low, HUGE
    for _ in range(ROUNDS):
        scale = round_scale(scale, unit)
        low = round_to_float16((wx - scale * wl) / w * unit) / unit
        wl, wll, wlx = sum_codes(s.x, s.weight, 0, scale, low, top)
        error = predict_error(w, wx, wxx, wl, wll, wlx, scale, low)
        if error >= least:
            break
        best_scale, best_low, least = scale, low, error
        scale, low = fit_scale_and_low(w, wx, wl, wll, wlx, HUGE)
    return best_scale, choose_low(s, best_scale, best_low, top, unit)


@compile_inline
def choose_low(s, scale, low, top, unit):
    """Return the low with the least error among three: for all codes one less, unchanged, and one more.

    float16 rounds each of them differently. The error is computed from the weights, not from the sums, whose rounding
    errors would spoil weights that can be represented exactly.
    """
    wl, _, _ = sum_codes(s.x, s.weight, 0, scale, low, top)
    free_low = (s.sum_wx[0] - scale * wl) / s.sum_w[0]
    best, least = low, HUGE
    for shift in range(-1, 2):
        shifted = round_to_float16((free_low + f32(shift) * scale) * unit) / unit
        error = compute_error(s.x, s.weight, 0, scale, shifted, top)
        if error < least:
            best, least = shifted, error
    return best


def build_super_block_encoder(name):
    """Build the encoder of a format with super-blocks: d and low per block, two integers per sub-block.

    The integers are the scale and the minimum of the sub-block.
    """
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes
    size, blocks, top = layout.group, 256 // layout.group, f32((1 << layout.bits) - 1)
    steps = f32((1 << sum(field.bits for field in layout.scales)) - 1)
    put_code, put_scale, put_minimum = (
        build_packer(layout.codes, size),
        build_group_packer(layout.scales),
        build_group_packer(layout.minimums),
    )
    d, d_low = layout.d, layout.low

    def encode(weights, importance, out):
        s = allocate_super_block(blocks, size)
        for row in range(weights.shape[0]):
            for block in range(weights.shape[1] // 256):
                into = out[row, block * block_bytes : (block + 1) * block_bytes]
                into[:] = 0
                unit = load_block(weights, importance, row, block * 256, 256, s)
                if unit == 0:
                    continue
                factor, low_factor = search_super_block(s, top, steps, unit)
                store_half(into, d, factor * unit)
                store_half(into, d_low, low_factor * unit)
                for b in range(blocks):
                    put_scale(into, b, np.uint8(s.best_k[b]))
                    put_minimum(into, b, np.uint8(s.best_m[b]))
                for b in range(blocks):
                    scale, low = factor * s.best_k[b], -low_factor * s.best_m[b]
                    put_codes(put_code, into, s.x, b, scale, low, top)

    return compile_encoder(name, encode)


def build_block_encoder(name):
    """Build the encoder of a format with blocks of 32 weights, whose scale and low are float16."""
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes
    put_code, d, d_low, top = build_packer(layout.codes, 32), layout.d, layout.low, f32((1 << layout.bits) - 1)

    def encode(weights, importance, out):
        s = allocate_super_block(1, 32)
        for row in range(weights.shape[0]):
            for block in range(weights.shape[1] // 32):
                into = out[row, block * block_bytes : (block + 1) * block_bytes]
                into[:] = 0
                unit = load_block(weights, importance, row, block * 32, 32, s)
                if unit == 0:
                    continue
                scale, low = search_plain_block(s, top, unit)
                store_half(into, d, scale * unit)
                store_half(into, d_low, low * unit)
                put_codes(put_code, into, s.x, 0, scale, low, top)

    return compile_encoder(name, encode)


@compile_inline
def put_codes(put, out, x, b, scale, low, top):
    inverse = invert(scale)
    for i in range(x.shape[1]):
        code = np.uint8(round_to_code(x[b, i], low, inverse, top))
        put(out, b * x.shape[1], i, code)
