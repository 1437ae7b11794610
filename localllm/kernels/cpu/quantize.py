"""Activations to 16-bit integers in two planes of bytes: 32 share a scale, x = scale * (256 * high + low).

The high plane alone is the usual int8 quantization (with the scale 256 times as large). Products with both planes are
practically exact and cost two dot products instead of one; see linear_quantized.py for who uses which.

Beside the codes go the sums that formats with a minimum need, already scaled: per 32 and per 16 numbers, of both planes
and of the high one alone.

Arguments: 0 address of the token count, 1 x f32, 2 bytes between tokens of x, 3 columns (a multiple of 32),
4 high int8 [tokens, columns], 5 low int8 [tokens, columns], 6 scales f32 [tokens, columns / 32],
7 sums per 32 f32 [tokens, columns / 32], 8 sums per 16, 9 sums of the high plane per 32, 10 the same per 16.
"""

from numba import float32

from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import (
    abs_f32x16,
    bytes_i32x16,
    int_f32x16,
    largest_f32x16,
    load_f32x16,
    load_i64,
    make_shift_i32,
    max_f32x16,
    round_f32x16,
    splat_f32x16,
    splat_i32x16,
    store_f32,
    store_u8x16,
    sum_i32x16,
)

LARGEST = float32(127 * 256)
down_8, up_8 = make_shift_i32(False, 8), make_shift_i32(True, 8)


@device
def quantize_16(x, inverse, step, high, low, sums, high_sums):
    """Half a sub-block; returns its two integer sums."""
    codes = int_f32x16(round_f32x16(load_f32x16(x) * splat_f32x16(inverse)))
    upper = down_8(codes + splat_i32x16(128))
    store_u8x16(high, bytes_i32x16(upper))
    store_u8x16(low, bytes_i32x16(codes - up_8(upper)))
    total, upper_total = sum_i32x16(codes), sum_i32x16(upper) * 256
    store_f32(sums, float32(total) * step)
    store_f32(high_sums, float32(upper_total) * step)
    return total, upper_total


@kernel
def quantize(a, part, parts, thread):
    blocks = argument(a, 3) // 32
    total = load_i64(argument(a, 0)) * blocks
    for i in range(total * part // parts, total * (part + 1) // parts):
        x = argument(a, 1) + i // blocks * argument(a, 2) + i % blocks * 128
        largest = largest_f32x16(max_f32x16(abs_f32x16(load_f32x16(x)), abs_f32x16(load_f32x16(x + 64))))
        step, inverse = largest / LARGEST, LARGEST / largest if largest > 0 else float32(0.0)
        high, low, sums, high_sums = (
            argument(a, 4) + i * 32, argument(a, 5) + i * 32, argument(a, 8) + i * 8, argument(a, 10) + i * 8
        )  # fmt: skip
        first, first_high = quantize_16(x, inverse, step, high, low, sums, high_sums)
        second, second_high = quantize_16(x + 64, inverse, step, high + 16, low + 16, sums + 4, high_sums + 4)
        store_f32(argument(a, 6) + i * 4, step)
        store_f32(argument(a, 7) + i * 4, float32(first + second) * step)
        store_f32(argument(a, 9) + i * 4, float32(first_high + second_high) * step)
