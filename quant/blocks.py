"""Share functions among block encoders: 16-bit floats, units, and packing values by a block's layout.

Values are rounded to the nearest 16-bit float, ties to even, and never to infinity: one that is too large becomes the
largest finite value of the type, because a somewhat wrong weight harms a model less than an infinite one. These
functions have no branches, so that the compiler vectorizes loops over them.

A search works on a block's weights divided by a power of two, their unit, so that no sum overflows or underflows.
"""

from collections.abc import Callable

import numpy as np

from localllm.quant.formats import Field, Fields, ScatteredField
from localllm.quant.numba_cache import compile_cached, compile_inline

SMALLEST_HALF = np.float32(2.0**-24)
LARGEST_BF16 = np.uint32(0x7F7F)


@compile_inline
def to_half(value):
    """Return the bits of the nearest float16, uint16.

    Half a unit of the last remaining bit is added to the bits as an integer; the carry may reach the exponent.
    Subnormal results are multiples of 2 ** -24, as are floats from 1/2 to 1: adding 1/2 rounds to those.
    """
    bits = np.float32(value).view(np.uint32)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32((size - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13))
    small = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    result = np.uint32(small) if size < np.uint32(113 << 23) else min(normal, np.uint32(0x7BFF))
    return np.uint16(result | sign)


@compile_inline
def from_half(bits):
    """Return the float32 with the value of a finite float16's bits.

    At their positions in a float32, exponent and fraction give a value 2 ** 112 times too small, subnormal or not.
    """
    number = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    return -number if bits & np.uint16(0x8000) else number


@compile_inline
def round_to_float16(value):
    return from_half(to_half(value))


@compile_inline
def store_half(out, position, value):
    """Store a float32 as a float16 in two bytes of `out`."""
    bits = to_half(value)
    out[position] = np.uint8(bits & np.uint16(0xFF))
    out[position + 1] = np.uint8(bits >> np.uint16(8))


@compile_cached
def narrow_to_half(weights, out):
    """Convert float32 [n] to the bits of float16, uint16 [n]."""
    for i in range(weights.size):
        out[i] = to_half(weights[i])


@compile_cached
def narrow_to_bf16(weights, out):
    """Convert float32 [n] to the bits of bfloat16, uint16 [n]."""
    for i in range(weights.size):
        bits = np.float32(weights[i]).view(np.uint32)
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        upper = np.uint32((bits & np.uint32(0x7FFFFFFF)) + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        out[i] = np.uint16(min(np.uint32(upper), LARGEST_BF16) | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


f32 = np.float32


@compile_inline
def find_largest(weights, row, start, count):
    """Return the largest magnitude among `count` weights of a row from `start` on."""
    largest = f32(0)
    for i in range(start, start + count):
        largest = max(largest, abs(weights[row, i]))
    return largest


@compile_inline
def compute_unit(largest):
    """Return the largest power of two that is at most `largest`; 0 if all weights would round to 0."""
    if largest < f32(2.0**-25):
        return f32(0)
    return np.uint32(f32(largest).view(np.uint32) & np.uint32(0x7F800000)).view(f32)


@compile_inline
def normalize(weights, row, start, count, x):
    """Copy weights divided by their unit to x, and return the unit.

    If the unit is 0 (see compute_unit), x becomes zeros.
    """
    unit = compute_unit(find_largest(weights, row, start, count))
    inverse = f32(1) / unit if unit > 0 else f32(0)
    for i in range(count):
        x[i] = weights[row, start + i] * inverse
    return unit


@compile_inline
def load_block(weights, importance, row, start, count, s):
    """Copy weights divided by their unit to s.x, and their importance to s.weight; return the unit."""
    flat = s.weight.reshape(-1)
    for i in range(count):
        flat[i] = importance[start + i]
    return normalize(weights, row, start, count, s.x.reshape(-1))


def build_packer(fields: Fields, together: int = 1) -> Callable:
    """Build a function (out, first, i, number) that packs value first + i into the bytes of a block.

    The bytes must be zero before. fields: the one with the lowest bits first. together: `first` is a multiple of it,
    and `i` is less, so that the compiler vectorizes loops over i.
    """
    if len(fields) == 1:
        return (
            build_position_packer(fields[0])
            if isinstance(fields[0], ScatteredField)
            else build_field_packer(fields[0], together)
        )
    low, high, bits = build_packer(fields[:1], together), build_packer(fields[1:], together), fields[0].bits

    @compile_inline
    def pack(out, first, i, number):
        low(out, first, i, number)
        high(out, first, i, number >> bits)

    return pack


def build_field_packer(field: Field, together: int) -> Callable:
    at, bits, run = field
    each, mask, across = 8 // bits, (1 << bits) - 1, 8 // bits * run

    @compile_inline
    def pack_anywhere(out, first, i, number):
        n = first + i
        out[at + n // across * run + n % run] |= (number & mask) << n // run % each * bits

    @compile_inline
    def pack_runs(out, first, i, number):
        start, shift = at + first // across * run + first % run, first // run % each * bits
        out[start + i] |= (number & mask) << shift

    return pack_anywhere if run % together else pack_runs


def build_position_packer(field: ScatteredField) -> Callable:
    bytes_, shifts = np.array(field.places, np.int64).T.copy()
    mask = (1 << field.bits) - 1

    @compile_inline
    def pack(out, first, i, number):
        out[bytes_[first + i]] |= (number & mask) << shifts[first + i]

    return pack


def build_group_packer(fields: Fields) -> Callable:
    """Build a function (out, group, number) that packs a value which a block stores per group."""
    put = build_packer(fields)
    return compile_inline(lambda out, group, number: put(out, group, 0, number))
