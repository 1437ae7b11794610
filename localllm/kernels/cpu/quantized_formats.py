"""How each block format yields its weights to the int8 kernels.

The kernels see every format alike: a *group* of 256 weights as four *chunks* of 64 codes (unsigned bytes, in order)
and, for each sub-block of 32 or 16 weights, a scale and a minimum: weight = scale * code + minimum. A signed format is
one with a constant offset, such as -8 * scale. Layouts: see blocks_*.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    bytes_of,
    concatenate_u8x32,
    concatenate_u8x64,
    constant_u8,
    float_i8x16,
    float_u8x8,
    load_f16,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    load_u32,
    make_flags,
    make_gather_f16,
    make_shift,
    make_shuffle,
    splat_f32x8,
    splat_f32x16,
    twice_u8x32,
    u8x32,
    u8x64,
)


class GroupFormat(NamedTuple):
    """The device functions that read one group of 256 weights at an address."""

    name: str
    sub_block: int  # weights that share a scale: 32 or 16
    chunk_bytes: int  # bytes of 64 weights if blocks are of 32 weights; 0: only whole groups exist
    group_bytes: int
    codes: tuple[Callable, ...]  # four functions address -> u8x64
    scales: Callable  # address -> f32x8 (f32x16 if sub_block is 16)
    minimums: Callable  # address, scales -> the same type
    block_scale: Callable | None = None  # address of a block of 32 -> float32
    block_minimum: Callable | None = None  # address of a block of 32, scale -> float32


nibbles_15 = constant_u8(u8x64, 15)
sign_bits = constant_u8(u8x64, 128)
two_bits = constant_u8(u8x64, 3)
one_bit = constant_u8(u8x64, 1)
each_twice = make_shuffle(u8x64, u8x32, [*range(16)] * 2 + [*range(16, 32)] * 2)
upper_nibble_per_16 = make_shift(u8x64, False, *[0] * 8, *[4] * 8)
upper_nibble_per_32 = make_shift(u8x64, False, *[0] * 16, *[4] * 16)
upper_nibble = make_shift(u8x64, False, 4)
up_4 = make_shift(u8x64, True, 4)
flags_16 = make_flags(16)


@device
def nibbles_of_two_blocks(first, second):
    """Two blocks of 32 four-bit codes: low nibbles are weights 0-15, high nibbles 16-31."""
    return upper_nibble_per_16(each_twice(concatenate_u8x32(load_u8x16(first), load_u8x16(second)))) & nibbles_15()


def blocks_of_32(name, block_bytes, codes_of_two, offset, minimum_at):
    """A format whose blocks hold 32 weights and begin with a float16 scale.

    The minimum is offset * scale, or a float16 at byte `minimum_at`.
    """
    scales, minimums = make_gather_f16(block_bytes), make_gather_f16(block_bytes)

    def chunk(index):
        skip = index * 2 * block_bytes
        return device(lambda address: codes_of_two(address + skip))

    if minimum_at:
        group_minimum = device(lambda address, scale: minimums(address + minimum_at))
        block_minimum = device(lambda address, scale: load_f16(address + minimum_at))
    else:
        group_minimum = device(lambda address, scale: scale * splat_f32x8(offset))
        block_minimum = device(lambda address, scale: scale * offset)
    return GroupFormat(
        name, 32, 2 * block_bytes, 8 * block_bytes, tuple(chunk(i) for i in range(4)),
        device(lambda address: scales(address)), group_minimum,
        device(lambda address: load_f16(address)), block_minimum,
    )  # fmt: skip


@device
def q4_0_codes(address):
    return nibbles_of_two_blocks(address + 2, address + 20)


@device
def q4_1_codes(address):
    return nibbles_of_two_blocks(address + 4, address + 24)


@device
def q5_0_codes(address):
    fifth_bits = load_u32(address + 2) | (load_u32(address + 24) << 32)
    return nibbles_of_two_blocks(address + 6, address + 28) | flags_16(fifth_bits)


@device
def q5_1_codes(address):
    fifth_bits = load_u32(address + 4) | (load_u32(address + 28) << 32)
    return nibbles_of_two_blocks(address + 8, address + 32) | flags_16(fifth_bits)


@device
def q8_0_codes(address):
    """Signed bytes; flipping the sign bit adds 128."""
    return concatenate_u8x64(load_u8x32(address + 2), load_u8x32(address + 36)) ^ sign_bits()


@device
def packed_scales(address):
    """The eight 6-bit scales of Q4_K and Q5_K, from 12 bytes."""
    low, high = load_u32(address), load_u32(address + 8)
    upper = (high & 0x0F0F0F0F) | (((low >> 6) & 0x03030303) << 4)
    return float_u8x8(bytes_of((low & 0x3F3F3F3F) | (upper << 32)))


@device
def packed_minimums(address):
    """The eight 6-bit minimums of Q4_K and Q5_K, from the same 12 bytes."""
    low, high = load_u32(address + 4), load_u32(address + 8)
    upper = ((high >> 4) & 0x0F0F0F0F) | (((low >> 6) & 0x03030303) << 4)
    return float_u8x8(bytes_of((low & 0x3F3F3F3F) | (upper << 32)))


@device
def k_scales(address):
    return packed_scales(address + 4) * splat_f32x8(load_f16(address))


@device
def k_minimums(address, _):
    return packed_minimums(address + 4) * splat_f32x8(-load_f16(address + 2))


def q4_k_codes(chunk):
    at = 16 + 32 * chunk
    return device(lambda address: upper_nibble_per_32(twice_u8x32(load_u8x32(address + at))) & nibbles_15())


def q5_k_codes(chunk):
    at = 48 + 32 * chunk
    fifth_bit = make_shift(u8x64, False, *[2 * chunk] * 16, *[2 * chunk + 1] * 16)

    @device
    def codes(address):
        nibbles = upper_nibble_per_32(twice_u8x32(load_u8x32(address + at))) & nibbles_15()
        return nibbles | up_4(fifth_bit(twice_u8x32(load_u8x32(address + 16))) & one_bit())

    return codes


def q6_k_codes(chunk):
    low_at, high_at = chunk // 2 * 64, 128 + chunk // 2 * 32
    upper = chunk % 2 == 1
    high_bits = make_shift(u8x64, False, *[4 * (chunk % 2)] * 16, *[4 * (chunk % 2) + 2] * 16)

    @device
    def codes(address):
        low = load_u8x64(address + low_at)
        if upper:
            low = upper_nibble(low)
        return (low & nibbles_15()) | up_4(high_bits(twice_u8x32(load_u8x32(address + high_at))) & two_bits())

    return codes


@device
def q6_k_scales(address):
    return float_i8x16(load_u8x16(address + 192)) * splat_f32x16(load_f16(address + 208))


@device
def q6_k_minimums(_, scales):
    return scales * splat_f32x16(-32.0)


QUANTIZED: dict[str, GroupFormat] = {
    row.name: row
    for row in [
        blocks_of_32("Q4_0", 18, q4_0_codes, -8.0, 0),
        blocks_of_32("Q4_1", 20, q4_1_codes, 0.0, 2),
        blocks_of_32("Q5_0", 22, q5_0_codes, -16.0, 0),
        blocks_of_32("Q5_1", 24, q5_1_codes, 0.0, 2),
        blocks_of_32("Q8_0", 34, q8_0_codes, -128.0, 0),
        GroupFormat("Q4_K", 32, 0, 144, tuple(q4_k_codes(i) for i in range(4)), k_scales, k_minimums),
        GroupFormat("Q5_K", 32, 0, 176, tuple(q5_k_codes(i) for i in range(4)), k_scales, k_minimums),
        GroupFormat("Q6_K", 16, 0, 210, tuple(q6_k_codes(i) for i in range(4)), q6_k_scales, q6_k_minimums),
    ]
}
