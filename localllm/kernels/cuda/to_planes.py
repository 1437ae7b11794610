"""Blocks as in the file, staged on the card, to planes (planes.py): a thread for each 32 weights.

The numbers of bytes and bits here are those of the blocks, which localllm.kernels.cpu.blocks_simple, blocks_k and
blocks_table describe.
"""

from collections.abc import Callable
from functools import reduce

from numba import cuda

from localllm.kernels.cuda.device import device, load_u8, load_u16, store_i8, store_i32
from localllm.kernels.cuda.planes import LAYOUTS, UNIT, offset
from localllm.quant.formats import BY_NAME


def halves_of_32(start):
    """4 bits each of 32 weights: those of 0 to 15 in the low halves of 16 bytes."""

    @device
    def code(block, i):
        return load_u8(block + start + (i & 15)) >> ((i >> 4 & 1) << 2) & 15

    return code


def fifth_bit(start, code):
    """A bit in front of each of 32 codes."""

    @device
    def longer(block, i):
        return code(block, i) | (load_u8(block + start + (i >> 3)) >> (i & 7) & 1) << 4

    return longer


def halves_of_64(start):
    """4 bits each: those of weights 0 to 31 of 64 in the low halves of 32 bytes."""

    @device
    def code(block, i):
        return load_u8(block + start + 32 * (i >> 6) + (i & 31)) >> ((i >> 5 & 1) << 2) & 15

    return code


def quarters(start):
    """2 bits each: 128 weights in 32 bytes."""

    @device
    def code(block, i):
        return load_u8(block + start + 32 * (i >> 7) + (i & 31)) >> ((i >> 5 & 3) << 1) & 3

    return code


def bit_in_front(start, places, code):
    """A bit in front of each code of `places` bits: 256 weights in 32 bytes."""

    @device
    def longer(block, i):
        return code(block, i) | (load_u8(block + start + (i & 31)) >> (i >> 5) & 1) << places

    return longer


@device
def byte_code(block, i):
    return load_u8(block + 2 + i)


@device
def q6_k_code(block, i):
    low = load_u8(block + 64 * (i >> 7) + (i & 63)) >> ((i >> 6 & 1) << 2) & 15
    return low | (load_u8(block + 128 + 32 * (i >> 7) + (i & 31)) >> ((i >> 5 & 3) << 1) & 3) << 4


@device
def iq4_xs_code(block, i):
    return load_u8(block + 8 + 16 * (i >> 5) + (i & 15)) >> ((i >> 4 & 1) << 2) & 15


CODES: dict[str, Callable] = {
    "Q4_0": halves_of_32(2),
    "Q4_1": halves_of_32(4),
    "Q5_0": fifth_bit(2, halves_of_32(6)),
    "Q5_1": fifth_bit(4, halves_of_32(8)),
    "Q8_0": byte_code,
    "Q2_K": quarters(16),
    "Q3_K": bit_in_front(0, 2, quarters(32)),
    "Q4_K": halves_of_64(16),
    "Q5_K": bit_in_front(16, 4, halves_of_64(48)),
    "Q6_K": q6_k_code,
    "IQ4_NL": halves_of_32(2),
    "IQ4_XS": iq4_xs_code,
    "MXFP4": halves_of_32(1),
}


# What puts a unit's part of a plane where it belongs: the unit of that number in a block, to `target`.


def put_nibbles(code):
    @device
    def put(block, number, target):
        for w in range(4):
            word = 0
            for b in range(4):
                i = UNIT * number + 4 * w + b
                word |= (code(block, i) & 15 | (code(block, i + 16) & 15) << 4) << 8 * b
            store_i32(target + 4 * w, word)

    return put


def put_table(code):
    @device
    def put(block, number, target):
        for w in range(4):
            word = 0
            for b in range(4):
                i = UNIT * number + 4 * w + b
                word |= code(block, i) << 4 * b | code(block, i + 16) << 4 * b + 16
            store_i32(target + 4 * w, word)

    return put


def put_pairs(code, shift):
    @device
    def put(block, number, target):
        for half in range(2):
            word = 0
            for w in range(4):
                for b in range(4):
                    i = UNIT * number + 16 * half + 4 * w + b
                    word |= (code(block, i) >> shift & 3) << 8 * b + 2 * w
            store_i32(target + 4 * half, word)

    return put


def put_bits(code, shift):
    @device
    def put(block, number, target):
        word = 0
        for i in range(UNIT):
            word |= (code(block, UNIT * number + i) >> shift & 1) << 8 * (i & 3) + (i >> 2)
        store_i32(target, word)

    return put


def put_bytes(start, count):
    """Bytes as they are, `count` of each unit or block."""

    @device
    def put(block, number, target):
        for i in range(count):
            store_i8(target + i, load_u8(block + start + count * number + i))

    return put


@device
def put_k_header(block, number, target):
    """See planes.py; `number` is 0, of the block."""
    scales, minimums, high = 0, 0, 0
    for group in range(4):
        scale, minimum = load_u8(block + 4 + group), load_u8(block + 8 + group)
        both = load_u8(block + 12 + group)  # the low 4 bits of those of groups 4 to 7
        scales |= (scale & 15) << 4 * group | (both & 15) << 4 * group + 16
        minimums |= (minimum & 15) << 4 * group | both >> 4 << 4 * group + 16
        high |= (scale >> 4 & 3) << 2 * group | (scale >> 6) << 2 * group + 8
        high |= (minimum >> 4 & 3) << 2 * group + 16 | (minimum >> 6) << 2 * group + 24
    store_i32(target, load_u16(block) | load_u16(block + 2) << 16)
    store_i32(target + 4, scales)
    store_i32(target + 8, minimums)
    store_i32(target + 12, high)


@device
def put_q3_k_scales(block, number, target):
    """The low 4 bits of the scales of groups 2 `number` and the next."""
    source, shift = block + 96 + (2 * number & 7), number >> 2 << 2
    store_i8(target, load_u8(source) >> shift & 15 | (load_u8(source + 1) >> shift & 15) << 4)


@device
def put_q3_k_high(block, number, target):
    """The high 2 bits of the scales of 16 groups, in their order; `number` is 0, of the block."""
    word = 0
    for group in range(16):
        word |= (load_u8(block + 104 + (group & 3)) >> (group >> 2 << 1) & 3) << 2 * group
    store_i32(target, word)


def parts(name: str) -> dict[str, Callable]:
    """What fills each plane of a format."""
    code = CODES[name]
    own = {
        "Q4_0": {"d": put_bytes(0, 2)},
        "Q4_1": {"d_minimum": put_bytes(0, 4)},
        "Q5_0": {"bits": put_bits(code, 4), "d": put_bytes(0, 2)},
        "Q5_1": {"bits": put_bits(code, 4), "d_minimum": put_bytes(0, 4)},
        "Q8_0": {"bytes": put_bytes(2, 16), "last_bytes": put_bytes(18, 16), "d": put_bytes(0, 2)},
        "Q2_K": {"pairs": put_pairs(code, 0), "d_dmin": put_bytes(80, 4), "scales": put_bytes(0, 2)},
        "Q3_K": {
            "pairs": put_pairs(code, 0), "bits": put_bits(code, 2), "high": put_q3_k_high, "d": put_bytes(108, 2),
            "scales": put_q3_k_scales,
        },
        "Q4_K": {"header": put_k_header},
        "Q5_K": {"header": put_k_header, "bits": put_bits(code, 4)},
        "Q6_K": {"pairs": put_pairs(code, 4), "scales": put_bytes(192, 2), "d": put_bytes(208, 2)},
        "IQ4_NL": {"d": put_bytes(0, 2)},
        "IQ4_XS": {"header": put_bytes(0, 8)},
        "MXFP4": {"exponent": put_bytes(0, 1)},
    }[name]  # fmt: skip
    return {"nibbles": put_nibbles(code), "table": put_table(code)} | own


def in_place(plane, start, put):
    """A function of a block, the unit's number in it, the row's planes and units, and the unit's number in the row."""
    size, of_block = plane.bytes, plane.weights > UNIT

    @device
    def placed(block, number, row, units, unit):
        target = row + (units * start >> 3)
        if not of_block:
            put(block, number, target + size * unit)
        elif number == 0:
            put(block, 0, target + size * (unit >> 3))

    return placed


def both(first, second):
    @device
    def do(block, number, row, units, unit):
        first(block, number, row, units, unit)
        second(block, number, row, units, unit)

    return do


def make(name):
    """The kernel for one format."""
    put = parts(name)
    place = reduce(both, [in_place(plane, offset(name, plane.name, 256), put[plane.name]) for plane in LAYOUTS[name]])
    block_bytes, block_units = BY_NAME[name].bytes, BY_NAME[name].block // UNIT

    def to_planes(blocks, first, last, columns, planes, row_bytes):
        number = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if number >= (last - first) // UNIT:
            return
        units, unit = columns // UNIT, first // UNIT + number
        row, block = planes + unit // units * row_bytes, blocks + number // block_units * block_bytes
        place(block, number % block_units, row, units, unit % units)

    return to_planes
