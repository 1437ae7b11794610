"""How the KV cache keeps a head of a token: F32, F16, or Q8_0 as in GGML.

F32 and F16 are padded to 16 dimensions. Q8_0 is padded to blocks of 32: a float16 scale, then 32 signed bytes; scale
times byte is exact in float32.

What cannot be kept as a finite number is kept as NaN, in Q8_0 the whole block: a score of minus infinity would look
like that of a key which is masked.

Two functions each, with the address `head` of a head: `load(head, d)` gives dimensions d to d + 15 as float32, d a
multiple of 16; `store(head, x, head_dim)` keeps the float32 numbers at x, and zeros for the padding.
"""

from numba import float32

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    INFINITY,
    NAN,
    bytes_i32x16,
    float_i8x16,
    int_f32x16,
    keep_below_f32x16,
    keep_lanes,
    largest_size_f32x16,
    load_f16x16,
    load_f32x16,
    load_splat_f16x16,
    load_u8x16,
    max_f32x16,
    min_f32x16,
    reciprocal_f32x16,
    round_f32x16,
    splat_f32x16,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_u8x16,
)

SMALLEST_SCALE = float32(2.0**-24)  # above zero, of a float16
HALF_LIMIT = float32(65520.0)  # from here on, float16 has infinity


def make_plain(width, load_16, store_16, limit):
    """Numbers of `width` bytes, of sizes below the limit."""

    @device
    def load(head, d):
        return load_16(head + d * width)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 16):
            numbers = keep_lanes(load_f32x16(x + d * 4), head_dim - d, float32(0.0))
            store_16(head + d * width, keep_below_f32x16(numbers, limit))

    return load, store


@device
def load_q8_0(head, d):
    block = head + d // 32 * 34
    return float_i8x16(load_u8x16(block + 2 + d % 32)) * load_splat_f16x16(block)


@device
def store_bytes(address, x, inverse):
    """x / scale, rounded to signed bytes."""
    whole = round_f32x16(x * inverse)
    whole = max_f32x16(min_f32x16(whole, splat_f32x16(127.0)), splat_f32x16(-127.0))
    store_u8x16(address, bytes_i32x16(int_f32x16(whole)))


@device
def store_q8_0(head, x, head_dim):
    """The scale is rounded before the bytes are made with it."""
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 34
        low = keep_lanes(load_f32x16(x + d * 4), head_dim - d, float32(0.0))
        high = keep_lanes(load_f32x16(x + d * 4 + 64), head_dim - d - 16, float32(0.0))
        scale = largest_size_f32x16(low, high) / float32(127.0)
        store_f16(block, scale if scale < HALF_LIMIT else NAN)
        inverse = reciprocal_f32x16(max_f32x16(load_splat_f16x16(block), splat_f32x16(SMALLEST_SCALE)))
        store_bytes(block + 2, low, inverse)
        store_bytes(block + 18, high, inverse)


STORAGE = {
    "F32": make_plain(4, load_f32x16, store_f32x16, INFINITY),
    "F16": make_plain(2, load_f16x16, store_f16x16, HALF_LIMIT),
    "Q8_0": (load_q8_0, store_q8_0),
}
