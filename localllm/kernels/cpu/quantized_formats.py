"""How the formats whose codes lie in the file, bit by bit, yield their weights to the int8 kernels.

The formats that name several weights at once are in quantized_codebooks.py. Layouts: see blocks_*.py. A function of the
group's address takes it in an int64.
"""

from localllm.kernels.cpu.blocks_table import DOUBLED_E2M1, HALVED_E8M0, IQ4_VALUES
from localllm.kernels.cpu.group_format import ChunkFormat, GroupFormat
from localllm.kernels.cpu.quantized_codebooks import CODEBOOKS
from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    bytes_of,
    concatenate_u8x16,
    concatenate_u8x32,
    concatenate_u8x64,
    constant_f32,
    constant_u8,
    f32x8,
    f32x16,
    float_i8x16,
    float_u8x8,
    load_f16,
    load_splat_8,
    load_splat_f16x8,
    load_splat_f16x16,
    load_u8,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    load_u16,
    load_u32,
    make_flags,
    make_gather_f16,
    make_gather_planes,
    make_gather_powers,
    make_lookup,
    make_quads,
    make_rotate,
    make_shift,
    make_shuffle,
    make_where,
    splat_f32x8,
    splat_f32x16,
    splits_dot,
    u8x16,
    u8x32,
    u8x64,
    wants_signed_codes,
)

# ---- 32 weights to a block ------------------------------------------------------------------------------------------

nibble, sign_bits = constant_u8(u8x64, 15), constant_u8(u8x64, 128)
down_4 = make_shift(u8x64, False, 4)
even_quads, odd_quads = make_quads(*range(0, 16, 2)), make_quads(*range(1, 16, 2))
each_twice = make_shuffle(u8x64, u8x32, [*range(16)] * 2 + [*range(16, 32)] * 2)
upper_nibble_per_16 = make_shift(u8x64, False, *[0] * 8, *[4] * 8)
stripe_chunk = make_shuffle(u8x64, u8x64, [32 * run + 8 * q + i for q in range(4) for run in (0, 1) for i in range(8)])
flags_16 = make_flags(16)


@device
def four_by_16(address, step):
    """16 bytes from each of four addresses."""
    low = concatenate_u8x32(load_u8x16(address), load_u8x16(address + step))
    return concatenate_u8x64(low, concatenate_u8x32(load_u8x16(address + 2 * step), load_u8x16(address + 3 * step)))


@device
def striped_nibbles(first, second):
    """From the 16 bytes of runs 0 to 3 and of 4 to 7, whose low nibbles are weights 0 to 15 of a run."""
    low, high = even_quads(first, second), odd_quads(first, second)
    return low & nibble(), high & nibble(), down_4(low) & nibble(), down_4(high) & nibble()


def nibbles(at, block_bytes):
    """The codes of eight blocks that hold 16 bytes of nibbles each, and of two."""

    @device
    def codes(address):
        first = address + at
        return striped_nibbles(four_by_16(first, block_bytes), four_by_16(first + 4 * block_bytes, block_bytes))

    @device
    def chunk(address):
        pair = concatenate_u8x32(load_u8x16(address + at), load_u8x16(address + at + block_bytes))
        return stripe_chunk(upper_nibble_per_16(each_twice(pair)) & nibble())

    return codes, chunk


def fifth_bits(at, block_bytes, codes_and_chunk):
    """Codes of 5 bits: nibbles, and 4 bytes a block with the fifth bits."""
    nibble_codes, nibble_chunk = codes_and_chunk
    planes = make_gather_planes(block_bytes)

    @device
    def codes(address):
        c0, c1, c2, c3 = nibble_codes(address)
        b0, b1, b2, b3 = planes(address + at)
        return c0 | flags_16(b0), c1 | flags_16(b1), c2 | flags_16(b2), c3 | flags_16(b3)

    @device
    def chunk(address):
        bits = load_u32(address + at) | (load_u32(address + at + block_bytes) << 32)
        return nibble_chunk(address) | stripe_chunk(flags_16(bits))

    return codes, chunk


def looked_up(values, codes_and_chunk):
    """Codes that name one of 16 values, less the smallest."""
    nibble_codes, nibble_chunk = codes_and_chunk
    value = make_lookup(*(int(value) - int(min(values)) for value in values))

    @device
    def codes(address):
        c0, c1, c2, c3 = nibble_codes(address)
        return value(c0), value(c1), value(c2), value(c3)

    return codes, device(lambda address: value(nibble_chunk(address)))


even_in_turn, odd_in_turn = make_quads(0, 8, 2, 10, 4, 12, 6, 14), make_quads(1, 9, 3, 11, 5, 13, 7, 15)
first_pairs, second_pairs = make_quads(0, 1, 4, 5, 8, 9, 12, 13), make_quads(2, 3, 6, 7, 10, 11, 14, 15)


Q8_0_OFFSET = 0 if wants_signed_codes() else 128
q8_0_offset = constant_u8(u8x64, Q8_0_OFFSET)


@device
def two_q8_0_blocks(first, second):
    """Signed bytes; flipping the sign bit adds 128."""
    return concatenate_u8x64(load_u8x32(first + 2), load_u8x32(second + 2)) ^ q8_0_offset()


@device
def q8_0_chunk(address):
    return stripe_chunk(two_q8_0_blocks(address, address + 34))


@device
def q8_0_codes(address):
    """Eight shuffles within and across 16 bytes, which cost less than any order of quads from two vectors."""
    v0, v1 = two_q8_0_blocks(address, address + 68), two_q8_0_blocks(address + 34, address + 102)
    v2, v3 = two_q8_0_blocks(address + 136, address + 204), two_q8_0_blocks(address + 170, address + 238)
    even, odd, even_2, odd_2 = even_in_turn(v0, v1), odd_in_turn(v0, v1), even_in_turn(v2, v3), odd_in_turn(v2, v3)
    first, second = first_pairs(even, even_2), first_pairs(odd, odd_2)
    return first, second, second_pairs(even, even_2), second_pairs(odd, odd_2)


def blocks_of_32(name, block_bytes, codes_and_chunk, offset, largest, minimum_at=0):
    """A format whose blocks hold 32 weights and begin with a float16 scale; some have a float16 minimum too."""
    codes, chunk = codes_and_chunk
    scales, minimums = make_gather_f16(block_bytes), make_gather_f16(block_bytes)
    of_group = device(lambda address: minimums(address + minimum_at)) if minimum_at else None
    of_block = device(lambda address: load_f16(address + minimum_at)) if minimum_at else None
    scale = device(lambda address: load_f16(address))
    group_scales = device(lambda address: scales(address))
    return GroupFormat(
        name, 32, 8 * block_bytes, codes, offset, largest, group_scales, of_group,
        ChunkFormat(block_bytes, chunk, scale, of_block),
    )  # fmt: skip


@device
def mxfp4_scale(address):
    return HALVED_E8M0[load_u8(address)]


mxfp4_scales = make_gather_powers(17, 128)
mxfp4_codes, mxfp4_chunk = looked_up(DOUBLED_E2M1, nibbles(1, 17))
mxfp4 = GroupFormat(
    "MXFP4",
    32,
    136,
    mxfp4_codes,
    12,
    24,
    device(lambda address: mxfp4_scales(address)),
    None,
    ChunkFormat(17, mxfp4_chunk, mxfp4_scale, None),
)

# ---- the k-quants ---------------------------------------------------------------------------------------------------


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
def k_minimums(address):
    return -packed_minimums(address + 4) * load_splat_f16x8(address + 2)


# Quad q of each of four runs of 32 bytes, twice: for two runs of weights, in the low and the high nibbles.
runs_0, runs_1, runs_2, runs_3 = (make_quads(*[4 * run + q for run in range(4) for _ in (0, 1)]) for q in range(4))
nibble_masks = constant_u8(u8x64, *[0x0F] * 8, *[0xF0] * 8)
sixteenths = constant_f32(f32x8, 1, 1 / 16)
odd_down_4 = make_shift(u8x64, False, *[0] * 4, *[4] * 4)


@device
def q4_k_codes(address):
    """High nibbles stay where they are: 16 * code, and a sixteenth of the scale."""
    v, w, mask = load_u8x64(address + 16), load_u8x64(address + 80), nibble_masks()
    return runs_0(v, w) & mask, runs_1(v, w) & mask, runs_2(v, w) & mask, runs_3(v, w) & mask


@device
def q4_k_scales(address):
    return packed_scales(address + 4) * (load_splat_f16x8(address) * sixteenths())


@device
def q4_k_small_codes(address):
    """High nibbles, too, are shifted down."""
    v, w, mask = load_u8x64(address + 16), load_u8x64(address + 80), nibble()
    return (
        odd_down_4(runs_0(v, w)) & mask, odd_down_4(runs_1(v, w)) & mask,
        odd_down_4(runs_2(v, w)) & mask, odd_down_4(runs_3(v, w)) & mask,
    )  # fmt: skip


add_fifth_bit = make_where([1 << run for run in range(8) for _ in range(8)], 16)


@device
def q5_k_codes(address):
    v, w, bits = load_u8x64(address + 48), load_u8x64(address + 112), address + 16
    return (
        add_fifth_bit(odd_down_4(runs_0(v, w)) & nibble(), load_splat_8(bits)),
        add_fifth_bit(odd_down_4(runs_1(v, w)) & nibble(), load_splat_8(bits + 8)),
        add_fifth_bit(odd_down_4(runs_2(v, w)) & nibble(), load_splat_8(bits + 16)),
        add_fifth_bit(odd_down_4(runs_3(v, w)) & nibble(), load_splat_8(bits + 24)),
    )


@device
def q5_k_scales(address):
    return packed_scales(address + 4) * load_splat_f16x8(address)


q4_k_small = GroupFormat("Q4_K", 32, 144, q4_k_small_codes, 0, 15, q5_k_scales, k_minimums)
q4_k = (  # with AVX2, small codes are read at 12 GB/s by one core, others at 7
    q4_k_small if splits_dot() else GroupFormat("Q4_K", 32, 144, q4_k_codes, 0, 240, q4_k_scales, k_minimums)
)


# Planes of 2 bits: quad q of the first and of the second 32 bytes, for four runs of weights each.
planes_0, planes_1, planes_2, planes_3 = (
    make_shuffle(u8x64, u8x64, [32 * half + 8 * q + i for half in (0, 1) for _ in range(4) for i in range(8)])
    for q in range(4)
)
plane_masks = constant_u8(u8x64, *[m for m in (3, 12, 48, 192) for _ in range(8)])
two_bits = constant_u8(u8x64, 3)
down_plane = make_shift(u8x64, False, *[2 * plane for plane in range(4) for _ in range(4)])
quarters = constant_f32(f32x16, *[4.0**-plane for plane in range(4) for _ in (0, 1)])
low_half = constant_u8(u8x16, 15)
upper_half = make_shift(u8x16, False, 4)


@device
def q2_k_codes(address):
    """Codes stay where they are: times 1, 4, 16 and 64, and the scale's inverse."""
    v, mask = load_u8x64(address + 16), plane_masks()
    return planes_0(v) & mask, planes_1(v) & mask, planes_2(v) & mask, planes_3(v) & mask


@device
def q2_k_small_scales(address):
    return float_i8x16(load_u8x16(address) & low_half()) * load_splat_f16x16(address + 80)


@device
def q2_k_scales(address):
    return q2_k_small_scales(address) * quarters()


@device
def q2_k_minimums(address):
    return -float_i8x16(upper_half(load_u8x16(address)) & low_half()) * load_splat_f16x16(address + 82)


def two_bit_codes(at):
    """Codes from their places, shifted down."""

    @device
    def codes(address):
        v = load_u8x64(address + at)
        return (
            down_plane(planes_0(v)) & two_bits(), down_plane(planes_1(v)) & two_bits(),
            down_plane(planes_2(v)) & two_bits(), down_plane(planes_3(v)) & two_bits(),
        )  # fmt: skip

    return codes


q3_k_low_codes = two_bit_codes(32)
add_third_bit = make_where([1 << run for run in range(8) for _ in range(8)], 4)


@device
def q3_k_codes(address):
    c0, c1, c2, c3 = q3_k_low_codes(address)
    return (
        add_third_bit(c0, load_splat_8(address)),
        add_third_bit(c1, load_splat_8(address + 8)),
        add_third_bit(c2, load_splat_8(address + 16)),
        add_third_bit(c3, load_splat_8(address + 24)),
    )


@device
def q3_k_scales(address):
    """16 scales of 6 bits: eight bytes with the low nibbles of two, four bytes with the high bits of four."""
    low = load_u32(address + 96) | (load_u32(address + 100) << 32)
    high = load_u32(address + 104)
    high_first, high_second = high | (high >> 2) << 32, (high >> 4) | (high >> 6) << 32
    first = (low & 0x0F0F0F0F0F0F0F0F) | ((high_first & 0x0303030303030303) << 4)
    second = ((low >> 4) & 0x0F0F0F0F0F0F0F0F) | ((high_second & 0x0303030303030303) << 4)
    codes = float_i8x16(concatenate_u8x16(bytes_of(first), bytes_of(second)))
    return (codes - splat_f32x16(32.0)) * load_splat_f16x16(address + 108)


low_0, low_1, low_2, low_3 = (
    make_quads(*[8 * half + 4 * (plane % 2) + q for half in (0, 1) for plane in range(4)]) for q in range(4)
)
q6_low_down = make_shift(u8x64, False, *[4 * (plane // 2) for plane in range(4) for _ in range(4)])
q6_high_up = make_rotate(4, 2, 0, 62)  # the two bits of each plane to bits 4 and 5
bits_4_and_5 = constant_u8(u8x64, 0x30)


@device
def q6_k_codes(address):
    v, w, high = load_u8x64(address), load_u8x64(address + 64), load_u8x64(address + 128)
    return (
        (q6_low_down(low_0(v, w)) & nibble()) | (q6_high_up(planes_0(high)) & bits_4_and_5()),
        (q6_low_down(low_1(v, w)) & nibble()) | (q6_high_up(planes_1(high)) & bits_4_and_5()),
        (q6_low_down(low_2(v, w)) & nibble()) | (q6_high_up(planes_2(high)) & bits_4_and_5()),
        (q6_low_down(low_3(v, w)) & nibble()) | (q6_high_up(planes_3(high)) & bits_4_and_5()),
    )


@device
def q6_k_scales(address):
    return float_i8x16(load_u8x16(address + 192)) * load_splat_f16x16(address + 208)


# ---- other blocks of 256 --------------------------------------------------------------------------------------------

iq4_value = make_lookup(*(int(value) + 127 for value in IQ4_VALUES))


@device
def iq4_xs_codes(address):
    c0, c1, c2, c3 = striped_nibbles(load_u8x64(address + 8), load_u8x64(address + 72))
    return iq4_value(c0), iq4_value(c1), iq4_value(c2), iq4_value(c3)


@device
def iq4_xs_scales(address):
    """Eight scales of 6 bits: the nibbles of four bytes, and two bits each of two bytes, spread over eight bytes."""
    low, high = load_u32(address + 4), load_u16(address + 2)
    low = (low | low << 16) & 0x0000FFFF0000FFFF
    low = (low | low << 8) & 0x00FF00FF00FF00FF
    low = (low | low << 4) & 0x0F0F0F0F0F0F0F0F
    high = (high | high << 24) & 0x000000FF000000FF
    high = (high | high << 12) & 0x000F000F000F000F
    high = (high | high << 6) & 0x0303030303030303
    return (float_u8x8(bytes_of(low | high << 4)) - splat_f32x8(32.0)) * load_splat_f16x8(address)


@device
def tq2_0_scales(address):
    return load_splat_f16x8(address + 64)


def multiplied(format):
    """The format as dot products want it: if those are of signed bytes, large codes are less by 128, and the offset."""
    if format.largest < 128 or format.minimums or not wants_signed_codes():
        return format
    codes_of, chunk = format.codes, format.chunk

    @device
    def codes(address):
        c0, c1, c2, c3 = codes_of(address)
        return c0 ^ sign_bits(), c1 ^ sign_bits(), c2 ^ sign_bits(), c3 ^ sign_bits()

    if chunk:
        chunk_codes = chunk.codes
        chunk = chunk._replace(codes=device(lambda address: chunk_codes(address) ^ sign_bits()))
    return format._replace(codes=codes, chunk=chunk, offset=format.offset - 128, largest=format.largest - 128)


QUANTIZED: dict[str, GroupFormat] = {
    row.name: multiplied(row)
    for row in [
        blocks_of_32("Q4_0", 18, nibbles(2, 18), 8, 15),
        blocks_of_32("Q4_1", 20, nibbles(4, 20), 0, 15, 2),
        blocks_of_32("Q5_0", 22, fifth_bits(2, 22, nibbles(6, 22)), 16, 31),
        blocks_of_32("Q5_1", 24, fifth_bits(4, 24, nibbles(8, 24)), 0, 31, 2),
        blocks_of_32("Q8_0", 34, (q8_0_codes, q8_0_chunk), Q8_0_OFFSET, Q8_0_OFFSET + 127),
        blocks_of_32("IQ4_NL", 18, looked_up(IQ4_VALUES, nibbles(2, 18)), 127, 240),
        mxfp4,
        GroupFormat("Q2_K", 16, 84, q2_k_codes, 0, 192, q2_k_scales, q2_k_minimums),
        GroupFormat("Q3_K", 16, 110, q3_k_codes, 4, 7, q3_k_scales),
        q4_k,
        GroupFormat("Q5_K", 32, 176, q5_k_codes, 0, 31, q5_k_scales, k_minimums),
        GroupFormat("Q6_K", 16, 210, q6_k_codes, 32, 63, q6_k_scales),
        GroupFormat("IQ4_XS", 32, 136, iq4_xs_codes, 127, 240, iq4_xs_scales),
        GroupFormat("TQ2_0", 32, 66, two_bit_codes(0), 1, 3, tq2_0_scales),
        *CODEBOOKS,
    ]
}

# What tiles unpack, if not the same: here no scale may hide in the codes.
SMALL_CODES = {
    "Q4_K": q4_k_small,
    "Q2_K": GroupFormat("Q2_K", 16, 84, two_bit_codes(16), 0, 3, q2_k_small_scales, q2_k_minimums),
}
