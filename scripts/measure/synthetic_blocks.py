"""Random weights in any format: valid blocks made of random bytes, not quantized.

A block's codes are random and its scales are set such that the weights have a mean near 0 and a standard deviation of
1/sqrt(columns).
"""

import math
from collections.abc import Iterator
from functools import cache

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from localllm.kernels.reference import dequantize_bits
from localllm.quant.formats import LAYOUTS, UNKNOWN_TO_GGUF, Format, list_float_offsets

CHUNK = 16 << 20  # bytes made at a time

FLOATS = ("F32", "F16", "BF16")
PLAIN = [*FLOATS, *(name for name in LAYOUTS if name in GGMLQuantizationType.__members__)]


def random_bytes(count: int, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]


def random_floats(format: Format, count: int, deviation: float, random: np.random.Generator) -> np.ndarray:
    """`count` weights as uint8 [bytes], uniform: a uniform distribution of width 1 has a deviation of 1/sqrt(12)."""
    weights = (random.random(count, np.float32) - np.float32(0.5)) * np.float32(deviation * math.sqrt(12))
    if format.name == "BF16":
        return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return weights.astype(np.float16 if format.name == "F16" else np.float32).view(np.uint8)


def set_scales(format: Format, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Put a scale, float32 [blocks], into every block, uint8 [blocks, bytes]."""
    if format.name == "MXFP4":  # a power of two; 128 stands for 1
        blocks[:, 0] = 128 + np.round(np.log2(scales))
    elif format.name == "NVFP4":  # four small floats, which count half
        blocks[:, :4] = np.maximum(gguf.quants.NVFP4.fp32_to_ue4m3(scales * 2), 1)[:, None]
    elif format.name == "IQ1_M":  # an f16 in the upper quarters of four 16-bit words
        halves = scales.astype(np.float16).view(np.uint16)
        for word in range(4):
            nibbles = (halves >> (4 * word) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | nibbles << 4
    else:
        for offset, factor in zip(list_float_offsets(format.name), (1, low_factor(format)), strict=False):
            halves = (scales * np.float32(factor)).astype(np.float16)
            blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)


def low_factor(format: Format) -> float:
    """Return the ratio of a block's other float16 to its scale, so that the weights have a mean of 0."""
    layout = LAYOUTS[format.name]
    middle = ((1 << layout.bits) - 1) / 2
    return middle if layout.minimums else -middle  # subtracted, times minimums that are like scales; or added


def mend_codes(format: Format, blocks: np.ndarray) -> None:
    """Replace random codes that a quantizer would not write."""
    if format.name == "Q8_0":
        codes = blocks[:, 2:].view(np.int8)
        np.maximum(codes, -127, out=codes)
    elif format.name in ("Q4_K", "Q5_K"):  # sub-block scales and minima of 32 to 63: no sub-block is nearly empty
        blocks[:, 4:12] |= 0xA0
    elif format.name == "TQ2_0":  # the code 3 is not used; 1 stands for 0 and keeps the mean there
        codes = blocks[:, :64]
        codes &= ~(codes & codes << 1 & 0xAA)


def random_blocks(format: Format, count: int, scale: float, random: np.random.Generator) -> np.ndarray:
    """uint8 [count, bytes per block], with scales that differ by up to a quarter from `scale`."""
    blocks = random_bytes(count * format.bytes, random).reshape(count, format.bytes)
    mend_codes(format, blocks)
    scales = np.float32(scale) * (random.random(count, np.float32) / 2 + np.float32(0.75))
    if len(list_float_offsets(format.name)) == 1:  # codes like Q4_0's -8 to 7 need scales of both signs for a mean of 0
        scales *= random.choice(np.array([-1, 1], np.float32), count)
    set_scales(format, blocks, scales)
    return blocks


@cache
def deviation_of_scale_one(format: Format) -> float:
    blocks = random_blocks(format, 4096, 1.0, np.random.default_rng(0))
    if format.name in UNKNOWN_TO_GGUF:
        return float(dequantize_bits(blocks, format.name).std())
    return float(gguf.dequantize(blocks, GGMLQuantizationType(format.id)).std())


def random_matrix(format: Format, rows: int, columns: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the bytes of a matrix, in chunks."""
    deviation = 1 / math.sqrt(columns)
    left = rows * columns // format.block
    while left:
        count = min(left, CHUNK // format.bytes)
        if format.name in FLOATS:
            yield random_floats(format, count, deviation, random)
        else:
            yield random_blocks(format, count, deviation / deviation_of_scale_one(format), random)
        left -= count
