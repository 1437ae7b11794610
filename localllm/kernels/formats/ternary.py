"""TQ1_0 and TQ2_0: weights of -d, 0 or d, 256 in a block.

TQ1_0 stores five base-3 digits in a byte, since 3 ** 5 = 243 fits in 256; TQ2_0 stores codes of 2 bits.
"""

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.group_format import GroupFormat
from localllm.kernels.formats.striped import two_bit_codes
from localllm.kernels.simd import (
    concatenate_u8x64,
    load_f16,
    load_splat_f16x8,
    load_u8,
    load_u8x32,
    make_shuffle,
    make_trits,
    store_f32,
    u8x64,
)
from localllm.quant.layouts import LAYOUTS, TRITS

TQ2 = LAYOUTS["TQ2_0"]
TQ1_D, TQ2_D = LAYOUTS["TQ1_0"].d, TQ2.d
RUNS, STRIPES = range(8), range(4)


@device
def unpack_trits(codes, count, trits, scale, out):
    """Unpack `trits` base-3 digits of each of `count` bytes to weights at `out`.

    Order: digit 0 of all bytes, then digit 1 of all bytes, and so on.

    A byte is a fraction in base three, byte / 256: multiplying it by 3 moves its next digit in front of the point.
    Digits 0, 1 and 2 stand for -scale, 0 and scale.
    """
    for i in range(count):
        fraction = load_u8(codes + i)
        for n in range(trits):
            tripled = 3 * fraction
            store_f32(out + 4 * (n * count + i), scale * np.float32((tripled >> 8) - 1))
            fraction = tripled & 255


@device
def unpack_tq1_0(block, out):
    scale = load_f16(block + TQ1_D)
    for first, byte, count, digits in TRITS:
        unpack_trits(block + byte, count, digits, scale, out + 4 * first)


def tq1_0_place(weight):
    """Return where TQ1_0 stores weight number `weight` of a block: (byte, digit)."""
    first, byte, count, _ = next(part for part in reversed(TRITS) if weight >= part[0])
    return byte + (weight - first) % count, (weight - first) // count


def tq1_0_stripe(q):
    """Return two intrinsics for vector q of a group's codes: one shuffles bytes, one extracts their digits.

    The shuffle's source has bytes 0 to 31 of a block, then bytes 22 to 53.
    """
    places = [tq1_0_place(32 * run + 8 * q + i) for run in RUNS for i in range(8)]
    order = [byte if byte < 32 else byte + 10 for byte, _ in places]
    return make_shuffle(u8x64, u8x64, order), make_trits(*(digit for _, digit in places))


(bytes_0, trits_0), (bytes_1, trits_1), (bytes_2, trits_2), (bytes_3, trits_3) = (tq1_0_stripe(q) for q in STRIPES)


@device
def tq1_0_codes(address):
    v = concatenate_u8x64(load_u8x32(address), load_u8x32(address + 22))  # a group has 54 bytes
    return trits_0(bytes_0(v)), trits_1(bytes_1(v)), trits_2(bytes_2(v)), trits_3(bytes_3(v))


@device
def tq1_0_scales(address):
    return load_splat_f16x8(address + TQ1_D)


@device
def tq2_0_scales(address):
    return load_splat_f16x8(address + TQ2_D)


GROUPS = {
    "TQ1_0": GroupFormat("TQ1_0", 32, 54, tq1_0_codes, 1, 2, tq1_0_scales),
    "TQ2_0": GroupFormat("TQ2_0", 32, 66, two_bit_codes(TQ2.codes[0].at), TQ2.centre, 3, tq2_0_scales),
}
UNPACK = {"TQ1_0": unpack_tq1_0}
