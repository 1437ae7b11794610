"""Formats with blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4."""

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import (
    ChunkFormat,
    GroupFormat,
    adapt_to_cpu,
    even_in_turn,
    first_pairs,
    load_four,
    nibble,
    odd_in_turn,
    second_pairs,
    split_alternating_nibbles,
    stripe_chunk,
)
from localllm.quant.block_codes import build_e8m0_table
from localllm.quant.formats import BY_NAME, LAYOUTS

each_twice = simd.make_shuffle(simd.u8x64, simd.u8x32, [*range(16)] * 2 + [*range(16, 32)] * 2)
upper_nibble_per_16 = simd.make_shift(simd.u8x64, False, *[0] * 8, *[4] * 8)
flags_16 = simd.make_flags(16)


def build_nibble_readers(at, block_bytes):
    """Build functions (address) that read 4-bit codes from byte `at` of blocks.

    They read eight blocks, striped, and two.
    """

    @device
    def codes(address):
        first = address + at
        return split_alternating_nibbles(
            load_four(first, 2 * block_bytes), load_four(first + block_bytes, 2 * block_bytes)
        )

    @device
    def chunk(address):
        pair = simd.concatenate_u8x32(simd.load_u8x16(address + at), simd.load_u8x16(address + at + block_bytes))
        return stripe_chunk(upper_nibble_per_16(each_twice(pair)) & nibble())

    return codes, chunk


def build_five_bit_readers(at, block_bytes, codes_and_chunk):
    """Build functions that read 5-bit codes: nibbles by `codes_and_chunk`, and fifth bits at byte `at`."""
    nibble_codes, nibble_chunk = codes_and_chunk
    planes = simd.make_gather_planes(block_bytes)

    @device
    def codes(address):
        c0, c1, c2, c3 = nibble_codes(address)
        b0, b1, b2, b3 = planes(address + at)
        return c0 | flags_16(b0), c1 | flags_16(b1), c2 | flags_16(b2), c3 | flags_16(b3)

    @device
    def chunk(address):
        bits = simd.load_u32(address + at) | (simd.load_u32(address + at + block_bytes) << 32)
        return nibble_chunk(address) | stripe_chunk(flags_16(bits))

    return codes, chunk


def build_lookup_readers(values, codes_and_chunk):
    """Build functions that read 4-bit codes and replace each by its table entry minus the smallest value."""
    nibble_codes, nibble_chunk = codes_and_chunk
    value = simd.make_lookup(*(int(value) - int(min(values)) for value in values))

    @device
    def codes(address):
        c0, c1, c2, c3 = nibble_codes(address)
        return value(c0), value(c1), value(c2), value(c3)

    return codes, device(lambda address: value(nibble_chunk(address)))


Q8_0_BYTES, Q8_0_CODES = BY_NAME["Q8_0"].bytes, LAYOUTS["Q8_0"].codes[0].at
Q8_0_OFFSET = 0 if simd.needs_signed_codes() else 128
q8_0_offset = simd.constant(simd.u8x64, Q8_0_OFFSET)


@device
def load_two_q8_0(first, second):
    """Load the codes of two blocks of Q8_0.

    Where codes must be unsigned, 128 is added by flipping their sign bits.
    """
    return (
        simd.concatenate_u8x64(simd.load_u8x32(first + Q8_0_CODES), simd.load_u8x32(second + Q8_0_CODES))
        ^ q8_0_offset()
    )


@device
def read_q8_0_chunk(address):
    return stripe_chunk(load_two_q8_0(address, address + Q8_0_BYTES))


@device
def read_q8_0_codes(address):
    """Load the codes of eight blocks as four striped vectors.

    Shuffles within 16 bytes come first, then shuffles of whole 16-byte quarters, because those are cheaper than one
    general shuffle (see group_format.py).
    """
    v0 = load_two_q8_0(address, address + 2 * Q8_0_BYTES)
    v1 = load_two_q8_0(address + Q8_0_BYTES, address + 3 * Q8_0_BYTES)
    v2 = load_two_q8_0(address + 4 * Q8_0_BYTES, address + 6 * Q8_0_BYTES)
    v3 = load_two_q8_0(address + 5 * Q8_0_BYTES, address + 7 * Q8_0_BYTES)
    even, odd, even_2, odd_2 = even_in_turn(v0, v1), odd_in_turn(v0, v1), even_in_turn(v2, v3), odd_in_turn(v2, v3)
    first, second = first_pairs(even, even_2), first_pairs(odd, odd_2)
    return first, second, second_pairs(even, even_2), second_pairs(odd, odd_2)


def build_code_readers(layout, block_bytes):
    """Return functions that read the codes of eight blocks and of two, the codes' offset, and the largest."""
    if layout.bits == 8:
        return (read_q8_0_codes, read_q8_0_chunk), Q8_0_OFFSET, Q8_0_OFFSET + 127
    low, *high = layout.codes
    codes = build_nibble_readers(low.at, block_bytes)
    if layout.values:
        return build_lookup_readers(layout.values, codes), -min(layout.values), max(layout.values) - min(layout.values)
    if high:
        codes = build_five_bit_readers(high[0].at, block_bytes, codes)
    return codes, layout.centre, (1 << layout.bits) - 1


def build_float_readers(at, block_bytes):
    """Build functions (address) that load the float16 at byte `at` of eight blocks and of two.

    They return f32x8 and f32x2.
    """
    gather = simd.make_gather_f16(block_bytes)
    return (
        device(lambda address: gather(address + at)),
        device(lambda address: simd.pair_f32x2(simd.load_f16(address + at), simd.load_f16(address + block_bytes + at))),
    )


def build_exponent_readers(at, block_bytes):
    """Build functions (address) that load the E8M0 scales at byte `at`, halved.

    They return f32x8 for eight blocks, f32x2 for two.
    """
    gather, table = simd.make_gather_powers(block_bytes, 128), build_e8m0_table()

    @device
    def two(address):
        return simd.pair_f32x2(table[simd.load_u8(address + at)], table[simd.load_u8(address + block_bytes + at)])

    return device(lambda address: gather(address + at)), two


def build_group_format(name):
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes
    (codes, chunk), offset, largest = build_code_readers(layout, block_bytes)
    scales = (
        build_float_readers(layout.d, block_bytes) if layout.d is not None else build_exponent_readers(0, block_bytes)
    )
    minimums = build_float_readers(layout.low, block_bytes) if layout.low is not None else (None, None)
    chunk_format = ChunkFormat(chunk, scales[1], minimums[1])
    return adapt_to_cpu(
        GroupFormat(name, 32, 8 * block_bytes, codes, offset, largest, scales[0], minimums[0], chunk_format)
    )


GROUPS = {name: build_group_format(name) for name, each in BY_NAME.items() if each.family == "blocks_of_32"}
