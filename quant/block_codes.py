"""Read the scales of blocks, and replace their codes, in formats with one code per weight.

weight = scale * level(code) + offset. A level is code - centre, or one of the format's 16 values.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from localllm.quant.formats import BY_NAME, FORMATS, LAYOUTS, UNKNOWN_TO_GGUF, Field, Fields

FEEDBACK_FORMATS = tuple(format.name for format in FORMATS.values() if format.feedback)


def read_field(blocks: np.ndarray, fields: Fields, count: int) -> np.ndarray:
    """Read the first `count` values of a field from blocks, uint8 [blocks, bytes]: int64 [blocks, count].

    fields: the field, or two fields with the low and the high bits.
    """
    total, above = np.zeros((len(blocks), count), np.int64), 0
    for field in fields:
        byte, bit = np.array([field.locate(i) for i in range(count)]).T
        total |= (blocks[:, byte].astype(np.int64) >> bit & (1 << field.bits) - 1) << above
        above += field.bits
    return total


def build_e8m0_table() -> np.ndarray:
    """Tabulate half the value of each E8M0 byte e, 2 ** (e - 127) / 2: float32 [256]."""
    return np.ldexp(np.float32(1), np.arange(256) - 128)


def build_ue4m3_table() -> np.ndarray:
    """Tabulate half the value of each UE4M3 byte: float32 [256].

    UE4M3 has 4 bits of exponent with bias 7 and 3 bits of mantissa. As in ggml, the topmost bit is ignored, and 0x7f
    (not a number) counts as zero.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    subnormal = exponent == 0
    value = np.ldexp(np.where(subnormal, mantissa, 8 + mantissa), np.where(subnormal, 1, exponent) - 10)
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


class FormatCodes(NamedTuple):
    """The codes of a format and the levels that they represent.

    Attributes:
        levels: float32 [codes in use], ascending.  stored: the stored value of each, uint8.
        is_even: levels are consecutive integers.  group: number of weights that share a scale.
    """

    levels: np.ndarray
    stored: np.ndarray
    is_even: bool
    group: int


@cache
def get_codes(name: str) -> FormatCodes:
    layout = LAYOUTS[name]
    if layout.values:
        stored = np.argsort(np.array(layout.values), kind="stable").astype(np.uint8)
        levels = np.array(layout.values, np.float32)[stored]
        levels, first = np.unique(levels, return_index=True)  # MXFP4 has two codes for zero
        return FormatCodes(levels, stored[first], False, layout.group)
    if name == "Q8_0":  # signed bytes; no encoder writes -128
        signed = np.arange(-127, 128, dtype=np.int8)
        return FormatCodes(signed.astype(np.float32), signed.view(np.uint8), True, layout.group)
    stored = np.arange(1 << layout.bits, dtype=np.uint8)
    levels = np.float32(layout.step) * stored.astype(np.float32) - np.float32(layout.centre)
    return FormatCodes(levels, stored, layout.step == 1, layout.group)


def read_scales(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and offsets of blocks, uint8 [blocks, bytes]: float32 [blocks, groups] each."""
    layout = LAYOUTS[name]
    groups = BY_NAME[name].block // layout.group
    d = np.ones((len(blocks), 1), np.float32) if layout.d is None else read_half(blocks, layout.d)
    scales = np.ones((len(blocks), groups), np.float32)
    if layout.scale_type == "e8m0":
        scales = build_e8m0_table().astype(np.float32)[read_field(blocks, layout.scales, groups)]
    elif layout.scales:
        stored = read_field(blocks, layout.scales, groups)
        stored = stored.astype(np.int8) if layout.scale_type == "int8" else stored - layout.scale_centre
        scales = stored.astype(np.float32)
    if layout.low is None:
        return d * scales, np.zeros_like(scales)
    low = read_half(blocks, layout.low)
    if layout.minimums:
        return d * scales, -low * read_field(blocks, layout.minimums, groups).astype(np.float32)
    return d * scales, low


def read_half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Read the float16 at byte `at` of each block: float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def replace_codes(name: str, blocks: np.ndarray, codes: np.ndarray) -> None:
    """Replace the codes in blocks by stored values, uint8 [blocks, weights of a block]."""
    above = 0
    for field in LAYOUTS[name].codes:
        replace_field(field, blocks, codes >> above & (1 << field.bits) - 1)
        above += field.bits


def replace_field(field: Field, blocks: np.ndarray, values: np.ndarray) -> None:
    byte, bit = np.array([field.locate(i) for i in range(values.shape[1])]).T
    blocks[:, np.unique(byte)] = 0  # no other field shares the bytes of a field of codes
    for lowest in np.unique(bit):
        selected = bit == lowest
        blocks[:, byte[selected]] |= values[:, selected] << np.uint8(lowest)


def dequantize(name: str, rows: np.ndarray) -> np.ndarray:
    """Decode rows of blocks, uint8 [rows, bytes]: float32 [rows, columns]."""
    if name in UNKNOWN_TO_GGUF:
        return dequantize_by_layout(name, rows)
    import gguf

    return gguf.dequantize(rows, gguf.GGMLQuantizationType(BY_NAME[name].id)).astype(np.float32, copy=False)


def dequantize_by_layout(name: str, rows: np.ndarray) -> np.ndarray:
    layout, blocks = LAYOUTS[name], rows.reshape(-1, BY_NAME[name].bytes)
    codes = read_field(blocks, layout.codes, BY_NAME[name].block)
    scales, _ = read_scales(name, blocks)
    return (scales * (layout.step * codes - layout.centre).astype(np.float32)).reshape(len(rows), -1)
