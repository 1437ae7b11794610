"""Functions `unpack(block, out)` that decode one block to float32 weights.

They are built from a format's layout. block: address of the bytes; out: address of the weights, written in order. Both
are int64 with any alignment; nothing is checked. This is the generic path, correct for every format and fast enough for
embeddings and for rows that the other kernels do not support. The functions use no array, no exception and nothing else
of Numba's runtime, so their machine code runs without Numba. The `gguf` package computes the same weights, bit for bit.
"""

from collections.abc import Callable

import numpy as np

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats import import_family
from localllm.kernels.simd import load_f16, load_i8, load_u8, store_f32
from localllm.quant.block_codes import build_e8m0_table, build_ue4m3_table
from localllm.quant.formats import BY_NAME, LAYOUTS, BlockLayout, Field, Fields

STEP = 8  # consecutive weights of a vectorizable loop: no field changes its order of bits within them
FLOATS = {"e8m0": build_e8m0_table(), "ue4m3": build_ue4m3_table()}


def build_unpacker(name: str) -> Callable:
    """Build the function (int64 block, int64 out) that decodes a block. It is compiled at its first call."""
    layout = LAYOUTS[name]
    return build_unpack(layout, BY_NAME[name].block) if layout.codes else import_family(name).UNPACK[name]


def build_unpack(layout: BlockLayout, count: int) -> Callable:
    """Build `unpack` for a format with one code per weight; count: weights per block."""
    code, value = build_field_reader(layout.codes, signed=layout.bits == 8), build_value_function(layout)
    load_adapter_scale, minimum_of = build_scale_reader(layout), build_minimum_reader(layout)
    group_size, has_minimum = layout.group, layout.low is not None

    @device
    def unpack(block, out):
        for group in range(count // group_size):
            scale = load_adapter_scale(block, group)
            minimum = minimum_of(block, group) if has_minimum else np.float32(0)
            for first in range(group * group_size, (group + 1) * group_size, STEP):
                for i in range(first, first + STEP):
                    weight = scale * value(code(block, first, i - first))
                    store_f32(out + 4 * i, weight + minimum if has_minimum else weight)

    return unpack


def build_field_reader(fields: Fields, signed: bool = False) -> Callable:
    """Build a function (block, first, i) that reads value first + i of a field.

    first: a multiple of STEP; i: less than STEP.
    """
    if len(fields) == 2:
        low, high, bits = build_field_reader(fields[:1]), build_field_reader(fields[1:]), fields[0].bits
        return device(lambda block, first, i: low(block, first, i) | high(block, first, i) << bits)
    (field,) = fields
    if not isinstance(field, Field):
        return build_scattered_reader(field)
    at, bits, run, load = field.at, field.bits, field.run, load_i8 if signed else load_u8
    each, mask = 8 // bits, -1 if signed else (1 << bits) - 1
    across = run * each

    @device
    def read_anywhere(block, first, i):
        n = first + i
        return load(block + at + n // across * run + n % run) >> (n // run % each * bits) & mask

    @device
    def read_runs(block, first, i):
        start, shift = block + at + first // across * run + first % run, first // run % each * bits
        return load(start + i) >> shift & mask

    return read_anywhere if run < STEP else read_runs


def build_scattered_reader(field) -> Callable:
    """Build the function of `make_number` for a field with irregular positions (formats.Places)."""
    bytes_, shifts = np.array(field.places, np.int64).T.copy()
    mask = (1 << field.bits) - 1
    return device(lambda block, first, i: load_u8(block + bytes_[first + i]) >> shifts[first + i] & mask)


def build_value_function(layout: BlockLayout) -> Callable:
    if layout.values:
        table = np.array(layout.values, np.int8)
        return device(lambda code: np.float32(table[code]))
    centre, step = layout.centre, layout.step
    return device(lambda code: np.float32(step * code - centre))


def build_group_reader(fields: Fields, signed: bool = False) -> Callable:
    """Build a function (block, group) that reads a value stored per group, for at most 16 groups."""
    number = build_field_reader(fields, signed)
    return device(lambda block, group: number(block, group // STEP * STEP, group % STEP))


def build_scale_reader(layout: BlockLayout) -> Callable:
    at, centre = layout.d, layout.scale_centre
    if not layout.scales:
        return device(lambda block, group: load_f16(block + at))
    number = build_group_reader(layout.scales, layout.scale_type == "int8")
    if layout.scale_type in FLOATS:
        table = FLOATS[layout.scale_type]
        return device(lambda block, group: table[number(block, group)])
    return device(lambda block, group: load_f16(block + at) * np.float32(number(block, group) - centre))


def build_minimum_reader(layout: BlockLayout) -> Callable | None:
    """Build a function (block, group) that returns the value to add; None for a format without minimums."""
    at = layout.low
    if at is None:
        return None
    if not layout.minimums:
        return device(lambda block, group: load_f16(block + at))
    number = build_group_reader(layout.minimums)
    return device(lambda block, group: -(load_f16(block + at) * np.float32(number(block, group))))
