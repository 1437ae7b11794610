"""Convert weights: blocks to planes, planes to float16, and embedding rows to float32.

Blocks in the file's layout (localllm.quant.formats), copied to the GPU, become planes (planes.py), with a thread for
every 32 weights. For products with many tokens, planes are unpacked to float16: four threads read the same unit, and
each writes 8 of its weights, so neighbouring threads write neighbouring weights. For the embedding matrix, a block of
threads looks up a token's row.
"""

from collections.abc import Callable
from functools import reduce

from numba import cuda, float32

from localllm.kernels.cuda import gpu
from localllm.kernels.cuda.matmul.planes import FLOAT_FORMATS, PLANES, UNIT, compute_plane_offset, compute_unit_shift
from localllm.kernels.cuda.matmul.units import UNITS
from localllm.quant.formats import BY_NAME, LAYOUTS, BlockLayout, Field


def make_load_code(fields: tuple[Field, ...]) -> Callable:
    if len(fields) == 2:
        low, high, places = make_load_code(fields[:1]), make_load_code(fields[1:]), fields[0].bits

        @gpu.device
        def longer(block, i):
            return low(block, i) | high(block, i) << places

        return longer
    at, bits, run = fields[0]
    mask, each = (1 << bits) - 1, 8 // bits
    of_run, across = run.bit_length() - 1, (run * each).bit_length() - 1

    @gpu.device
    def code(block, i):
        byte = gpu.load_u8(block + at + (i >> across) * run + (i & run - 1))
        return byte >> (i >> of_run & each - 1) * bits & mask

    return code


# Functions put(block, number, target) write a unit's bytes of a plane to `target`; number: its index in the block.


def make_put_words(code, words, shift, mask, place):
    """Build a function that writes a unit's words of a plane.

    It writes the bits `mask`, after a shift, of each code. place(word, j): the index in the unit of the weight at
    position j of a word, and its lowest bit there.
    """
    place = gpu.device(place)

    @gpu.device
    def put(block, number, target):
        for w in range(words):
            word = 0
            for j in range(UNIT // words):
                i, bit = place(w, j)
                word |= (code(block, UNIT * number + i) >> shift & mask) << bit
            gpu.store_i32(target + 4 * w, word)

    return put


def make_put_nibbles(code):
    return make_put_words(code, 4, 0, 15, lambda w, j: (4 * w + j % 4 + j // 4 * 16, 8 * (j % 4) + j // 4 * 4))


def make_put_table(code):
    return make_put_words(code, 4, 0, 15, lambda w, j: (4 * w + j % 4 + j // 4 * 16, 4 * (j % 4) + j // 4 * 16))


def make_put_pairs(code, shift):
    """Build a `put` function for the plane "pairs", of bits `shift` and the next."""
    return make_put_words(code, 2, shift, 3, lambda w, j: (16 * w + j, 8 * (j % 4) + j // 4 * 2))


def make_put_bits(code, shift):
    return make_put_words(code, 1, shift, 1, lambda w, j: (j, 8 * (j % 4) + j // 4))


def make_put_bytes(start, count):
    """Build a function that copies `count` bytes for each unit or block.

    start: index in the block of the first byte.
    """

    @gpu.device
    def put(block, number, target):
        for i in range(count):
            gpu.store_i8(target + i, gpu.load_u8(block + start + count * number + i))

    return put


@gpu.device
def put_k_header(block, number, target):
    """Write the header of a block of Q4_K or Q5_K.

    number: 0.
    """
    scales, minimums, high = 0, 0, 0
    for group in range(4):
        scale, minimum = gpu.load_u8(block + 4 + group), gpu.load_u8(block + 8 + group)
        both = gpu.load_u8(block + 12 + group)  # the low 4 bits of those of groups 4 to 7
        scales |= (scale & 15) << 4 * group | (both & 15) << 4 * group + 16
        minimums |= (minimum & 15) << 4 * group | both >> 4 << 4 * group + 16
        high |= (scale >> 4 & 3) << 2 * group | (scale >> 6) << 2 * group + 8
        high |= (minimum >> 4 & 3) << 2 * group + 16 | (minimum >> 6) << 2 * group + 24
    gpu.store_i32(target, gpu.load_u16(block) | gpu.load_u16(block + 2) << 16)
    gpu.store_i32(target + 4, scales)
    gpu.store_i32(target + 8, minimums)
    gpu.store_i32(target + 12, high)


@gpu.device
def put_q3_k_scales(block, number, target):
    source, shift = block + 96 + (2 * number & 7), number >> 2 << 2
    gpu.store_i8(target, gpu.load_u8(source) >> shift & 15 | (gpu.load_u8(source + 1) >> shift & 15) << 4)


@gpu.device
def put_q3_k_high(block, number, target):
    """Write the high 2 bits of all 16 scales of a block of Q3_K, in order.

    number: 0.
    """
    word = 0
    for group in range(16):
        word |= (gpu.load_u8(block + 104 + (group & 3)) >> (group >> 2 << 1) & 3) << 2 * group
    gpu.store_i32(target, word)


def list_plane_writers(name: str) -> dict[str, Callable]:
    layout = LAYOUTS[name]
    code, low_bits = make_load_code(layout.codes), layout.bits & 4
    return {
        "nibbles": make_put_nibbles(code), "table": make_put_table(code), "pairs": make_put_pairs(code, low_bits),
        "bits": make_put_bits(code, layout.bits - 1), "bytes": make_put_bytes(layout.codes[0].at, 16),
        "last_bytes": make_put_bytes(layout.codes[0].at + 16, 16), "d": make_put_bytes(layout.d, 2),
        "d_low": make_put_bytes(layout.d, 4), "high": put_q3_k_high,
        "header": make_put_bytes(0, 8) if layout.values else put_k_header,
        "scales": put_q3_k_scales if name == "Q3_K" else make_put_bytes(find_scales_offset(layout),
        UNIT // layout.group),
    }  # fmt: skip


def find_scales_offset(layout: BlockLayout) -> int:
    """Return the offset of a block's scales, or 0 if it has none.

    Each scale has a byte or shares it with a minimum.
    """
    return layout.scales[0].locate(0)[0] if layout.scales else 0


def make_put_in_row(plane, start, put):
    """Build a function (block, number, row of planes, units, unit) that writes a unit's part of a plane.

    number: index of the unit in its block; unit: index in its row; start: offset of the plane in a row of 256 columns.
    An element that several units share is written for the first of them.
    """
    size, shift = plane.bytes, compute_unit_shift(plane)

    @gpu.device
    def put_in_row(block, number, row, units, unit):
        target = row + (units * start >> 3)
        if shift == 0:
            put(block, number, target + size * unit)
        elif number == 0:
            put(block, 0, target + size * (unit >> shift))

    return put_in_row


def chain(first, second):
    @gpu.device
    def call_both(block, number, row, units, unit):
        first(block, number, row, units, unit)
        second(block, number, row, units, unit)

    return call_both


def make_to_planes(name):
    put = list_plane_writers(name)
    place = reduce(
        chain,
        [
            make_put_in_row(plane, compute_plane_offset(name, plane.name, 256), put[plane.name])
            for plane in PLANES[name]
        ],
    )
    block_bytes, block_units = BY_NAME[name].bytes, BY_NAME[name].block // UNIT

    def to_planes(blocks, first, last, columns, planes, row_bytes):
        number = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if number >= (last - first) // UNIT:
            return
        units, unit = columns // UNIT, first // UNIT + number
        row, block = planes + unit // units * row_bytes, blocks + number // block_units * block_bytes
        place(block, number % block_units, row, units, unit % units)

    return to_planes


LANES = 4  # threads that share a unit


@gpu.device
def decode_four(word, scale, minimum):
    return (
        scale * float32(gpu.extract_byte(word, 0)) + minimum,
        scale * float32(gpu.extract_byte(word, 1)) + minimum,
        scale * float32(gpu.extract_byte(word, 2)) + minimum,
        scale * float32(gpu.extract_byte(word, 3)) + minimum,
    )


@gpu.device
def decode_eight(weights, part):
    """Return weights 8 * part to 8 * part + 7 of a unit, as two tuples of four.

    weights: codes, scales, minimums.
    """
    codes, scales, minimums = weights
    a, b = (codes[0], codes[1]) if part == 0 else (codes[2], codes[3])
    c, d = (codes[4], codes[5]) if part == 2 else (codes[6], codes[7])
    a, b = (a, b) if part < 2 else (c, d)
    scale, minimum = (scales[0], minimums[0]) if part < 2 else (scales[1], minimums[1])
    return decode_four(a, scale, minimum), decode_four(b, scale, minimum)


@gpu.device
def pack_f16_pair(a, b):
    return gpu.encode_f16(a) | gpu.encode_f16(b) << 16


def make_unpack(name):
    read = UNITS[name].read

    def unpack(weights, row_bytes, columns, first, rows, y):
        number = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        unit, part, units = number // LANES, number % LANES, columns // UNIT
        if unit >= rows * units:
            return
        a, b = decode_eight(read(weights + (first + unit // units) * row_bytes, units, unit % units), part)
        gpu.store_4i32(
            y + 16 * number,
            pack_f16_pair(a[0], a[1]),
            pack_f16_pair(a[2], a[3]),
            pack_f16_pair(b[0], b[1]),
            pack_f16_pair(b[2], b[3]),
        )

    return unpack


def make_embed(name):
    return make_plain(name) if name in FLOAT_FORMATS else make_planes(name)


def make_planes(name):
    read = UNITS[name].read

    def embed(count, weights, row_bytes, columns, ids, x, stride):
        token = cuda.blockIdx.x
        if token >= gpu.load_i64(count):
            return
        row, units = weights + gpu.load_i64(ids + 8 * token) * row_bytes, columns // UNIT
        number = cuda.threadIdx.x
        while number < units * LANES:
            a, b = decode_eight(read(row, units, number // LANES), number % LANES)
            target = x + token * stride + 32 * number
            gpu.store_4i32(
                target, gpu.encode_f32(a[0]), gpu.encode_f32(a[1]), gpu.encode_f32(a[2]), gpu.encode_f32(a[3])
            )
            gpu.store_4i32(
                target + 16, gpu.encode_f32(b[0]), gpu.encode_f32(b[1]), gpu.encode_f32(b[2]), gpu.encode_f32(b[3])
            )
            number += cuda.blockDim.x

    return embed


def make_plain(name):
    size = 4 if name == "F32" else 2

    def embed(count, weights, row_bytes, columns, ids, x, stride):
        token = cuda.blockIdx.x
        if token >= gpu.load_i64(count):
            return
        row, column = weights + gpu.load_i64(ids + 8 * token) * row_bytes, cuda.threadIdx.x
        while column < columns:
            place = row + size * column
            if name == "F32":
                weight = gpu.load_f32(place)
            elif name == "F16":
                weight = gpu.decode_f16(gpu.load_u16(place))
            else:
                weight = gpu.decode_f32(gpu.load_u16(place) << 16)
            gpu.store_f32(x + token * stride + 4 * column, weight)
            column += cuda.blockDim.x

    return embed
