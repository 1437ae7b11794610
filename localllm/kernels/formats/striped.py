"""The common parts of families whose bytes of 256 weights are striped (group_format.py)."""

from localllm.kernels.cpu.signature import device
from localllm.kernels.simd import (
    concatenate_u8x32,
    concatenate_u8x64,
    constant_u8,
    load_u8x16,
    load_u8x64,
    make_quads,
    make_shift,
    make_shuffle,
    u8x64,
    wants_signed_codes,
)

nibble, sign_bits = constant_u8(u8x64, 15), constant_u8(u8x64, 128)
down_4 = make_shift(u8x64, False, 4)
# Quads of 8 bytes of two vectors, in turn, or every other pair of quads. Beside dot products of a Zen 4, a shuffle
# within 16 bytes costs a tenth of one, one of whole 16 bytes a third, any order of quads from two vectors 0.85.
even_in_turn, odd_in_turn = make_quads(0, 8, 2, 10, 4, 12, 6, 14), make_quads(1, 9, 3, 11, 5, 13, 7, 15)
first_pairs, second_pairs = make_quads(0, 1, 4, 5, 8, 9, 12, 13), make_quads(2, 3, 6, 7, 10, 11, 14, 15)
two_bits = constant_u8(u8x64, 3)
stripe_chunk = make_shuffle(u8x64, u8x64, [32 * run + 8 * q + i for q in range(4) for run in (0, 1) for i in range(8)])


@device
def four_by_16(address, step):
    """Load 16 bytes from each of four addresses."""
    low = concatenate_u8x32(load_u8x16(address), load_u8x16(address + step))
    return concatenate_u8x64(low, concatenate_u8x32(load_u8x16(address + 2 * step), load_u8x16(address + 3 * step)))


@device
def striped_nibbles(first, second):
    """Return nibbles from the 16 bytes of runs 0 to 3 and of 4 to 7.

    Their low nibbles are weights 0 to 15 of a run.
    """
    return nibbles_in_turn(first_pairs(first, second), second_pairs(first, second))


@device
def nibbles_in_turn(even, odd):
    """Split the nibbles of runs 0, 2, 4, 6 and of runs 1, 3, 5, 7 into bytes."""
    low, high = even_in_turn(even, odd), odd_in_turn(even, odd)
    return low & nibble(), high & nibble(), down_4(low) & nibble(), down_4(high) & nibble()


# Planes of 2 bits: quad q of the first and of the second 32 bytes, for four runs of weights each.
planes_0, planes_1, planes_2, planes_3 = (
    make_shuffle(u8x64, u8x64, [32 * half + 8 * q + i for half in (0, 1) for _ in range(4) for i in range(8)])
    for q in range(4)
)
down_plane = make_shift(u8x64, False, *[2 * plane for plane in range(4) for _ in range(4)])


def two_bit_codes(at):
    """Shift codes down from their places."""

    @device
    def codes(address):
        v = load_u8x64(address + at)
        return (
            down_plane(planes_0(v)) & two_bits(), down_plane(planes_1(v)) & two_bits(),
            down_plane(planes_2(v)) & two_bits(), down_plane(planes_3(v)) & two_bits(),
        )  # fmt: skip

    return codes


def multiplied(format):
    """Return the format with the codes that dot products take.

    If they multiply signed bytes, 128 is subtracted from large codes and from their offset.
    """
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
