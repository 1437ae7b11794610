"""The protocol that int8 kernels use to read weights of any block format.

A *group* is 256 consecutive weights of a row. It is read as four vectors of 64 codes (unsigned bytes) and a scale for
each sub-block of 32 or 16 weights, with

    weight = scale * (code - offset)    or    weight = scale * code + minimum

A *run* is 32 consecutive weights; a group has 8. Codes are *striped*: vector q holds weights 8 q to 8 q + 7 of each
run, one run after the other:

    vector 0:  weights 0 to 7 of run 0 | 0 to 7 of run 1 | ... | 0 to 7 of run 7
    vector 1:  weights 8 to 15 of run 0 | ...
    vector 3:  weights 24 to 31 of run 0 | ...

So an element of a dot product belongs to the same run in all four vectors, which are added before anything is scaled.
With codes in order, every vector needed a scale, a conversion and a sum of its own, and a row took twice the time. A
sub-block of 16 is half a run, in vectors 0 and 1, or 2 and 3.

A scale may be divided by a power of two that its codes are multiplied by (16 * code and scale / 16), which saves
shifts. If blocks have 32 or 64 weights and no smaller sub-blocks, a row may end with *chunks* of 64 weights, which are
striped alike: vector element 16 q + 8 r + i is weight 8 q + i of run r.

The module also has shuffles and readers that several families share. Byte order is described in octets, 8 bytes, which
LLVM shuffles as 64-bit integers.
"""

from collections.abc import Callable
from typing import NamedTuple

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device


class GroupFormat(NamedTuple):
    """The constants of a block format, and its device functions, which read a group: 256 weights at an address."""

    name: str
    sub_block: int  # weights that share a scale: 32 or 16
    group_bytes: int
    codes: Callable  # address -> four u8x64, striped; signed bytes if `needs_signed_codes` and there is no minimum
    offset: int  # the code that represents zero; 0 for formats with minimums
    largest: int  # the largest code
    scales: Callable  # address -> f32x8, or f32x16 if sub_block is 16; in order
    minimums: Callable | None = None  # address -> the same type
    chunk: "ChunkFormat | None" = None
    # Products are scaled in integers (gemm_int16.py). scales: int16 [16][2], each twice. minimums, for each of 8 runs:
    # int16 [2], -offset * scale of both sub-blocks; f32, the scale of all 256 weights.
    has_integer_scales: bool = False


class ChunkFormat(NamedTuple):
    """The device functions of a format that read a chunk: 64 weights at an address."""

    codes: Callable  # address -> u8x64, striped
    scales: Callable  # address -> f32x2, of two runs of 32
    minimums: Callable | None  # the same


nibble, sign_bits = simd.constant(simd.u8x64, 15), simd.constant(simd.u8x64, 128)
down_4 = simd.make_shift(simd.u8x64, False, 4)
# Shuffles of the octets of two vectors. even_in_turn, odd_in_turn: the even, or the odd, octets of both, alternately;
# first_pairs, second_pairs: every other pair of octets. On a Zen 4 that computes dot products at the same time, a
# shuffle within 16 bytes costs a tenth of a dot product, one of whole 16-byte quarters a third, any order of octets
# 0.85.
even_in_turn, odd_in_turn = simd.make_quads(0, 8, 2, 10, 4, 12, 6, 14), simd.make_quads(1, 9, 3, 11, 5, 13, 7, 15)
first_pairs, second_pairs = simd.make_quads(0, 1, 4, 5, 8, 9, 12, 13), simd.make_quads(2, 3, 6, 7, 10, 11, 14, 15)
two_bits = simd.constant(simd.u8x64, 3)
stripe_chunk = simd.make_shuffle(
    simd.u8x64, simd.u8x64, [32 * run + 8 * q + i for q in range(4) for run in (0, 1) for i in range(8)]
)


@device
def load_four(address, step):
    low = simd.concatenate_u8x32(simd.load_u8x16(address), simd.load_u8x16(address + step))
    return simd.concatenate_u8x64(
        low, simd.concatenate_u8x32(simd.load_u8x16(address + 2 * step), simd.load_u8x16(address + 3 * step))
    )


@device
def split_nibbles(first, second):
    """Split nibbles into four striped u8x64.

    first, second: 16 bytes for each of runs 0 to 3, and of 4 to 7. Weights 0 to 15 of a run are the low nibbles of its
    bytes, weights 16 to 31 the high nibbles.
    """
    return split_alternating_nibbles(first_pairs(first, second), second_pairs(first, second))


@device
def split_alternating_nibbles(even, odd):
    """Split nibbles into four striped u8x64; even, odd: 16 bytes for each even run, and for each odd run."""
    low, high = even_in_turn(even, odd), odd_in_turn(even, odd)
    return low & nibble(), high & nibble(), down_4(low) & nibble(), down_4(high) & nibble()


# Shuffles for 2-bit codes: octet q of the first 32 bytes four times, for the runs 0 to 3 in their bits, and of the
# second 32 bytes, for the runs 4 to 7.
planes_0, planes_1, planes_2, planes_3 = (
    simd.make_shuffle(
        simd.u8x64, simd.u8x64, [32 * half + 8 * q + i for half in (0, 1) for _ in range(4) for i in range(8)]
    )
    for q in range(4)
)
down_plane = simd.make_shift(simd.u8x64, False, *[2 * plane for plane in range(4) for _ in range(4)])


def build_two_bit_reader(at):
    """Build a function (address) that reads a group's 2-bit codes as four striped u8x64.

    at: offset of the 64 bytes of codes.
    """

    @device
    def codes(address):
        v = simd.load_u8x64(address + at)
        return (
            down_plane(planes_0(v)) & two_bits(), down_plane(planes_1(v)) & two_bits(),
            down_plane(planes_2(v)) & two_bits(), down_plane(planes_3(v)) & two_bits(),
        )  # fmt: skip

    return codes


def adapt_to_cpu(format):
    """Return the format, with signed codes if this CPU multiplies only those.

    If the CPU multiplies signed bytes, 128 is subtracted from codes that may exceed 127.
    """
    if format.largest < 128 or format.minimums or not simd.needs_signed_codes():
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
