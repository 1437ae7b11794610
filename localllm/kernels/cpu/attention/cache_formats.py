"""The KV cache's formats of a head of a token: F32, F16, BF16, or Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL as in GGML.

F32, F16 and BF16 are padded to 16 dimensions, the others to blocks of 32. Q8_0: a float16 scale, then 32 signed bytes.
Q4_0: a float16 scale, then 16 bytes, whose low halves are the codes of the first 16 numbers, and the high halves those
of the others; a number is scale * (code - 8). Q4_1: a float16 minimum after the scale; a number is scale * code +
minimum. Q5_0 and Q5_1: as these, with 4 bytes of fifth bits before the 16, and scale * (code - 16). IQ4_NL: as Q4_0,
but a number is scale * IQ4_VALUES[code]. Each is rounded to float32 once at most.

A number that is not finite in the format becomes NaN (with blocks, the whole block), because a score of minus infinity
would look like that of a masked key.

Two functions each, with the address `head` of a head: `load(head, d)` gives dimensions d to d + 15 as float32, d a
multiple of 16; `store(head, x, head_dim)` keeps the float32 numbers at x, and zeros for the padding.
"""

import itertools

from numba import float32

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    INFINITY,
    NAN,
    abs_f32x16,
    bytes_i32x16,
    copy_sign,
    fifth_bits_i32x16,
    five_bits_f32x16,
    float_i8x16,
    int_f32x16,
    keep_below_f32x16,
    keep_lanes,
    largest_f32x16,
    largest_size_f32x16,
    load_bf16x16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_splat_f16x16,
    load_u8x16,
    load_u16,
    make_nibble_values,
    make_staircase,
    max_f32x16,
    min_f32x16,
    nibbles_f32x16,
    reciprocal_f32x16,
    round_f32x16,
    splat_f32x16,
    store_bf16x16,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_i32,
    store_nibbles,
    store_u8x16,
    sum_f32x16,
    zero_f32x16,
)
from localllm.quant.layouts import IQ4_VALUES

SMALLEST_SCALE = float32(2.0**-24)  # above zero, of a float16
HALF_LIMIT = float32(65520.0)  # from here on, float16 has infinity
TINY = float32(2.0**-100)  # of scales; smaller ones are 0 as float16
BF16_LIMIT = float32((2 - 2.0**-8) * 2.0**127)  # from here on, bfloat16 has infinity
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(IQ4_VALUES)]


def make_plain(width, load_16, store_16, limit):
    """Make the functions for numbers of `width` bytes whose magnitudes are below the limit."""

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
def load_q5_0(head, d):
    block, half = head + d // 32 * 22, d % 32 // 16
    scale, fifth = load_splat_f16x16(block), load_u16(block + 2 + 2 * half)
    return five_bits_f32x16(load_u8x16(block + 6), 4 * half, fifth, scale, scale * splat_f32x16(-16.0))


@device
def load_q5_1(head, d):
    block, half = head + d // 32 * 24, d % 32 // 16
    scale, minimum = load_splat_f16x16(block), load_splat_f16x16(block + 2)
    return five_bits_f32x16(load_u8x16(block + 8), 4 * half, load_u16(block + 4 + 2 * half), scale, minimum)


@device
def store_five_bits(address, low, high):
    """Store the fifth bits of both halves, then the other four."""
    store_i32(address, fifth_bits_i32x16(low) | fifth_bits_i32x16(high) << 16)
    store_nibbles(address + 4, low, high)


@device
def clamped(codes, top):
    """Round to whole numbers from 0 to `top`."""
    return int_f32x16(max_f32x16(min_f32x16(codes, splat_f32x16(top)), zero_f32x16()))


def make_symmetric(block_bytes, centre, store_codes):
    """Make the function that stores Q4_0 or Q5_0; the number of largest magnitude becomes code 0.

    The scale then has the other sign, because codes go down to -centre.
    """
    centre, top = float32(centre), float32(2 * centre - 1)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 32):
            block = head + d // 32 * block_bytes
            low, high = block_of_32(x, d, head_dim, float32(0.0))
            size = largest_size_f32x16(low, high)
            scale = size / (-centre if largest_f32x16(max_f32x16(low, high)) == size else centre)
            store_f16(block, scale if abs(scale) < HALF_LIMIT else NAN)
            kept, middle = load_splat_f16x16(block), splat_f32x16(centre)
            inverse = reciprocal_f32x16(max_f32x16(abs_f32x16(kept), splat_f32x16(SMALLEST_SCALE)))
            inverse = copy_sign(inverse, kept)
            low, high = round_f32x16(low * inverse) + middle, round_f32x16(high * inverse) + middle
            store_codes(block + 2, clamped(low, top), clamped(high, top))

    return store


def make_with_minimum(block_bytes, top, store_codes):
    """Make the function that stores Q4_1 or Q5_1: codes range from the smallest number to the largest.

    The padding repeats the first number, so that it is neither.
    """
    top = float32(top)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 32):
            block = head + d // 32 * block_bytes
            low, high = block_of_32(x, d, head_dim, load_f32(x + d * 4))
            lost = not (largest_size_f32x16(low, high) < HALF_LIMIT)
            least = -largest_f32x16(-min_f32x16(low, high))
            scale = (largest_f32x16(max_f32x16(low, high)) - least) / top
            store_f16(block, NAN if lost else scale)
            store_f16(block + 2, NAN if lost else least)
            inverse = reciprocal_f32x16(max_f32x16(load_splat_f16x16(block), splat_f32x16(SMALLEST_SCALE)))
            minimum = load_splat_f16x16(block + 2)
            low, high = round_f32x16((low - minimum) * inverse), round_f32x16((high - minimum) * inverse)
            store_codes(block + 4, clamped(low, top), clamped(high, top))

    return store


named_values = make_nibble_values(IQ4_VALUES)
nearest_code = make_staircase(0, MIDDLES, [1] * 15)
nearest_value = make_staircase(IQ4_VALUES[0], MIDDLES, [high - low for low, high in itertools.pairwise(IQ4_VALUES)])


@device
def load_iq4_nl(head, d):
    block = head + d // 32 * 18
    return named_values(load_u8x16(block + 2), d % 32 // 16 * 4) * load_splat_f16x16(block)


@device
def store_iq4_nl(head, x, head_dim):
    """Store IQ4_NL as GGML does: the number of largest magnitude is near -127, the scale by least squares.

    The squares are weighted by the squares of the numbers.
    """
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 18
        low, high = block_of_32(x, d, head_dim, float32(0.0))
        size = largest_size_f32x16(low, high)
        first = size / float32(-127.0 if largest_f32x16(max_f32x16(low, high)) == size else 127.0)
        inverse = float32(1.0) / first if abs(first) > TINY else float32(0.0)
        low, high = low * splat_f32x16(inverse), high * splat_f32x16(inverse)
        near_low, near_high = nearest_value(low), nearest_value(high)
        along = sum_f32x16(low * low * low * near_low + high * high * high * near_high)
        squares = sum_f32x16(low * low * near_low * near_low + high * high * near_high * near_high)
        scale = first * (along / squares) if squares > 0 else float32(0.0) * size
        store_f16(block, scale if abs(scale) < HALF_LIMIT else NAN)
        store_nibbles(block + 2, int_f32x16(nearest_code(low)), int_f32x16(nearest_code(high)))


STORAGE = {
    "F32": make_plain(4, load_f32x16, store_f32x16, INFINITY),
    "F16": make_plain(2, load_f16x16, store_f16x16, HALF_LIMIT),
    "BF16": make_plain(2, load_bf16x16, store_bf16x16, BF16_LIMIT),
    "Q8_0": (load_q8_0, store_q8_0),
    "Q5_1": (load_q5_1, make_with_minimum(24, 31, store_five_bits)),
    "Q5_0": (load_q5_0, make_symmetric(22, 16, store_five_bits)),
    "Q4_1": (load_q4_1, make_with_minimum(20, 15, store_nibbles)),
    "Q4_0": (load_q4_0, make_symmetric(18, 8, store_nibbles)),
    "IQ4_NL": (load_iq4_nl, store_iq4_nl),
}
