"""Quantize activations to 16-bit integers in two planes of bytes: x = scale * (256 * high + low).

32 values share a scale. The high plane alone is the usual int8 quantization (with the scale 256 times as large).
Products with both planes are practically exact, and take two dot products instead of one; matmul_quantized.py defines
which kernels use both. If one of the 32 values is not finite, the scale is NaN, and so is every product.

In runs that multiply the high plane only, two neighbouring scales are replaced by the larger one if they differ by at
most a factor of 2; gemm_int8.py then takes 5 % less time. The high plane's error becomes 3.5e-5 of a product's mean
square instead of 2.9e-5 (normally distributed values). If all neighbours shared a scale, the errors of a real model's
logits would grow by half; with this limit they do not grow, because the few columns with large values keep their own
scales.

Results:

- high, low: striped like the codes of weights (formats/group_format.py), in groups of 256 columns and chunks of 64
- words, on CPUs that multiply them (gemm_int16.py): both planes in one 16-bit integer, striped in the same way, but of
  every 4 columns the even ones come first
- scales, and sums times the scale, of both planes and of the high one, over 32 and over 16 values. They are multiplied
  by minimums, and by the offsets of the weights' codes. There is a slot for every 16 values, as in striped dot
  products, so a value for 32 columns is stored twice
- excess: the high plane's integer sums over 32 columns, times minus the offset of the weights' bytes in gemm_int8.py.
  CPUs that multiply words get the integer sums over 16 columns instead, int16
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels import simd
from localllm.kernels.cpu.matmul.gemm_int8 import BYTE_OFFSET
from localllm.kernels.cpu.matmul.gemm_int16 import HAS_AVX2_DOTS
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import QUANTIZE

LARGEST = float32(127 * 256)
MAX_SCALE_RATIO = float32(2)  # scales that differ by at most this factor are merged
down_8, up_8 = simd.make_shift_i32(False, 8), simd.make_shift_i32(True, 8)
EVEN_FIRST = [4 * quad + i for quad in range(4) for i in (0, 2, 1, 3)]
first_8 = simd.make_shuffle(simd.u8x8, simd.u8x16, range(8))
last_8 = simd.make_shuffle(simd.u8x8, simd.u8x16, range(8, 16))


@simd.operation(None, simd.i32x16, types.int64, types.int64)
def store_as_words(builder, codes, words, stripe):
    """Store 16 integers as 16-bit words, even ones of every 4 first; the last 8 go to the next stripe."""
    codes = builder.trunc(codes, ir.VectorType(simd.I16, 16))
    for half in (0, 8):
        place = builder.add(words, builder.mul(stripe, simd.I64(half // 4)))
        simd.store_value(builder, place, simd.shuffle_lanes(builder, codes, codes, EVEN_FIRST[half : half + 8]))


@device
def quantize_16(x, inverse, step, high, low, words, stripe, sums, high_sums):
    """Quantize half a run and store it; return its integer sums, of both planes and of the high one.

    high, low, words: addresses of the first stripe; stripe: bytes to the next stripe.
    """
    codes = simd.int_f32x16(simd.round_f32x16(simd.load_f32x16(x) * simd.splat_f32x16(inverse)))
    upper = down_8(codes + simd.splat_i32x16(128))
    upper_bytes, lower_bytes = simd.bytes_i32x16(upper), simd.bytes_i32x16(codes - up_8(upper))
    simd.store_u8x8(high, first_8(upper_bytes))
    simd.store_u8x8(high + stripe, last_8(upper_bytes))
    simd.store_u8x8(low, first_8(lower_bytes))
    simd.store_u8x8(low + stripe, last_8(lower_bytes))
    if HAS_AVX2_DOTS:
        store_as_words(codes, words, stripe)
    total, upper_total = simd.sum_i32x16(codes), simd.sum_i32x16(upper)
    simd.store_f32(sums, float32(total) * step)
    simd.store_f32(high_sums, float32(upper_total) * step)
    return total, upper_total


@device
def store_twice(address, value):
    simd.store_f32(address, value)
    simd.store_f32(address + 4, value)


@device
def locate_stripe(run, whole):
    """Return the offset of a run's first stripe, and the distance between its stripes.

    whole: number of runs that are in whole groups.
    """
    if run < whole:
        return run // 8 * 256 + run % 8 * 8, 64
    return run // 2 * 64 + run % 2 * 8, 16


@device
def quantize_run(x, largest, a, token, run, whole):
    """Quantize a run of a token; largest: the largest magnitude of the values that share the scale."""
    columns = load_argument(a, QUANTIZE.columns)
    i = token * (columns // 32) + run
    step, inverse = largest / LARGEST, LARGEST / largest if largest > 0 else float32(0.0)
    if not largest < simd.INFINITY:
        step = simd.NAN
    place, stripe = locate_stripe(run, whole)
    place += token * columns
    high, low = load_argument(a, QUANTIZE.high) + place, load_argument(a, QUANTIZE.low) + place
    words = load_argument(a, QUANTIZE.words) + 2 * place
    sums, high_sums = load_argument(a, QUANTIZE.sums_16) + i * 8, load_argument(a, QUANTIZE.high_sums_16) + i * 8
    first, first_high = quantize_16(x, inverse, step, high, low, words, stripe, sums, high_sums)
    high, low, words = high + 2 * stripe, low + 2 * stripe, words + 4 * stripe
    second, second_high = quantize_16(x + 64, inverse, step, high, low, words, stripe, sums + 4, high_sums + 4)
    store_twice(load_argument(a, QUANTIZE.scales) + i * 8, step)
    store_twice(load_argument(a, QUANTIZE.sums_32) + i * 8, float32(first + second) * step)
    store_twice(load_argument(a, QUANTIZE.high_sums_32) + i * 8, float32(first_high + second_high) * step)
    excess = first_high & 0xFFFF | second_high << 16 if HAS_AVX2_DOTS else (first_high + second_high) * -BYTE_OFFSET
    simd.store_i32(load_argument(a, QUANTIZE.excess) + i * 4, excess)


@device
def find_largest(x):
    """Return the largest magnitude of 32 values; NaN if one of them is NaN."""
    return simd.max_magnitude_f32x16(simd.load_f32x16(x), simd.load_f32x16(x + 64))


@kernel
def quantize(a, part, parts, thread):
    columns, stride = load_argument(a, QUANTIZE.columns), load_argument(a, QUANTIZE.stride)
    whole, tokens = columns // 256 * 8, simd.load_i64(load_argument(a, QUANTIZE.count))
    in_pairs = simd.load_i64(load_argument(a, QUANTIZE.kernel_tokens)) > simd.load_i64(
        load_argument(a, QUANTIZE.most_precise)
    )
    for token in range(tokens * part // parts, tokens * (part + 1) // parts):
        row = load_argument(a, QUANTIZE.x) + token * stride
        for run in range(0, columns // 32, 2):
            x = row + run * 128
            first, second = find_largest(x), find_largest(x + 128)
            if in_pairs and first <= MAX_SCALE_RATIO * second and second <= MAX_SCALE_RATIO * first:
                first = second = max(first, second)
            quantize_run(x, first, a, token, run, whole)
            quantize_run(x + 128, second, a, token, run + 1, whole)
