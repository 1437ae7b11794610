"""Activations to int8: 32 share a scale, the largest becomes 127 or -127.

Beside the codes go the sums that formats with a minimum need, already scaled: scale * sum of codes, per 32 and per 16.

Arguments: 0 address of the token count, 1 x f32, 2 bytes between tokens of x, 3 columns (a multiple of 32),
4 codes int8 [tokens, columns], 5 scales f32 [tokens, columns / 32], 6 sums per 32, 7 sums per 16.
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
    max_f32x16,
    round_f32x16,
    splat_f32x16,
    store_f32,
    store_u8x16,
    sum_i32x16,
)


@device
def quantize_32(x, codes, scale, sum_32, sums_16):
    """One sub-block."""
    low, high = load_f32x16(x), load_f32x16(x + 64)
    largest = largest_f32x16(max_f32x16(abs_f32x16(low), abs_f32x16(high)))
    inverse = splat_f32x16(float32(127.0) / largest if largest > 0 else float32(0.0))
    low_codes, high_codes = int_f32x16(round_f32x16(low * inverse)), int_f32x16(round_f32x16(high * inverse))
    store_u8x16(codes, bytes_i32x16(low_codes))
    store_u8x16(codes + 16, bytes_i32x16(high_codes))
    step = largest / float32(127.0)
    store_f32(scale, step)
    low_sum, high_sum = sum_i32x16(low_codes), sum_i32x16(high_codes)
    store_f32(sums_16, float32(low_sum) * step)
    store_f32(sums_16 + 4, float32(high_sum) * step)
    store_f32(sum_32, float32(low_sum + high_sum) * step)


@kernel
def quantize(a, part, parts, thread):
    blocks = argument(a, 3) // 32
    total = load_i64(argument(a, 0)) * blocks
    for i in range(total * part // parts, total * (part + 1) // parts):
        x = argument(a, 1) + i // blocks * argument(a, 2) + i % blocks * 128
        quantize_32(
            x, argument(a, 4) + i * 32, argument(a, 5) + i * 4, argument(a, 6) + i * 4, argument(a, 7) + i * 8
        )  # fmt: skip
