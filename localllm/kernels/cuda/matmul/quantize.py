"""Quantizes activations to 16-bit integers in two planes of bytes: x = scale * (256 * high + low).

32 numbers share a scale. The bytes lie as the threads of linear_planes.py read them:

    codes   int8 [tokens, 4, columns / 32, 16]; of 32 columns, the 4 are: the first 16 of the high plane, the last 16,
            and the same of the low plane
    scales  f32 [tokens, columns / 32]
    sums    f32 [tokens, columns / 16], of the rounded x

If one of 32 numbers is not finite, their scale is NaN, and so is every product.
"""

import math

from numba import cuda

from localllm.kernels.cuda.device import (
    device,
    float32,
    from_lane_xor,
    lane,
    load_4f32,
    load_i64,
    rounded,
    store_f32,
    store_i32,
)

LANES = 4  # threads that share 32 numbers, 8 each
LARGEST = float32(127 * 256)
TINY = float32(1e-30)  # 32 numbers that are all smaller become zeros
NAN, INFINITY = float32(math.nan), float32(math.inf)


@device
def largest_of(a, b):
    """Return the larger number; NaN if one of them is NaN."""
    return b if b > a or b != b else a


@device
def largest_of_4(x):
    """Return the largest magnitude of four numbers; NaN if one of them is NaN."""
    return largest_of(largest_of(abs(x[0]), abs(x[1])), largest_of(abs(x[2]), abs(x[3])))


@device
def put_4(x, inverse, high, low):
    """Quantize four numbers, and store them in both planes; return the sum of their integers."""
    upper, lower, total = 0, 0, 0
    for i in range(4):
        code = rounded(x[i] * inverse)
        above = code + 128 >> 8
        upper |= (above & 0xFF) << 8 * i
        lower |= (code & 0xFF) << 8 * i
        total += code
    store_i32(high, upper)
    store_i32(low, lower)
    return total


@device
def quantize_32(a, b, in_range, units, place, unit, codes, scales, sums):
    """Quantize 32 numbers together with three neighbouring lanes: a and b are the 8 of this lane.

    All lanes of the warp must call it; in_range: whether this lane stores its results. units: units of a row; unit:
    which one; place: index of the unit's scale among all tokens; codes: address of the token's codes.
    """
    part = lane() & LANES - 1
    largest = largest_of(largest_of_4(a), largest_of_4(b))
    largest = largest_of(largest, from_lane_xor(largest, 1))
    largest = largest_of(largest, from_lane_xor(largest, 2))
    finite = largest < INFINITY
    inverse = LARGEST / largest if finite and largest > TINY else float32(0)
    step = largest / LARGEST if finite else NAN
    total = 0
    if in_range and finite:
        high = codes + 16 * (unit + (part >> 1) * units) + 8 * (part & 1)
        low = high + 32 * units
        total = put_4(a, inverse, high, low) + put_4(b, inverse, high + 4, low + 4)
    total = float32(total)
    total += from_lane_xor(total, 1)
    if in_range and part & 1 == 0:
        store_f32(sums + 8 * place + 2 * part, total * step)
        if part == 0:
            store_f32(scales + 4 * place, step)


def quantize_planes(count, x, stride, columns, codes, scales, sums):
    """Quantize all tokens; four threads for every 32 columns."""
    units = columns // 32
    total = load_i64(count) * units
    number = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // LANES
    place = min(number, total - 1)  # all threads of a warp continue, because quantize_32 needs them
    if total == 0:
        return
    token, unit = place // units, place % units
    source = x + token * stride + 128 * unit + 32 * (lane() & LANES - 1)
    quantize_32(
        load_4f32(source), load_4f32(source + 16), number < total, units, place, unit, codes + token * 2 * columns,
        scales, sums,
    )  # fmt: skip
