"""The layouts of blocks, shared by unpacking, quantizing, GPU kernels, tests and random files.

A block is a few consecutive fields. Most formats store a weight as an integer, its *code*, of 1 to 8 bits, in one field
or in two (the low bits and the high ones). A group of weights shares a scale:

    weight = d * scale * (code - centre)              d: a float16; scale: 1, or an integer per group
    weight = d * scale * code - low * minimum         low: another float16 (Q4_1 and Q5_1: + low)
    weight = d * scale * values[code]                 values: 16 that are not evenly spaced

NVFP4 and MXFP4 have small floats as scales, and no d; TQ1_0 has five base-3 digits in a byte. In the formats with a
grid (codebook) a code names 4 or 8 weights (an octet), and signs are stored apart. `parts` lists where their fields
begin:

    codes    the low 8 bits of each code
             IQ2_XS: 16 bits each, a 9-bit code and a sign code
             IQ2_XXS: 8 bytes for every 32 weights, 4 codes and the 32-bit word described at `scales`
    high     the high bits of the codes, from the lowest bits of a byte up
             IQ2_S: 2 bits each. IQ3_S: 1 bit each. IQ1_M: 3 bits, and the sign of an octet's shift (set: minus)
    signs    a bit for each weight (set: minus). A sign code has 7 bits for an octet; the eighth sign makes the number
             of minus signs even
    scales   4 bits for each group, the low half of a byte first
             IQ2_XXS, IQ3_XXS: a 32-bit word for every 32 weights, 4 sign codes and the scale in the top 4 bits
             IQ1_S: 16 bits for every 32 weights, 3 high bits of each of 4 codes, a scale of 3 bits, the shift's sign
             IQ1_M: four 16-bit words, each with four scales of 3 bits and 4 bits of d on top

    weight = d * (scale + 1/2) / 4 * grid[code] * sign       IQ2; IQ3_XXS: / 2 instead of / 4, IQ3_S: * 2
    weight = d * (1 + 2 * scale) * (grid[code] ± 1/8)        IQ1

Sources: the block structs and `dequantize_row_*` functions of ggml (ggml-common.h, ggml-quants.c); the k-quants are
described in llama.cpp's pull request 1684; OCP Microscaling Formats (MX) Specification 1.0 has the values of MXFP4
(5.3.3) and its scales (5.4.1).
"""

from typing import NamedTuple

import numpy as np


class Field(NamedTuple):
    """Numbers of `bits` bits packed in bytes.

    `run` consecutive bytes hold numbers 0 to run - 1 in their lowest bits, the next `run` numbers in the bits above,
    and so on, until the bytes are full. Then the next `run` bytes follow.
    """

    at: int  # offset of the first byte in the block
    bits: int
    run: int = 1

    def place(self, i: int) -> tuple[int, int]:
        """Return where number i is stored: (byte, lowest bit)."""
        each = 8 // self.bits
        return self.at + i // (self.run * each) * self.run + i % self.run, i // self.run % each * self.bits


class Places(NamedTuple):
    """Numbers of `bits` bits at listed positions, in no regular order."""

    bits: int
    places: tuple[tuple[int, int], ...]  # (byte, lowest bit) of each number

    def place(self, i: int) -> tuple[int, int]:
        return self.places[i]


Fields = tuple[Field | Places, ...]


class Layout(NamedTuple):
    """The layout of a format's block: where its fields are, and what their numbers mean."""

    d: int | None  # the first byte of the float16 d; None if the block has none, or stores it in pieces
    group: int  # weights that share a scale
    codes: tuple[Field, ...] = ()  # one per weight; the field with the lowest bits first, as in all tuples of fields
    centre: int = 0
    step: int = 1  # weight = d * scale * (step * code - centre)
    values: tuple[int, ...] = ()
    scales: Fields = ()  # one number per group
    scale_centre: int = 0
    scale_type: str = "integer"  # or "int8"; or the float types "e8m0" and "ue4m3", halved, without a d
    low: int | None = None  # the first byte of the float16 low
    minimums: Fields = ()  # one number per group; () with a low: low itself is added
    grid: int = 0  # weights that a code names; 0 without a grid
    parts: tuple[tuple[str, int], ...] = ()  # (name, first byte) of the fields of formats with a grid

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return sum(field.bits for field in self.codes)

    @property
    def sub_block(self) -> int:
        """Return how many of 32 consecutive weights share a scale: 32 or 16."""
        return min(self.group, 32)

    def part(self, name: str) -> int:
        return dict(self.parts)[name]


def in_order(at: int, count: int, shift: int) -> tuple[tuple[int, int], ...]:
    """Return places for a number in each of `count` bytes, beginning at bit `shift`."""
    return tuple((at + i, shift) for i in range(count))


# The 4-bit floats E2M1 (sign, 2 bits exponent, 1 bit mantissa), doubled so that all are integers. Scales are halved in
# return.
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# kvalues_iq4nl in ggml-common.h.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# TQ1_0's codes: (first weight, first byte, bytes, digits in each): digit n of byte i is weight first + n * bytes + i.
TRITS = ((0, 0, 32, 5), (160, 32, 16, 5), (240, 48, 4, 4))

# 8 scales and 8 minimums of 6 bits in 12 bytes. Groups 0 to 3: the low 6 bits of bytes 4 to 7 (scales) and 8 to 11
# (minimums). Groups 4 to 7: the low 4 bits in bytes 12 to 15 (scale in the low half, minimum in the high half), the
# high 2 bits on top of bytes 4 to 7 and 8 to 11.
K_SCALES = (
    Places(4, in_order(4, 4, 0) + in_order(12, 4, 0)), Places(2, in_order(4, 4, 4) + in_order(4, 4, 6))
)  # fmt: skip
K_MINIMUMS = (
    Places(4, in_order(8, 4, 0) + in_order(12, 4, 4)), Places(2, in_order(8, 4, 4) + in_order(8, 4, 6))
)  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    "Q1_0": Layout(0, 128, (Field(2, 1),), centre=1, step=2),
    "Q2_0": Layout(0, 64, (Field(2, 2),), centre=1),
    "Q4_0": Layout(0, 32, (Field(2, 4, 16),), centre=8),
    "Q4_1": Layout(0, 32, (Field(4, 4, 16),), low=2),
    "Q5_0": Layout(0, 32, (Field(6, 4, 16), Field(2, 1)), centre=16),
    "Q5_1": Layout(0, 32, (Field(8, 4, 16), Field(4, 1)), low=2),
    "Q8_0": Layout(0, 32, (Field(2, 8),), centre=0),  # signed bytes
    "Q2_K": Layout(
        80, 16, (Field(16, 2, 32),), scales=(Places(4, in_order(0, 16, 0)),), low=82,
        minimums=(Places(4, in_order(0, 16, 4)),),
    ),
    "Q3_K": Layout(
        108, 16, (Field(32, 2, 32), Field(0, 1, 32)), centre=4, scales=(Field(96, 4, 8), Field(104, 2, 4)),
        scale_centre=32,
    ),
    "Q4_K": Layout(0, 32, (Field(16, 4, 32),), scales=K_SCALES, low=2, minimums=K_MINIMUMS),
    "Q5_K": Layout(0, 32, (Field(48, 4, 32), Field(16, 1, 32)), scales=K_SCALES, low=2, minimums=K_MINIMUMS),
    "Q6_K": Layout(
        208, 16, (Field(0, 4, 64), Field(128, 2, 32)), centre=32, scales=(Field(192, 8),), scale_type="int8"
    ),
    "IQ4_NL": Layout(0, 32, (Field(2, 4, 16),), values=IQ4_VALUES),
    "IQ4_XS": Layout(
        0, 32, (Field(8, 4, 16),), values=IQ4_VALUES, scales=(Field(4, 4), Field(2, 2)), scale_centre=32
    ),
    "MXFP4": Layout(None, 32, (Field(1, 4, 16),), values=DOUBLED_E2M1, scales=(Field(0, 8),), scale_type="e8m0"),
    "NVFP4": Layout(None, 16, (Field(4, 4, 8),), values=DOUBLED_E2M1, scales=(Field(0, 8),), scale_type="ue4m3"),
    "TQ1_0": Layout(52, 256),
    "TQ2_0": Layout(64, 256, (Field(0, 2, 32),), centre=1),
    "IQ1_S": Layout(0, 32, grid=8, parts=(("codes", 2), ("scales", 34))),
    "IQ1_M": Layout(None, 16, grid=8, parts=(("codes", 0), ("high", 32), ("scales", 48))),
    "IQ2_XXS": Layout(0, 32, grid=8, parts=(("codes", 2), ("scales", 6))),
    "IQ2_XS": Layout(0, 16, grid=8, parts=(("codes", 2), ("scales", 66))),
    "IQ2_S": Layout(0, 16, grid=8, parts=(("codes", 2), ("signs", 34), ("high", 66), ("scales", 74))),
    "IQ3_XXS": Layout(0, 32, grid=4, parts=(("codes", 2), ("scales", 66))),
    "IQ3_S": Layout(0, 32, grid=4, parts=(("codes", 2), ("high", 66), ("signs", 74), ("scales", 106))),
}  # fmt: skip


def floats_at(name: str) -> tuple[int, ...]:
    """Return the offsets of a block's float16 numbers, d and low."""
    layout = LAYOUTS[name]
    return tuple(at for at in (layout.d, layout.low) if at is not None)


def numbers(blocks: np.ndarray, fields: Fields, count: int) -> np.ndarray:
    """Read the first `count` numbers of a field from blocks: int64 [blocks, count].

    blocks: uint8 [blocks, bytes]; fields: the field, or two with the low and the high bits.
    """
    total, above = np.zeros((len(blocks), count), np.int64), 0
    for field in fields:
        byte, bit = np.array([field.place(i) for i in range(count)]).T
        total |= (blocks[:, byte].astype(np.int64) >> bit & (1 << field.bits) - 1) << above
        above += field.bits
    return total


def halved_e8m0() -> np.ndarray:
    """Return half the value of each E8M0 byte e, 2 ** (e - 127) / 2: float32 [256]."""
    return np.ldexp(np.float32(1), np.arange(256) - 128)


def halved_ue4m3() -> np.ndarray:
    """Return half the value of each UE4M3 byte (4 bits exponent with bias 7, 3 bits mantissa): float32 [256].

    As in ggml, the topmost bit is ignored, and 0x7f (not a number) counts as zero.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    subnormal = exponent == 0
    value = np.ldexp(np.where(subnormal, mantissa, 8 + mantissa), np.where(subnormal, 1, exponent) - 10)
    value[0x7F] = 0
    return (value / 2).astype(np.float32)
