"""The storage types of the KV cache.

The head of a token is stored byte for byte as in cpu/attention/cache.py. Each type has two functions; head: the address
of a head.

- store(head, x, head_dim, warp, warps): stores the float32 values at x. The warps of a block divide a head among them,
and all lanes of a warp must call it
- load(head, d): returns dimension d as float32

For attention, LOADS has functions (head, d) that return a tuple of dimensions d to d + 7, where d is a multiple of 8.
Kernels that store or recall heads have a block of threads for each token and head.
"""

import math

from numba import cuda, float32, int32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.attention.shared import SEQUENCE_BYTES
from localllm.kernels.table import PAGE, SEQUENCE

SMALLEST_SCALE = float32(2.0**-24)  # the smallest float16 above zero
HALF_LIMIT, INFINITY = float32(65520.0), float32(math.inf)  # from the limit on, float16 has infinity
NAN, HALF_NAN = float32(math.nan), int32(0x7E00)
ZERO, ONE = float32(0), float32(1)


@gpu.device
def to_finite_half(x):
    """Return the bits of x as a float16, or NaN if x is not finite as a float16."""
    return gpu.encode_f16(x) if abs(x) < HALF_LIMIT else HALF_NAN


@gpu.device
def invert_scale(scale):
    """Compute 1 / scale.

    Scales below SMALLEST_SCALE, and NaN, count as SMALLEST_SCALE.
    """
    return float32(ONE / (scale if scale > SMALLEST_SCALE else SMALLEST_SCALE))


@gpu.device
def round_to_code(x, low, high):
    """Round x to the nearest integer and clamp it to [low, high]; NaN gives `high`."""
    below = x if x < high else high
    return gpu.round_to_int(below if below > low else low)


@gpu.device
def load_value(x, d, head_dim, padding):
    """Return dimension d of a head, or `padding` beyond its end."""
    return float32(gpu.load_f32(x + 4 * d)) if d < head_dim else padding


@gpu.device
def find_largest(x, first, head_dim, padding, sign):
    """Return the largest of the 32 values of a block to all lanes of the warp.

    first: the block's first dimension; sign: 1 for the largest value, -1 for the negative of the smallest, 0 for the
    largest magnitude. If a value is NaN, so is the result.
    """
    largest = -INFINITY
    for d in range(first + gpu.get_lane(), first + 32, gpu.WARP):
        number = load_value(x, d, head_dim, padding)
        number = abs(number) if sign == 0 else number * float32(sign)
        largest = number if number > largest or number != number else largest
    return float32(gpu.warp_max(largest))


@gpu.device
def store_f32_head(head, x, head_dim, warp, warps):
    for d in range(gpu.WARP * warp + gpu.get_lane(), (head_dim + 15) // 16 * 16, gpu.WARP * warps):
        number = load_value(x, d, head_dim, ZERO)
        gpu.store_f32(head + 4 * d, number if abs(number) < INFINITY else NAN)


@gpu.device
def load_f32_head(head, d):
    return gpu.load_f32(head + 4 * d)


@gpu.device
def store_f16_head(head, x, head_dim, warp, warps):
    for d in range(gpu.WARP * warp + gpu.get_lane(), (head_dim + 15) // 16 * 16, gpu.WARP * warps):
        gpu.store_u16(head + 2 * d, to_finite_half(load_value(x, d, head_dim, ZERO)))


@gpu.device
def load_f16_head(head, d):
    return gpu.decode_f16(gpu.load_u16(head + 2 * d))


@gpu.device
def store_q8_0(head, x, head_dim, warp, warps):
    """Store a head in Q8_0, a block per warp.

    The scale is rounded to float16 before the bytes are computed with it.
    """
    for first in range(32 * warp, head_dim, 32 * warps):
        block = head + first // 32 * 34
        bits = to_finite_half(float32(find_largest(x, first, head_dim, ZERO, 0) / float32(127)))
        if gpu.get_lane() == 0:
            gpu.store_u16(block, bits)
        inverse = invert_scale(gpu.decode_f16(bits))
        for i in range(gpu.get_lane(), 32, gpu.WARP):
            scaled = float32(load_value(x, first + i, head_dim, ZERO) * inverse)
            gpu.store_i8(block + 2 + i, round_to_code(scaled, float32(-127), float32(127)))


@gpu.device
def load_q8_0(head, d):
    block = head + d // 32 * 34
    return gpu.decode_f16(gpu.load_u16(block)) * float32(gpu.load_i8(block + 2 + d % 32))


@gpu.device
def store_q4_0(head, x, head_dim, warp, warps):
    """Store a head in Q4_0, a block per warp.

    The code of the value with the largest magnitude is 0; the scale has the opposite sign.
    """
    for first in range(32 * warp, head_dim, 32 * warps):
        block = head + first // 32 * 18
        size, largest = find_largest(x, first, head_dim, ZERO, 0), find_largest(x, first, head_dim, ZERO, 1)
        bits = to_finite_half(float32(size / (float32(-8) if largest == size else float32(8))))
        if gpu.get_lane() == 0:
            gpu.store_u16(block, bits)
        inverse = invert_scale(abs(gpu.decode_f16(bits)))
        if bits & 0x8000 != 0:
            inverse = -inverse
        for i in range(gpu.get_lane(), 16, gpu.WARP):
            low = float32(load_value(x, first + i, head_dim, ZERO) * inverse)
            high = float32(load_value(x, first + i + 16, head_dim, ZERO) * inverse)
            low_code, high_code = (
                round_to_code(low, float32(-8), float32(7)) + 8,
                round_to_code(high, float32(-8), float32(7)) + 8,
            )
            gpu.store_i8(block + 2 + i, int32(low_code | high_code << 4))


@gpu.device
def load_q4_0(head, d):
    block, bit = head + d // 32 * 18, d % 32 // 16 * 4
    return gpu.decode_f16(gpu.load_u16(block)) * float32((gpu.load_u8(block + 2 + d % 16) >> bit & 15) - 8)


@gpu.device
def store_q4_1(head, x, head_dim, warp, warps):
    """Store a head in Q4_1, a block per warp: the smallest value gets code 0, the largest gets 15.

    The padding repeats the first value of the block, so that it changes neither.
    """
    for first in range(32 * warp, head_dim, 32 * warps):
        block, padding = head + first // 32 * 20, float32(gpu.load_f32(x + 4 * first))
        largest, least = find_largest(x, first, head_dim, padding, 1), -find_largest(x, first, head_dim, padding, -1)
        scale, minimum = gpu.encode_f16(float32((largest - least) / float32(15))), gpu.encode_f16(least)
        if not (abs(largest) < HALF_LIMIT and abs(least) < HALF_LIMIT):
            scale, minimum = HALF_NAN, HALF_NAN
        if gpu.get_lane() == 0:
            gpu.store_u16(block, scale)
            gpu.store_u16(block + 2, minimum)
        inverse, lowest = invert_scale(gpu.decode_f16(scale)), gpu.decode_f16(minimum)
        for i in range(gpu.get_lane(), 16, gpu.WARP):
            low = float32(float32(load_value(x, first + i, head_dim, padding) - lowest) * inverse)
            high = float32(float32(load_value(x, first + i + 16, head_dim, padding) - lowest) * inverse)
            low_code, high_code = round_to_code(low, ZERO, float32(15)), round_to_code(high, ZERO, float32(15))
            gpu.store_i8(block + 4 + i, int32(low_code | high_code << 4))


@gpu.device
def load_q4_1(head, d):
    block, bit = head + d // 32 * 20, d % 32 // 16 * 4
    scale, minimum = gpu.decode_f16(gpu.load_u16(block)), gpu.decode_f16(gpu.load_u16(block + 2))
    return scale * float32(gpu.load_u8(block + 4 + d % 16) >> bit & 15) + minimum


STORAGE = {
    "F32": (load_f32_head, store_f32_head),
    "F16": (load_f16_head, store_f16_head),
    "Q8_0": (load_q8_0, store_q8_0),
    "Q4_0": (load_q4_0, store_q4_0),
    "Q4_1": (load_q4_1, store_q4_1),
}


@gpu.device
def find_slot(positions, owners, sequences, token):
    """Return the cache slot of a token.

    token: its index in the run.
    """
    table = gpu.load_i64(sequences + gpu.load_i64(owners + 8 * token) * SEQUENCE_BYTES + 8 * SEQUENCE.table)
    position = gpu.load_i64(positions + 8 * token)
    return gpu.load_i64(table + position // PAGE * 8) * PAGE + position % PAGE


def make_head_loop(work):
    """Build a kernel that calls a function for all heads.

    The function is work(head in the cache, head in x, head dimension, warp, warps).
    """

    def run_heads(count, positions, owners, sequences, x, stride, base, head_stride, token_bytes, heads, head_dim):
        token, number = cuda.blockIdx.x, cuda.blockIdx.y
        if token < gpu.load_i64(count):
            head = base + find_slot(positions, owners, sequences, token) * token_bytes + number * head_stride
            of_x = x + token * stride + 4 * number * head_dim
            work(head, of_x, head_dim, cuda.threadIdx.x // gpu.WARP, cuda.blockDim.x // gpu.WARP)

    return run_heads


def make_store(format_name):
    return make_head_loop(STORAGE[format_name][1])


def make_recall(format_name):
    load = STORAGE[format_name][0]

    @gpu.device
    def recall(head, x, head_dim, warp, warps):
        for d in range(gpu.WARP * warp + gpu.get_lane(), head_dim, gpu.WARP * warps):
            gpu.store_f32(x + 4 * d, load(head, d))

    return make_head_loop(recall)


@gpu.device
def load_f32_8(head, d):
    return gpu.load_4f32(head + d * 4) + gpu.load_4f32(head + d * 4 + 16)


@gpu.device
def load_f16_8(head, d):
    a, b, c, e = gpu.load_4i32(head + d * 2)
    return gpu.decode_f16_pair(a) + gpu.decode_f16_pair(b) + gpu.decode_f16_pair(c) + gpu.decode_f16_pair(e)


@gpu.device
def convert_signed_pair(two):
    """Convert the two low bytes of an int32, which are signed, to float32."""
    return (float32(int32(((two & 255) ^ 128) - 128)), float32(int32((((two >> 8) & 255) ^ 128) - 128)))


@gpu.device
def load_q8_0_8(head, d):
    block = head + d // 32 * 34
    scale, codes = gpu.decode_f16(gpu.load_u16(block)), block + 2 + d % 32
    a, b = convert_signed_pair(gpu.load_u16(codes))
    c, e = convert_signed_pair(gpu.load_u16(codes + 2))
    f, g = convert_signed_pair(gpu.load_u16(codes + 4))
    h, i = convert_signed_pair(gpu.load_u16(codes + 6))
    return a * scale, b * scale, c * scale, e * scale, f * scale, g * scale, h * scale, i * scale


@gpu.device
def decode_pair(two, shift, scale, least):
    """Return scale * code + least for the 4-bit codes of two bytes.

    shift: 0 for the low halves, 4 for the high halves.
    """
    codes = two >> shift
    return float32(int32(codes & 15)) * scale + least, float32(int32((codes >> 8) & 15)) * scale + least


@gpu.device
def load_eight_codes(codes, d, scale, least):
    """Return scale * code + least for the eight 4-bit codes from dimension d on.

    codes: address of a block's 16 bytes.
    """
    shift, at = d % 32 // 16 * 4, codes + d % 16
    low = decode_pair(gpu.load_u16(at), shift, scale, least) + decode_pair(gpu.load_u16(at + 2), shift, scale, least)
    high = decode_pair(gpu.load_u16(at + 4), shift, scale, least) + decode_pair(
        gpu.load_u16(at + 6), shift, scale, least
    )
    return low + high


@gpu.device
def load_q4_0_8(head, d):
    block = head + d // 32 * 18
    scale = gpu.decode_f16(gpu.load_u16(block))
    return load_eight_codes(block + 2, d, scale, float32(-8) * scale)


@gpu.device
def load_q4_1_8(head, d):
    block = head + d // 32 * 20
    return load_eight_codes(block + 4, d, gpu.decode_f16(gpu.load_u16(block)), gpu.decode_f16(gpu.load_u16(block + 2)))


LOADS = {"F32": load_f32_8, "F16": load_f16_8, "Q8_0": load_q8_0_8, "Q4_0": load_q4_0_8, "Q4_1": load_q4_1_8}
