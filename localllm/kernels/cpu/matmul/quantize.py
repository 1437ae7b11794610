"""Quantize activations to 16-bit integers in two planes of bytes.

32 numbers share a scale: x = scale * (256 * high + low).

In runs with more tokens than both planes are multiplied for, two neighbouring scales are replaced by one if they are of
about the same size: gemm_int8.py takes 5 % less time then. The high plane's error becomes 3.5e-5 of a product's mean
square instead of 2.9e-5 (normally distributed numbers). If all neighbours shared a scale, the errors of a real model's
logits would grow by half; as it is they do not grow, because the few columns with large numbers keep scales of their
own.

The high plane alone is the usual int8 quantization (with the scale 256 times as large). Products with both planes are
practically exact and cost two dot products instead of one; matmul_quantized.py says which kernels use both. Where one
of the 32 is not finite, the scale is NaN, and so is every product.

The bytes are striped like the codes of weights (group_format.py): in each 256 columns, numbers 8 q to 8 q + 7 of all
eight runs of 32 follow each other; columns that make no whole 256 are striped two runs at a time.

Where words are multiplied (avx2_dots.py), both planes are also written as one plane of 16-bit words, striped in the
same way; of every 4 columns, the even ones come first.

Next to the codes are scaled sums of both planes and of the high one, per 32 and per 16 numbers: they are multiplied
with minimums, and with the offsets of the weights' codes. Scales and sums have a place for every 16 numbers, like the
lanes of striped dot products, so what belongs to 32 numbers is stored twice. The excess is the high plane's sums of
integers per 32, times the negative offset of the weights' bytes in gemm_int8.py; where words are multiplied, it is the
sums of integers per 16, in 16 bits.
"""

from llvmlite import ir
from numba import float32, types

from localllm.kernels.arguments import QUANTIZE
from localllm.kernels.cpu.matmul.avx2_dots import HAS_AVX2_DOTS
from localllm.kernels.cpu.matmul.requantize_tile import BYTE_OFFSET
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    I16,
    I64,
    INFINITY,
    NAN,
    bytes_i32x16,
    i32x16,
    int_f32x16,
    largest_size_f32x16,
    load_f32x16,
    load_i64,
    make_shift_i32,
    make_shuffle,
    operation,
    round_f32x16,
    shuffled,
    splat_f32x16,
    splat_i32x16,
    store_f32,
    store_i32,
    store_u8x8,
    store_value,
    sum_i32x16,
    u8x8,
    u8x16,
)

LARGEST = float32(127 * 256)
ALIKE = float32(2)  # how many times as large
down_8, up_8 = make_shift_i32(False, 8), make_shift_i32(True, 8)
EVEN_FIRST = [4 * quad + i for quad in range(4) for i in (0, 2, 1, 3)]
first_8, last_8 = make_shuffle(u8x8, u8x16, range(8)), make_shuffle(u8x8, u8x16, range(8, 16))


@operation(None, i32x16, types.int64, types.int64)
def store_as_words(builder, codes, words, stripe):
    """Store 16 numbers as words, of each 4 the even ones first; the second half goes to the next stripe."""
    codes = builder.trunc(codes, ir.VectorType(I16, 16))
    for half in (0, 8):
        place = builder.add(words, builder.mul(stripe, I64(half // 4)))
        store_value(builder, place, shuffled(builder, codes, codes, EVEN_FIRST[half : half + 8]))


@device
def quantize_16(x, inverse, step, high, low, words, stripe, sums, high_sums):
    """Quantize half a run and return its two sums."""
    codes = int_f32x16(round_f32x16(load_f32x16(x) * splat_f32x16(inverse)))
    upper = down_8(codes + splat_i32x16(128))
    upper_bytes, lower_bytes = bytes_i32x16(upper), bytes_i32x16(codes - up_8(upper))
    store_u8x8(high, first_8(upper_bytes))
    store_u8x8(high + stripe, last_8(upper_bytes))
    store_u8x8(low, first_8(lower_bytes))
    store_u8x8(low + stripe, last_8(lower_bytes))
    if HAS_AVX2_DOTS:
        store_as_words(codes, words, stripe)
    total, upper_total = sum_i32x16(codes), sum_i32x16(upper)
    store_f32(sums, float32(total) * step)
    store_f32(high_sums, float32(upper_total) * step)
    return total, upper_total


@device
def store_twice(address, value):
    store_f32(address, value)
    store_f32(address + 4, value)


@device
def striped_place(run, whole):
    """Return the offset of the first bytes of run number `run` in a row, and the distance of its stripes."""
    if run < whole:
        return run // 8 * 256 + run % 8 * 8, 64
    return run // 2 * 64 + run % 2 * 8, 16


@device
def quantize_run(x, largest, a, token, run, whole):
    """Quantize run number `run` of a token, at address x.

    whole: the number of runs in whole groups of 256 columns.  largest: the largest magnitude among the numbers that
    share its scale.
    """
    columns = argument(a, QUANTIZE.columns)
    i = token * (columns // 32) + run
    step, inverse = largest / LARGEST, LARGEST / largest if largest > 0 else float32(0.0)
    if not largest < INFINITY:
        step = NAN
    place, stripe = striped_place(run, whole)
    place += token * columns
    high, low = argument(a, QUANTIZE.high) + place, argument(a, QUANTIZE.low) + place
    words = argument(a, QUANTIZE.words) + 2 * place
    sums, high_sums = argument(a, QUANTIZE.sums_16) + i * 8, argument(a, QUANTIZE.high_sums_16) + i * 8
    first, first_high = quantize_16(x, inverse, step, high, low, words, stripe, sums, high_sums)
    high, low, words = high + 2 * stripe, low + 2 * stripe, words + 4 * stripe
    second, second_high = quantize_16(x + 64, inverse, step, high, low, words, stripe, sums + 4, high_sums + 4)
    store_twice(argument(a, QUANTIZE.scales) + i * 8, step)
    store_twice(argument(a, QUANTIZE.sums_32) + i * 8, float32(first + second) * step)
    store_twice(argument(a, QUANTIZE.high_sums_32) + i * 8, float32(first_high + second_high) * step)
    excess = first_high & 0xFFFF | second_high << 16 if HAS_AVX2_DOTS else (first_high + second_high) * -BYTE_OFFSET
    store_i32(argument(a, QUANTIZE.excess) + i * 4, excess)


@device
def largest_of(x):
    return largest_size_f32x16(load_f32x16(x), load_f32x16(x + 64))


@kernel
def quantize(a, part, parts, thread):
    columns, stride = argument(a, QUANTIZE.columns), argument(a, QUANTIZE.stride)
    whole, tokens = columns // 256 * 8, load_i64(argument(a, QUANTIZE.count))
    in_pairs = tokens > load_i64(argument(a, QUANTIZE.most_precise))
    for token in range(tokens * part // parts, tokens * (part + 1) // parts):
        row = argument(a, QUANTIZE.x) + token * stride
        for run in range(0, columns // 32, 2):
            x = row + run * 128
            first, second = largest_of(x), largest_of(x + 128)
            if in_pairs and first <= ALIKE * second and second <= ALIKE * first:
                first = second = max(first, second)
            quantize_run(x, first, a, token, run, whole)
            quantize_run(x + 128, second, a, token, run + 1, whole)
