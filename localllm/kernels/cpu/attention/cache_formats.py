"""The KV cache's formats of a head of a token: F32, F16, or Q8_0, Q4_0 and Q4_1 as in GGML.

F32 and F16 are padded to 16 dimensions, the others to blocks of 32. Q8_0: a float16 scale, then 32 signed bytes. Q4_0:
a float16 scale, then 16 bytes, whose low halves are codes of the first 16 numbers, their high halves of the others; a
number is scale * (code - 8). Q4_1: a float16 minimum after the scale; a number is scale * code + minimum. Each is
rounded to float32 once at most.

What cannot be kept as a finite number is kept as NaN, in blocks the whole block: a score of minus infinity would look
like that of a key which is masked.

Two functions each, with the address `head` of a head: `load(head, d)` gives dimensions d to d + 15 as float32, d a
multiple of 16; `store(head, x, head_dim)` keeps the float32 numbers at x, and zeros for the padding.
"""

from numba import float32

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    INFINITY,
    NAN,
    abs_f32x16,
    bytes_i32x16,
    copy_sign,
    float_i8x16,
    int_f32x16,
    keep_below_f32x16,
    keep_lanes,
    largest_f32x16,
    largest_size_f32x16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_splat_f16x16,
    load_u8x16,
    max_f32x16,
    min_f32x16,
    nibbles_f32x16,
    reciprocal_f32x16,
    round_f32x16,
    splat_f32x16,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_nibbles,
    store_u8x16,
    zero_f32x16,
)

SMALLEST_SCALE = float32(2.0**-24)  # above zero, of a float16
HALF_LIMIT = float32(65520.0)  # from here on, float16 has infinity


def make_plain(width, load_16, store_16, limit):
    """Return numbers of `width` bytes, of sizes below the limit."""

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
def block_of_32(x, d, head_dim, padding):
    """Return numbers d to d + 31 of a head, with padding past its end."""
    low, high = load_f32x16(x + d * 4), load_f32x16(x + d * 4 + 64)
    return keep_lanes(low, head_dim - d, padding), keep_lanes(high, head_dim - d - 16, padding)


@device
def store_bytes(address, x, inverse):
    """Store x / scale, rounded to signed bytes."""
    whole = round_f32x16(x * inverse)
    whole = max_f32x16(min_f32x16(whole, splat_f32x16(127.0)), splat_f32x16(-127.0))
    store_u8x16(address, bytes_i32x16(int_f32x16(whole)))


@device
def store_q8_0(head, x, head_dim):
    """Store Q8_0; the scale is rounded before the bytes are made with it."""
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 34
        low, high = block_of_32(x, d, head_dim, float32(0.0))
        scale = largest_size_f32x16(low, high) / float32(127.0)
        store_f16(block, scale if scale < HALF_LIMIT else NAN)
        inverse = reciprocal_f32x16(max_f32x16(load_splat_f16x16(block), splat_f32x16(SMALLEST_SCALE)))
        store_bytes(block + 2, low, inverse)
        store_bytes(block + 18, high, inverse)


@device
def load_q4_0(head, d):
    block = head + d // 32 * 18
    scale = load_splat_f16x16(block)
    return nibbles_f32x16(load_u8x16(block + 2), d % 32 // 16 * 4, scale, scale * splat_f32x16(-8.0))


@device
def load_q4_1(head, d):
    block = head + d // 32 * 20
    return nibbles_f32x16(
        load_u8x16(block + 4), d % 32 // 16 * 4, load_splat_f16x16(block), load_splat_f16x16(block + 2)
    )


@device
def store_codes(address, low, high):
    """Store the two halves of a block of integers, clamped to 0 to 15."""
    top = splat_f32x16(15.0)
    low, high = (
        max_f32x16(min_f32x16(low, top), zero_f32x16()),
        max_f32x16(min_f32x16(high, top), zero_f32x16()),
    )
    store_nibbles(address, int_f32x16(low), int_f32x16(high))


@device
def store_q4_0(head, x, head_dim):
    """Store Q4_0; the number of the largest size becomes code 0, so the scale has the other sign.

    There are codes down to -8.
    """
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 18
        low, high = block_of_32(x, d, head_dim, float32(0.0))
        size = largest_size_f32x16(low, high)
        scale = size / float32(-8.0 if largest_f32x16(max_f32x16(low, high)) == size else 8.0)
        store_f16(block, scale if abs(scale) < HALF_LIMIT else NAN)
        kept = load_splat_f16x16(block)
        inverse = reciprocal_f32x16(max_f32x16(abs_f32x16(kept), splat_f32x16(SMALLEST_SCALE)))
        inverse, eight = copy_sign(inverse, kept), splat_f32x16(8.0)
        store_codes(block + 2, round_f32x16(low * inverse) + eight, round_f32x16(high * inverse) + eight)


@device
def store_q4_1(head, x, head_dim):
    """Store codes that reach from the smallest number to the largest.

    The padding is none of them: it repeats the first one.
    """
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 20
        low, high = block_of_32(x, d, head_dim, load_f32(x + d * 4))
        lost = not (largest_size_f32x16(low, high) < HALF_LIMIT)
        least = -largest_f32x16(-min_f32x16(low, high))
        scale = (largest_f32x16(max_f32x16(low, high)) - least) / float32(15.0)
        store_f16(block, NAN if lost else scale)
        store_f16(block + 2, NAN if lost else least)
        inverse = reciprocal_f32x16(max_f32x16(load_splat_f16x16(block), splat_f32x16(SMALLEST_SCALE)))
        minimum = load_splat_f16x16(block + 2)
        store_codes(block + 4, round_f32x16((low - minimum) * inverse), round_f32x16((high - minimum) * inverse))


STORAGE = {
    "F32": make_plain(4, load_f32x16, store_f32x16, INFINITY),
    "F16": make_plain(2, load_f16x16, store_f16x16, HALF_LIMIT),
    "Q8_0": (load_q8_0, store_q8_0),
    "Q4_0": (load_q4_0, store_q4_0),
    "Q4_1": (load_q4_1, store_q4_1),
}
