"""Loads from the KV cache for attention: eight numbers of a head at once, as float32.

Each function (head, d) returns a tuple of numbers d to d + 7, d being a multiple of 8, of the head at an address. The
bytes of each type are explained in cpu/attention/cache_formats.py.
"""

from numba import float32, int32

from localllm.kernels.cuda.device import device, f16_pair, f16_value, load_4f32, load_4i32, load_u16


@device
def load_f32_8(head, d):
    return load_4f32(head + d * 4) + load_4f32(head + d * 4 + 16)


@device
def load_f16_8(head, d):
    a, b, c, e = load_4i32(head + d * 2)
    return f16_pair(a) + f16_pair(b) + f16_pair(c) + f16_pair(e)


@device
def signed_pair(two):
    """Convert the two low bytes of an int32, which are signed, to float32."""
    return (
        float32(int32(((two & 255) ^ 128) - 128)),
        float32(int32((((two >> 8) & 255) ^ 128) - 128)),
    )


@device
def load_q8_0_8(head, d):
    block = head + d // 32 * 34
    scale, codes = f16_value(load_u16(block)), block + 2 + d % 32
    a, b = signed_pair(load_u16(codes))
    c, e = signed_pair(load_u16(codes + 2))
    f, g = signed_pair(load_u16(codes + 4))
    h, i = signed_pair(load_u16(codes + 6))
    return a * scale, b * scale, c * scale, e * scale, f * scale, g * scale, h * scale, i * scale


@device
def code_pair(two, shift, scale, least):
    """Return scale * code + least for two 4-bit codes.

    two: their bytes; shift: 0 for the low halves, 4 for the high halves.
    """
    codes = two >> shift
    return float32(int32(codes & 15)) * scale + least, float32(int32((codes >> 8) & 15)) * scale + least


@device
def eight_codes(codes, d, scale, least):
    """Return scale * code + least for the eight 4-bit codes from number d on; codes: address of a block's 16 bytes."""
    shift, at = d % 32 // 16 * 4, codes + d % 16
    low = code_pair(load_u16(at), shift, scale, least) + code_pair(load_u16(at + 2), shift, scale, least)
    high = code_pair(load_u16(at + 4), shift, scale, least) + code_pair(load_u16(at + 6), shift, scale, least)
    return low + high


@device
def load_q4_0_8(head, d):
    block = head + d // 32 * 18
    scale = f16_value(load_u16(block))
    return eight_codes(block + 2, d, scale, float32(-8) * scale)


@device
def load_q4_1_8(head, d):
    block = head + d // 32 * 20
    return eight_codes(block + 4, d, f16_value(load_u16(block)), f16_value(load_u16(block + 2)))


LOADS = {"F32": load_f32_8, "F16": load_f16_8, "Q8_0": load_q8_0_8, "Q4_0": load_q4_0_8, "Q4_1": load_q4_1_8}
