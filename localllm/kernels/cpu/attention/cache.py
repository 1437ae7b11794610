"""The storage types of the KV cache.

F32, F16, BF16: values, padded to 16 dimensions. The others are blocks of 32 values, as in GGML:

    Q8_0    f16 scale, 32 signed bytes                              scale * byte
    Q4_0    f16 scale, 16 bytes                                     scale * (code - 8)
    Q4_1    f16 scale, f16 minimum, 16 bytes                        scale * code + minimum
    Q5_0    f16 scale, 4 bytes of fifth bits, 16 bytes              scale * (code - 16)
    Q5_1    f16 scale, f16 minimum, 4 bytes of fifth bits, 16 bytes scale * code + minimum
    IQ4_NL  f16 scale, 16 bytes                                     scale * IQ4_VALUES[code]

Of 16 bytes, the low halves are the codes of the first 16 values, the high halves those of the others. Each value is
rounded to float32 at most once when it is loaded.

A value that is not finite in the format becomes NaN (in a block, all values do), because a score of minus infinity
would look like that of a masked key.

Each type has two functions; head: the address of a head.

- load(head, d): returns dimensions d to d + 15 as f32x16; d is a multiple of 16
- store(head, x, head_dim): stores the float32 values at x, and zeros as padding
"""

import itertools

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import PAGE, SEQUENCE, STORE
from localllm.quant.formats import IQ4_VALUES

SMALLEST_SCALE = float32(2.0**-24)  # the smallest float16 above zero
HALF_LIMIT = float32(65520.0)  # float16 has infinity from here on
TINY = float32(2.0**-100)  # scales up to this size count as 0
BF16_LIMIT = float32((2 - 2.0**-8) * 2.0**127)  # bfloat16 has infinity from here on
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(IQ4_VALUES)]


def make_plain(width, load_16, store_16, limit):
    """Build `load` and `store` for values of `width` bytes; magnitudes above `limit` become NaN."""

    @device
    def load(head, d):
        return load_16(head + d * width)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 16):
            numbers = simd.keep_lanes(simd.load_f32x16(x + d * 4), head_dim - d, float32(0.0))
            store_16(head + d * width, simd.keep_below_f32x16(numbers, limit))

    return load, store


@device
def load_q8_0(head, d):
    block = head + d // 32 * 34
    return simd.float_i8x16(simd.load_u8x16(block + 2 + d % 32)) * simd.load_splat_f16x16(block)


@device
def load_block_of_32(x, d, head_dim, padding):
    """Load elements d to d + 31 of a head as two f32x16, with `padding` past its end."""
    low, high = simd.load_f32x16(x + d * 4), simd.load_f32x16(x + d * 4 + 64)
    return simd.keep_lanes(low, head_dim - d, padding), simd.keep_lanes(high, head_dim - d - 16, padding)


@device
def store_bytes(address, x, inverse):
    """Store x * inverse as 16 signed bytes, rounded and clamped to -127 to 127."""
    whole = simd.round_f32x16(x * inverse)
    whole = simd.max_f32x16(simd.min_f32x16(whole, simd.splat_f32x16(127.0)), simd.splat_f32x16(-127.0))
    simd.store_u8x16(address, simd.bytes_i32x16(simd.int_f32x16(whole)))


@device
def store_q8_0(head, x, head_dim):
    """Store a head in Q8_0, computing the bytes with the scale rounded to float16."""
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 34
        low, high = load_block_of_32(x, d, head_dim, float32(0.0))
        scale = simd.max_magnitude_f32x16(low, high) / float32(127.0)
        simd.store_f16(block, scale if scale < HALF_LIMIT else simd.NAN)
        inverse = simd.reciprocal_f32x16(
            simd.max_f32x16(simd.load_splat_f16x16(block), simd.splat_f32x16(SMALLEST_SCALE))
        )
        store_bytes(block + 2, low, inverse)
        store_bytes(block + 18, high, inverse)


@device
def load_q4_0(head, d):
    block = head + d // 32 * 18
    scale = simd.load_splat_f16x16(block)
    return simd.nibbles_f32x16(simd.load_u8x16(block + 2), d % 32 // 16 * 4, scale, scale * simd.splat_f32x16(-8.0))


@device
def load_q4_1(head, d):
    block = head + d // 32 * 20
    return simd.nibbles_f32x16(
        simd.load_u8x16(block + 4), d % 32 // 16 * 4, simd.load_splat_f16x16(block), simd.load_splat_f16x16(block + 2)
    )


@device
def load_q5_0(head, d):
    block, half = head + d // 32 * 22, d % 32 // 16
    scale, fifth = simd.load_splat_f16x16(block), simd.load_u16(block + 2 + 2 * half)
    return simd.five_bits_f32x16(simd.load_u8x16(block + 6), 4 * half, fifth, scale, scale * simd.splat_f32x16(-16.0))


@device
def load_q5_1(head, d):
    block, half = head + d // 32 * 24, d % 32 // 16
    scale, minimum = simd.load_splat_f16x16(block), simd.load_splat_f16x16(block + 2)
    return simd.five_bits_f32x16(
        simd.load_u8x16(block + 8), 4 * half, simd.load_u16(block + 4 + 2 * half), scale, minimum
    )


@device
def store_five_bits(address, low, high):
    """Store 32 codes of 5 bits: their fifth bits in 4 bytes, then their low 4 bits in 16 bytes."""
    simd.store_i32(address, simd.fifth_bits_i32x16(low) | simd.fifth_bits_i32x16(high) << 16)
    simd.store_nibbles(address + 4, low, high)


@device
def clamp_codes(codes, top):
    return simd.int_f32x16(simd.max_f32x16(simd.min_f32x16(codes, simd.splat_f32x16(top)), simd.zero_f32x16()))


def make_symmetric(block_bytes, centre, store_codes):
    """Build `store` for Q4_0 or Q5_0.

    The value of largest magnitude gets code 0, so the scale has the opposite sign.
    """
    centre, top = float32(centre), float32(2 * centre - 1)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 32):
            block = head + d // 32 * block_bytes
            low, high = load_block_of_32(x, d, head_dim, float32(0.0))
            size = simd.max_magnitude_f32x16(low, high)
            scale = size / (-centre if simd.largest_f32x16(simd.max_f32x16(low, high)) == size else centre)
            simd.store_f16(block, scale if abs(scale) < HALF_LIMIT else simd.NAN)
            stored_scale, middle = simd.load_splat_f16x16(block), simd.splat_f32x16(centre)
            inverse = simd.reciprocal_f32x16(
                simd.max_f32x16(simd.abs_f32x16(stored_scale), simd.splat_f32x16(SMALLEST_SCALE))
            )
            inverse = simd.copy_sign(inverse, stored_scale)
            low, high = simd.round_f32x16(low * inverse) + middle, simd.round_f32x16(high * inverse) + middle
            store_codes(block + 2, clamp_codes(low, top), clamp_codes(high, top))

    return store


def make_with_minimum(block_bytes, top, store_codes):
    """Build `store` for Q4_1 or Q5_1: the smallest value gets code 0, the largest gets `top`.

    The padding repeats the first value of the block, so that it changes neither.
    """
    top = float32(top)

    @device
    def store(head, x, head_dim):
        for d in range(0, head_dim, 32):
            block = head + d // 32 * block_bytes
            low, high = load_block_of_32(x, d, head_dim, simd.load_f32(x + d * 4))
            is_lost = not (simd.max_magnitude_f32x16(low, high) < HALF_LIMIT)
            lowest = -simd.largest_f32x16(-simd.min_f32x16(low, high))
            scale = (simd.largest_f32x16(simd.max_f32x16(low, high)) - lowest) / top
            simd.store_f16(block, simd.NAN if is_lost else scale)
            simd.store_f16(block + 2, simd.NAN if is_lost else lowest)
            inverse = simd.reciprocal_f32x16(
                simd.max_f32x16(simd.load_splat_f16x16(block), simd.splat_f32x16(SMALLEST_SCALE))
            )
            minimum = simd.load_splat_f16x16(block + 2)
            low, high = simd.round_f32x16((low - minimum) * inverse), simd.round_f32x16((high - minimum) * inverse)
            store_codes(block + 4, clamp_codes(low, top), clamp_codes(high, top))

    return store


named_values = simd.make_nibble_values(IQ4_VALUES)
nearest_code = simd.make_staircase(0, MIDDLES, [1] * 15)
nearest_value = simd.make_staircase(
    IQ4_VALUES[0], MIDDLES, [high - low for low, high in itertools.pairwise(IQ4_VALUES)]
)


@device
def load_iq4_nl(head, d):
    block = head + d // 32 * 18
    return named_values(simd.load_u8x16(block + 2), d % 32 // 16 * 4) * simd.load_splat_f16x16(block)


@device
def store_iq4_nl(head, x, head_dim):
    """Store a head in IQ4_NL, as GGML does.

    The codes are those for the scale that makes the value of largest magnitude -127. The stored scale fits them by
    least squares, weighted by the squares of the values.
    """
    for d in range(0, head_dim, 32):
        block = head + d // 32 * 18
        low, high = load_block_of_32(x, d, head_dim, float32(0.0))
        size = simd.max_magnitude_f32x16(low, high)
        first = size / float32(-127.0 if simd.largest_f32x16(simd.max_f32x16(low, high)) == size else 127.0)
        inverse = float32(1.0) / first if abs(first) > TINY else float32(0.0)
        low, high = low * simd.splat_f32x16(inverse), high * simd.splat_f32x16(inverse)
        near_low, near_high = nearest_value(low), nearest_value(high)
        products = simd.sum_f32x16(low * low * low * near_low + high * high * high * near_high)
        squares = simd.sum_f32x16(low * low * near_low * near_low + high * high * near_high * near_high)
        scale = first * (products / squares) if squares > 0 else float32(0.0) * size
        simd.store_f16(block, scale if abs(scale) < HALF_LIMIT else simd.NAN)
        simd.store_nibbles(block + 2, simd.int_f32x16(nearest_code(low)), simd.int_f32x16(nearest_code(high)))


STORAGE = {
    "F32": make_plain(4, simd.load_f32x16, simd.store_f32x16, simd.INFINITY),
    "F16": make_plain(2, simd.load_f16x16, simd.store_f16x16, HALF_LIMIT),
    "BF16": make_plain(2, simd.load_bf16x16, simd.store_bf16x16, BF16_LIMIT),
    "Q8_0": (load_q8_0, store_q8_0),
    "Q5_1": (load_q5_1, make_with_minimum(24, 31, store_five_bits)),
    "Q5_0": (load_q5_0, make_symmetric(22, 16, store_five_bits)),
    "Q4_1": (load_q4_1, make_with_minimum(20, 15, simd.store_nibbles)),
    "Q4_0": (load_q4_0, make_symmetric(18, 8, simd.store_nibbles)),
    "IQ4_NL": (load_iq4_nl, store_iq4_nl),
}


@device
def find_slot(a, token):
    """Return the cache slot of the run's token of index `token`."""
    sequence = load_argument(a, STORE.sequences) + simd.load_i64(load_argument(a, STORE.owners) + token * 8) * 8 * len(
        SEQUENCE
    )
    position = simd.load_i64(load_argument(a, STORE.positions) + token * 8)
    return simd.load_i64(load_argument(sequence, SEQUENCE.table) + position // PAGE * 8) * PAGE + position % PAGE


def make_head_loop(work):
    """Build a kernel that calls `work` for all heads of all tokens.

    Its arguments are the head in the cache, the head in x, and the head dimension.
    """

    @kernel
    def run_heads(a, part, parts, thread):
        heads, head_dim = load_argument(a, STORE.heads), load_argument(a, STORE.head_dim)
        tokens = simd.load_i64(load_argument(a, STORE.count))
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            row = load_argument(a, STORE.base) + find_slot(a, t) * load_argument(a, STORE.token_bytes)
            for head in range(heads):
                x = load_argument(a, STORE.x) + t * load_argument(a, STORE.stride) + head * head_dim * 4
                work(row + head * load_argument(a, STORE.head_stride), x, head_dim)

    return run_heads


def make_store(format_name):
    return make_head_loop(STORAGE[format_name][1])


def make_recall(format_name):
    load, _ = STORAGE[format_name]

    @device
    def recall(head, x, head_dim):
        for d in range(0, head_dim, 16):
            simd.store_lanes_f32x16(x + d * 4, load(head, d), head_dim - d)

    return make_head_loop(recall)
