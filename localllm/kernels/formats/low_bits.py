"""Formats of one or two bits: TQ1_0 and TQ2_0, whose weights are -d, 0 or d; Q1_0 and Q2_0.

A block of TQ1_0 and TQ2_0 has 256 weights. TQ1_0 stores five base-3 digits in a byte, since 3 ** 5 = 243 fits in 256;
TQ2_0 stores codes of 2 bits. Q1_0 and Q2_0 store codes of one bit or two, the lowest bits of a byte first.
"""

import numpy as np

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import ChunkFormat, GroupFormat, build_two_bit_reader, load_four
from localllm.quant.formats import BY_NAME, LAYOUTS, TRITS

RUNS, STRIPES = range(8), range(4)

# ---- Q2_0 -----------------------------------------------------------------------------------------------------------

Q2_BYTES, Q2_CODES = BY_NAME["Q2_0"].bytes, LAYOUTS["Q2_0"].codes[0].at
# A byte of a block has the codes of four weights. A shuffle copies it to the bytes of all four; then even weights take
# bits 0 and 1 or 4 and 5 of their copy, odd weights bits 2 and 3 or 6 and 7.
q2_stripes = [
    simd.make_shuffle(simd.u8x64, simd.u8x64, [8 * r + 2 * q + i // 4 for r in RUNS for i in range(8)]) for q in STRIPES
]
stripe_0, stripe_1, stripe_2, stripe_3 = q2_stripes
stripe_chunk = simd.make_shuffle(
    simd.u8x64, simd.u8x16, [8 * r + 2 * q + i // 4 for q in STRIPES for r in (0, 1) for i in range(8)]
)
even_down, odd_down = simd.make_shift(simd.u8x64, False, 0, 4), simd.make_shift(simd.u8x64, False, 2, 6)
even_codes, odd_codes = simd.constant(simd.u8x64, 3, 0), simd.constant(simd.u8x64, 0, 3)


@device
def extract_two_bits(bytes_):
    return even_down(bytes_) & even_codes() | odd_down(bytes_) & odd_codes()


@device
def read_q2_codes(address):
    v = load_four(address + Q2_CODES, Q2_BYTES)
    return (
        extract_two_bits(stripe_0(v)),
        extract_two_bits(stripe_1(v)),
        extract_two_bits(stripe_2(v)),
        extract_two_bits(stripe_3(v)),
    )


@device
def read_q2_chunk(address):
    return extract_two_bits(stripe_chunk(simd.load_u8x16(address + Q2_CODES)))


@device
def read_q2_chunk_scales(address):
    return simd.pair_f32x2(simd.load_f16(address), simd.load_f16(address))


q2_scales = simd.make_gather_f16(Q2_BYTES, 2)

# ---- Q1_0 -----------------------------------------------------------------------------------------------------------

Q1_BYTES, Q1_CODES = BY_NAME["Q1_0"].bytes, LAYOUTS["Q1_0"].codes[0].at
flags = simd.make_flags(LAYOUTS["Q1_0"].step)


@device
def read_q1_codes(address):
    """Read 256 bits in two blocks as four vectors of 64 bytes: 2 where a bit is set, else 0.

    The four bytes of each run of 32 weights go to one vector each, which makes the vectors striped.
    """
    bytes_ = simd.concatenate_u8x32(simd.load_u8x16(address + Q1_CODES), simd.load_u8x16(address + Q1_BYTES + Q1_CODES))
    b0, b1, b2, b3 = simd.planes_of(bytes_)
    return flags(b0), flags(b1), flags(b2), flags(b3)


q1_scales = simd.make_gather_f16(Q1_BYTES, 4)
BIT_GROUPS = {
    "Q1_0": GroupFormat(
        "Q1_0", 32, 2 * Q1_BYTES, read_q1_codes, LAYOUTS["Q1_0"].centre, 2, device(lambda address: q1_scales(address))
    ),
    "Q2_0": GroupFormat(
        "Q2_0", 32, 4 * Q2_BYTES, read_q2_codes, LAYOUTS["Q2_0"].centre, 3, device(lambda address: q2_scales(address)),
        chunk=ChunkFormat(read_q2_chunk, read_q2_chunk_scales, None),
    ),
}  # fmt: skip


TQ2 = LAYOUTS["TQ2_0"]
TQ1_D, TQ2_D = LAYOUTS["TQ1_0"].d, TQ2.d


@device
def unpack_trits(codes, count, trits, scale, out):
    """Unpack `trits` base-3 digits of `count` bytes: digit 0 of all bytes, then digit 1, and so on.

    A byte is a fraction in base three, byte / 256: multiplying it by 3 moves its next digit in front of the point.
    Digits 0, 1 and 2 represent -scale, 0 and scale.
    """
    for i in range(count):
        fraction = simd.load_u8(codes + i)
        for n in range(trits):
            tripled = 3 * fraction
            simd.store_f32(out + 4 * (n * count + i), scale * np.float32((tripled >> 8) - 1))
            fraction = tripled & 255


@device
def unpack_tq1_0(block, out):
    scale = simd.load_f16(block + TQ1_D)
    for first, byte, count, digits in TRITS:
        unpack_trits(block + byte, count, digits, scale, out + 4 * first)


def locate_trit(weight):
    first, byte, count, _ = next(part for part in reversed(TRITS) if weight >= part[0])
    return byte + (weight - first) % count, (weight - first) // count


def build_trit_reader(q):
    """Return the shuffle and the digit extraction for vector q of codes.

    The shuffle selects among bytes 0 to 31 and 22 to 53 of a block.
    """
    places = [locate_trit(32 * run + 8 * q + i) for run in RUNS for i in range(8)]
    order = [byte if byte < 32 else byte + 10 for byte, _ in places]
    return simd.make_shuffle(simd.u8x64, simd.u8x64, order), simd.make_trits(*(digit for _, digit in places))


(bytes_0, trits_0), (bytes_1, trits_1), (bytes_2, trits_2), (bytes_3, trits_3) = (build_trit_reader(q) for q in STRIPES)


@device
def read_tq1_0_codes(address):
    v = simd.concatenate_u8x64(simd.load_u8x32(address), simd.load_u8x32(address + 22))  # a group has 54 bytes
    return trits_0(bytes_0(v)), trits_1(bytes_1(v)), trits_2(bytes_2(v)), trits_3(bytes_3(v))


@device
def read_tq1_0_scales(address):
    return simd.load_splat_f16x8(address + TQ1_D)


@device
def read_tq2_0_scales(address):
    return simd.load_splat_f16x8(address + TQ2_D)


GROUPS = BIT_GROUPS | {
    "TQ1_0": GroupFormat("TQ1_0", 32, 54, read_tq1_0_codes, 1, 2, read_tq1_0_scales),
    "TQ2_0": GroupFormat("TQ2_0", 32, 66, build_two_bit_reader(TQ2.codes[0].at), TQ2.centre, 3, read_tq2_0_scales),
}
UNPACK = {"TQ1_0": unpack_tq1_0}
