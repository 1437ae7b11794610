"""Encode IQ4_NL, IQ4_XS and MXFP4, whose 4-bit codes are indices of 16 unevenly spaced values.

    IQ4_NL ("non-linear")  d for 32 weights: weight = d * VALUES[code]
    IQ4_XS                 d for 256 weights, 8 groups with scales of 6 bits: weight = d * (scale - 32) * VALUES[code]
    MXFP4                  e for 32 weights: weight = 2 ** (e - 127) * SIZES[code & 7], the highest bit is the sign

The search of IQ4: given a scale, the best codes are those of the nearest values v. Given codes, the best scale is Σwxv
/ Σwv², which reduces the error Σwx² by (Σwxv)² / Σwv², its gain. Candidate scales of both signs (the values are not
symmetric) are compared by that. The best of each sign is refined: best codes and best scale in turns, at the end only
with scales that can be stored. On random blocks the error comes within 0.1 % of that of the best float16 d.

MXFP4 (OCP Microscaling Formats Specification 1.0, where e is the exponent of the largest weight): the search also tries
one more, which does not clip the largest weight, and up to three less, which suit small weights better.
"""

import math

import numpy as np

from localllm.quant.blocks import SMALLEST_HALF, build_group_packer, normalize, round_to_float16, store_half
from localllm.quant.formats import BY_NAME, DOUBLED_E2M1, IQ4_VALUES, LAYOUTS
from localllm.quant.numba_cache import compile_cached, compile_inline

NL, XS, NL_BYTES, XS_BYTES = LAYOUTS["IQ4_NL"], LAYOUTS["IQ4_XS"], BY_NAME["IQ4_NL"].bytes, BY_NAME["IQ4_XS"].bytes
NL_D, XS_D, NL_CODES, XS_CODES, CENTRE = NL.d, XS.d, NL.codes[0].at, XS.codes[0].at, XS.scale_centre
put_scale = build_group_packer(XS.scales)
VALUES = np.array(IQ4_VALUES, dtype=np.float32)
BORDERS = (VALUES[1:] + VALUES[:-1]) / 2
STEPS = VALUES[1:] - VALUES[:-1]

# Candidates for (largest weight of a group) / scale. A denser list does not help; a narrower one loses up to 1 %.
SCALE_TARGETS = np.array([64, 74, 81, 88, 94, 100, 106, 112, 117, 122, 127, 133, 141, 155, 175, 210], dtype=np.float32)
MAX_TURNS = 8  # maximum number of rounds of fitting d; two or three are usual
TINY = np.float32(1e-20)  # groups whose weights are all below this fraction of the block's largest are zeros
# Candidates for (the group scale of largest magnitude) / d.
D_TARGETS = np.stack([np.arange(start, start + 5, 0.25) for start in (-34, -29, -24, 19, 24, 29)]).astype(np.float32)

# A round must raise the gain by this factor for another round; a smaller increase is rounding error.
MIN_GAIN = np.float32(1 + 1e-6)


@compile_inline
def sum_products(weights, importance, inverse):
    """Return (Σwxv, Σwv²) over 32 weights with the nearest values v for the scale 1 / inverse."""
    product, square = np.float32(0), np.float32(0)
    for i in range(32):
        x = weights[i] * inverse
        value = VALUES[0]
        for k in range(15):
            value += STEPS[k] if x > BORDERS[k] else np.float32(0)
        weighted = importance[i] * value
        product += weighted * weights[i]
        square += weighted * value
    return product, square


@compile_cached
def search_scale(weights, importance, sign):
    """Return the scale of this sign, 1 or -1, with the least error for 32 weights, and its gain.

    If all weights are zero, the scale is arbitrary and the gain 0.
    """
    largest = np.float32(0)
    for i in range(32):
        largest = max(largest, abs(weights[i]) if importance[i] > 0 else np.float32(0))
    scale, gain = TINY, np.float32(0)
    if largest < TINY:
        return scale, gain
    for target in SCALE_TARGETS:
        product, square = sum_products(weights, importance, sign * target / largest)
        if product * product > gain * square:
            scale, gain = product / square, product * product / square
    while gain > 0:
        product, square = sum_products(weights, importance, np.float32(1) / scale)
        if product * product <= gain * MIN_GAIN * square:
            break
        scale, gain = product / square, product * product / square
    return scale, gain


@compile_cached
def round_to_storable(scale, unit):
    """Return the float16 nearest to scale * unit, as a float32; 0 only if the scale is 0."""
    stored = round_to_float16(scale * unit)
    if stored == 0 and scale != 0:
        return math.copysign(SMALLEST_HALF, scale)
    return stored


@compile_cached
def fit_block(weights, importance, unit):
    """Return the best float16 d for 32 weights divided by `unit`."""
    plus, plus_gain = search_scale(weights, importance, np.float32(1))
    minus, minus_gain = search_scale(weights, importance, np.float32(-1))
    d = round_to_storable(plus if plus_gain > minus_gain else minus, unit)
    best, least = np.float32(0), np.float32(0)  # least: the error minus Σwx², which is 0 for d = 0
    for _ in range(MAX_TURNS):
        if d == 0:
            break
        scale = d / unit
        product, square = sum_products(weights, importance, np.float32(1) / scale)
        error = scale * (scale * square - np.float32(2) * product)
        if error >= least:
            break
        best, least = d, error
        d = round_to_storable(product / square, unit)
    return best


@compile_cached
def store_codes(weights, inverse, out):
    """Store the nearest codes of 32 weights in 16 bytes.

    inverse: 1 / scale.
    """
    for i in range(16):
        low, high = 0, 0
        for k in range(15):
            low += weights[i] * inverse > BORDERS[k]
            high += weights[16 + i] * inverse > BORDERS[k]
        out[i] = low | high << 4


@compile_cached
def encode_iq4_nl(weights, importance, out):
    x = np.empty(32, np.float32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            unit = normalize(weights, row, 32 * block, 32, x)
            d = fit_block(x, importance[32 * block : 32 * block + 32], unit) if unit > 0 else np.float32(0)
            bytes = out[row, NL_BYTES * block : NL_BYTES * (block + 1)]
            store_half(bytes, NL_D, d)
            store_codes(x, unit / d if d != 0 else np.float32(0), bytes[NL_CODES:])


@compile_cached
def round_to_multiple(scale, d):
    """Return scale / d, rounded and clamped to a signed 6-bit integer (-32 .. 31)."""
    return min(max(np.rint(scale / d), np.float32(-32)), np.float32(31))


@compile_cached
def choose_d(scales, gains, levels):
    """Return the d whose multiples approximate the scales of the 8 groups best.

    scales, gains: [2 signs, 8]. Candidates: the scale of largest magnitude divided by each of `levels`. With the scale
    multiple * d a group gains about gain * (1 - (1 - multiple * d / scale)²); the better one of its two scales counts.
    """
    extreme = np.float32(0)
    for group in range(8):
        scale = scales[0, group] if gains[0, group] > gains[1, group] else scales[1, group]
        extreme = scale if abs(scale) > abs(extreme) else extreme
    best, most = np.float32(0), np.float32(0)
    for level in levels:
        d = extreme / level
        total = np.float32(0)
        for group in range(8):
            plus = np.float32(1) - round_to_multiple(scales[0, group], d) * d / scales[0, group]
            minus = np.float32(1) - round_to_multiple(scales[1, group], d) * d / scales[1, group]
            total += max(
                gains[0, group] * (np.float32(1) - plus * plus), gains[1, group] * (np.float32(1) - minus * minus)
            )
        if total > most:
            best, most = d, total
    return best


@compile_cached
def choose_multiple(x, w, scales, gains, d):
    """Choose a group's integer scale with the least error: near one of its two scales, or one off.

    Returns the integer, the error without Σwx², Σwxv and Σwv².
    """
    least, best, best_product, best_square = np.float32(0), 0, np.float32(0), np.float32(0)
    first = 0 if gains[0] > gains[1] else 1
    for sign in (first, 1 - first):
        if least <= -gains[sign]:
            break
        center = int(round_to_multiple(scales[sign], d))
        for multiple in range(max(center - 1, -32), min(center + 1, 31) + 1):
            if multiple == 0:
                continue
            scale = d * np.float32(multiple)
            product, square = sum_products(x, w, np.float32(1) / scale)
            error = scale * (scale * square - np.float32(2) * product)
            if error < least:
                least, best, best_product, best_square = error, multiple, product, square
    return best, least, best_product, best_square


@compile_cached
def choose_multiples(x, w, scales, gains, d, multiples):
    """Choose the integer scales of the 8 groups, given d; return the error without Σwx², and the best d for them."""
    error, product, square = np.float32(0), np.float32(0), np.float32(0)
    for group in range(8):
        part = slice(32 * group, 32 * group + 32)
        multiple, e, p, q = choose_multiple(x[part], w[part], scales[:, group], gains[:, group], d)
        multiples[group] = multiple
        error += e
        product += np.float32(multiple) * p
        square += np.float32(multiple * multiple) * q
    return error, product / square


@compile_cached
def fit_super_block(x, w, unit, scales, gains, multiples, best_multiples):
    """Return the best d for 256 weights divided by `unit`, and write the integer scales to best_multiples."""
    for group in range(8):
        part = slice(32 * group, 32 * group + 32)
        scales[0, group], gains[0, group] = search_scale(x[part], w[part], np.float32(1))
        scales[1, group], gains[1, group] = search_scale(x[part], w[part], np.float32(-1))
    best, least, following = np.float32(0), np.float32(0), np.float32(0)  # least: the error minus Σwx², 0 for d = 0
    for levels in D_TARGETS:
        d = round_to_storable(choose_d(scales, gains, levels), unit)
        error, next_d = choose_multiples(x, w, scales, gains, d / unit, multiples)
        if error < least:
            best, least, following = d, error, round_to_storable(next_d, unit)
            best_multiples[:] = multiples
    for _ in range(MAX_TURNS):
        d = following
        error, next_d = choose_multiples(x, w, scales, gains, d / unit, multiples)
        if error >= least:
            break
        best, least, following = d, error, round_to_storable(next_d, unit)
        best_multiples[:] = multiples
    return best


@compile_cached
def store_super_block(x, unit, d, multiples, out):
    out[:XS_CODES] = 0
    store_half(out, XS_D, d)
    for group in range(8):
        put_scale(out, group, multiples[group] + CENTRE)
        scale = d * np.float32(multiples[group])
        inverse = unit / scale if scale != 0 else np.float32(0)
        store_codes(x[32 * group : 32 * group + 32], inverse, out[XS_CODES + 16 * group :])


@compile_cached
def encode_iq4_xs(weights, importance, out):
    x = np.empty(256, np.float32)
    scales, gains = np.empty((2, 8), np.float32), np.empty((2, 8), np.float32)
    multiples, best_multiples = np.zeros(8, np.int32), np.zeros(8, np.int32)
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 256):
            unit = normalize(weights, row, 256 * block, 256, x)
            w = importance[256 * block : 256 * block + 256]
            d = np.float32(0)
            best_multiples[:] = 0
            if unit > 0:
                d = fit_super_block(x, w, unit, scales, gains, multiples, best_multiples)
            store_super_block(x, unit, d, best_multiples, out[row, XS_BYTES * block : XS_BYTES * (block + 1)])


MX_BYTES, MX_CODES = BY_NAME["MXFP4"].bytes, LAYOUTS["MXFP4"].codes[0].at
MX_SCALE = LAYOUTS["MXFP4"].scales[0].locate(0)[0]
SIZES = np.array(DOUBLED_E2M1[:8], dtype=np.float32) / 2
SIZE_BORDERS = (SIZES[1:] + SIZES[:-1]) / 2
SIZE_STEPS = SIZES[1:] - SIZES[:-1]

# Exponents tried, relative to the one with which the largest weight is 4 .. 8. Without importance the best is never
# below -1: the largest weight alone would then cost more than the others could save.
MIN_EXPONENT_OFFSET, MAX_EXPONENT_OFFSET = -3, 1
LARGEST_EXPONENT = 252  # with one more, 6 times the scale would be infinite


@compile_cached
def compute_error(weights, importance, scale):
    """Return Σ importance * (weight * scale - nearest value)² over 32 weights."""
    error = np.float32(0)
    for i in range(32):
        size = abs(weights[i] * scale)
        value = np.float32(0)
        for k in range(7):
            value += SIZE_STEPS[k] if size > SIZE_BORDERS[k] else np.float32(0)
        error += importance[i] * (size - value) ** 2
    return error


@compile_cached
def compute_power(exponent):
    """Return 2 ** exponent as a float32, for exponents from -126 to 127."""
    return np.int32((exponent + 127) << 23).view(np.float32)


@compile_cached
def get_exponent(number):
    """Return the 8 bits of a float32's exponent: 127 for 1 .. 2, 0 for zero and subnormal numbers."""
    return np.float32(number).view(np.int32) >> 23 & 255


@compile_cached
def search_exponent(weights, importance):
    """Return the e with the least weighted error for 32 weights, the larger one of equals."""
    largest = np.float32(0)
    for i in range(32):
        largest = max(largest, abs(weights[i]))
    start = get_exponent(largest) - 2
    best, least = 0, np.float32(np.inf)
    for e in range(min(start + MAX_EXPONENT_OFFSET, LARGEST_EXPONENT), max(start + MIN_EXPONENT_OFFSET, 0) - 1, -1):
        error = compute_error(weights, importance, compute_power(127 - e)) * compute_power(2 * (e - start))
        if error < least:
            best, least = e, error
    return best


@compile_cached
def encode_block(weights, importance, out):
    e = search_exponent(weights, importance)
    scale = compute_power(127 - e)
    out[MX_SCALE] = e
    for i in range(16):
        out[MX_CODES + i] = find_code(weights[i] * scale) | find_code(weights[16 + i] * scale) << 4


@compile_cached
def find_code(weight):
    """Return the code of the value nearest to a scaled weight; zero has no sign."""
    index = 0
    for k in range(7):
        index += abs(weight) > SIZE_BORDERS[k]
    return index | 8 if weight < -SIZE_BORDERS[0] else index


@compile_cached
def encode_mxfp4(weights, importance, out):
    for row in range(weights.shape[0]):
        for block in range(weights.shape[1] // 32):
            part = slice(32 * block, 32 * block + 32)
            encode_block(weights[row, part], importance[part], out[row, MX_BYTES * block : MX_BYTES * (block + 1)])
