"""Functions `unpack(block, out)` that decode one block to float32 weights.

They are built from a format's layout. block: address of the bytes; out: address of the weights, written in order. Both
are int64 with any alignment; nothing is checked. This is the generic path, correct for every format and fast enough for
embeddings and for rows that the other kernels do not support. The functions use no array, no exception and nothing else
of Numba's runtime, so their machine code runs without Numba. The `gguf` package computes the same weights, bit for bit.
"""

from collections.abc import Callable

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats import family
from localllm.kernels.simd import load_f16, load_i8, load_u8, store_f32
from localllm.quant.block_codes import halved_e8m0, halved_ue4m3
from localllm.quant.formats import BY_NAME, LAYOUTS, Field, Fields, Layout

STEP = 8  # consecutive weights of a vectorizable loop: no field changes its order of bits within them
FLOATS = {"e8m0": halved_e8m0(), "ue4m3": halved_ue4m3()}


def unpacker(name: str) -> Callable:
    """Build the function (int64 block, int64 out) that decodes a block. It is compiled at its first call."""
    layout = LAYOUTS[name]
    return make_unpack(layout, BY_NAME[name].block) if layout.codes else family(name).UNPACK[name]


def make_unpack(layout: Layout, count: int) -> Callable:
    """Build `unpack` for a format with one code per weight; count: weights per block."""
    code, value = make_number(layout.codes, signed=layout.bits == 8), make_value(layout)
    scale_of, minimum_of = make_scale(layout), make_minimum(layout)
    group_size, has_minimum = layout.group, layout.low is not None

    @device
    def unpack(block, out):
        for group in range(count // group_size):
            scale = scale_of(block, group)
            minimum = minimum_of(block, group) if has_minimum else np.float32(0)
            for first in range(group * group_size, (group + 1) * group_size, STEP):
                for i in range(first, first + STEP):
                    weight = scale * value(code(block, first, i - first))
                    store_f32(out + 4 * i, weight + minimum if has_minimum else weight)

    return unpack


def make_number(fields: Fields, signed: bool = False) -> Callable:
    """Build a function (block, first, i) that reads value first + i of a field.

    first: a multiple of STEP; i: less than STEP.
    """
    if len(fields) == 2:
        low, high, bits = make_number(fields[:1]), make_number(fields[1:]), fields[0].bits
        return device(lambda block, first, i: low(block, first, i) | high(block, first, i) << bits)
    (field,) = fields
    if not isinstance(field, Field):
        return make_scattered(field)
    at, bits, run, load = field.at, field.bits, field.run, load_i8 if signed else load_u8
    each, mask = 8 // bits, -1 if signed else (1 << bits) - 1
    across = run * each

    @device
    def anywhere(block, first, i):
        n = first + i
        return load(block + at + n // across * run + n % run) >> (n // run % each * bits) & mask

    @device
    def of_runs(block, first, i):
        start, shift = block + at + first // across * run + first % run, first // run % each * bits
        return load(start + i) >> shift & mask

    return anywhere if run < STEP else of_runs


def make_scattered(field) -> Callable:
    """Build the function of `make_number` for a field with irregular positions (formats.Places)."""
    bytes_, shifts = np.array(field.places, np.int64).T.copy()
    mask = (1 << field.bits) - 1
    return device(lambda block, first, i: load_u8(block + bytes_[first + i]) >> shifts[first + i] & mask)


def make_value(layout: Layout) -> Callable:
    if layout.values:
        table = np.array(layout.values, np.int8)
        return device(lambda code: np.float32(table[code]))
    centre, step = layout.centre, layout.step
    return device(lambda code: np.float32(step * code - centre))


def make_group_number(fields: Fields, signed: bool = False) -> Callable:
    """Build a function (block, group) that reads a value stored per group, for at most 16 groups."""
    number = make_number(fields, signed)
    return device(lambda block, group: number(block, group // STEP * STEP, group % STEP))


def make_scale(layout: Layout) -> Callable:
    at, centre = layout.d, layout.scale_centre
    if not layout.scales:
        return device(lambda block, group: load_f16(block + at))
    number = make_group_number(layout.scales, layout.scale_type == "int8")
    if layout.scale_type in FLOATS:
        table = FLOATS[layout.scale_type]
        return device(lambda block, group: table[number(block, group)])
    return device(lambda block, group: load_f16(block + at) * np.float32(number(block, group) - centre))


def make_minimum(layout: Layout) -> Callable | None:
    """Build a function (block, group) that returns the value to add; None for a format without minimums."""
    at = layout.low
    if at is None:
        return None
    if not layout.minimums:
        return device(lambda block, group: load_f16(block + at))
    number = make_group_number(layout.minimums)
    return device(lambda block, group: -(load_f16(block + at) * np.float32(number(block, group))))
