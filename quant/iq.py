"""Encoders of the i-quants: the codebook search's results in the fields of blocks.

A code names 4 or 8 weights in a codebook. IQ2 and IQ3 have signs next to the codes, in IQ2_XXS, IQ2_XS and IQ3_XXS an
even number of minus signs in every 8 weights: the eighth is the parity of the others. In IQ1_S and IQ1_M codes name
weights of -1, 0 or 1, and a shift of all of them takes the place of a minimum.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from localllm.quant.codebook import Found, search
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

# What the largest weight of a group may be divided by its scale. The largest of a grid: 1 1/8, shifted; 43; 15; 62.
IQ1_TARGETS = np.array([1.1, 1.5, 2, 2.8], dtype=np.float32)
IQ2_TARGETS = np.array([24, 30, 36, 41, 46, 53, 63, 80], dtype=np.float32)
IQ3_S_TARGETS = np.array([8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18.5, 21], dtype=np.float32)
IQ3_XXS_TARGETS = np.array([32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 74, 84], dtype=np.float32)
SHIFT = np.float32(0.125)


def encoder(name: str, fields: Callable[[Found], dict[str, np.ndarray]], *how, grid: str = "", **more) -> Callable:
    """Make the encoder of a format.

    fields: converts the search's results to uint8 [blocks, bytes of the field]; how: as `search`.
    """
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes

    def encode(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        """Encode float32 [rows, columns] to uint8 [rows, bytes]; importance float32 [columns]."""
        found, blocks = search(weights, importance, grid or name, *how, **more), out.reshape(-1, block_bytes)
        if layout.d is not None:
            blocks[:, layout.d : layout.d + 2] = found.d.astype("<f2").view(np.uint8)
        for part, numbers in fields(found).items():
            at = layout.part(part)
            blocks[:, at : at + numbers.shape[1]] = numbers

    return encode


def iq1_s(found: Found) -> dict[str, np.ndarray]:
    words = found.scales.astype(np.uint16) << 12 | found.shifts.astype(np.uint16) << 15
    return {"codes": low_bytes(found.codes), "scales": as_bytes(words | in_words(found.codes >> 8, 4, 3))}


def iq1_m(found: Found) -> dict[str, np.ndarray]:
    d = found.d.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << 12
    high = (found.codes >> 8).astype(np.uint8) | found.chosen << 3
    words = d | in_words(found.scales.astype(np.uint16), 4, 3)
    return {"codes": low_bytes(found.codes), "high": in_words(high, 2, 4), "scales": as_bytes(words)}


def iq2_xxs(found: Found) -> dict[str, np.ndarray]:
    codes, rest = low_bytes(found.codes).reshape(-1, 8, 4), signs_and_scales(found).reshape(-1, 8, 4)
    return {"codes": np.concatenate((codes, rest), axis=2).reshape(-1, 64)}


def iq2_xs(found: Found) -> dict[str, np.ndarray]:
    codes = found.codes | (found.signs & 127).astype(np.uint16) << 9
    return {"codes": as_bytes(codes), "scales": in_words(found.scales, 2, 4)}


def iq2_s(found: Found) -> dict[str, np.ndarray]:
    high = in_words((found.codes >> 8).astype(np.uint8), 4, 2)
    fields = {"codes": low_bytes(found.codes), "signs": found.signs, "high": high}
    return fields | {"scales": in_words(found.scales, 2, 4)}


def iq3_xxs(found: Found) -> dict[str, np.ndarray]:
    return {"codes": low_bytes(found.codes), "scales": signs_and_scales(found)}


def iq3_s(found: Found) -> dict[str, np.ndarray]:
    high = in_words((found.codes >> 8).astype(np.uint8), 8, 1)
    fields = {"codes": low_bytes(found.codes), "signs": found.signs, "high": high}
    return fields | {"scales": in_words(found.scales, 2, 4)}


def low_bytes(codes: np.ndarray) -> np.ndarray:
    """Return the low 8 bits of each code."""
    return (codes & 255).astype(np.uint8)


def as_bytes(words: np.ndarray) -> np.ndarray:
    """Convert integers [blocks, words] to little-endian uint8 [blocks, bytes]."""
    return words.astype(words.dtype.newbyteorder("<")).view(np.uint8)


def in_words(numbers: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Pack `count` neighbours of `bits` bits each, the first lowest: [blocks, n] to [blocks, n / count]."""
    shifts = (np.arange(count) * bits).astype(numbers.dtype)
    return np.bitwise_or.reduce(numbers.reshape(len(numbers), -1, count) << shifts, axis=2)


def signs_and_scales(found: Found) -> np.ndarray:
    """Pack 4 times 7 signs, the first lowest, and the scale of each 32 weights in 32 bits: uint8 [blocks, 32]."""
    return as_bytes(in_words((found.signs & 127).astype(np.uint32), 4, 7) | found.scales.astype(np.uint32) << 28)


IQ1: dict[str, Any] = {"grid": "IQ1_S", "signed": False}
# Search's targets, groups, bits of a scale, and factor.
ENCODERS = {
    "IQ1_S": encoder("IQ1_S", iq1_s, IQ1_TARGETS, 8, 3, 1, np.array([[SHIFT], [-SHIFT]]), **IQ1),
    "IQ1_M": encoder("IQ1_M", iq1_m, IQ1_TARGETS, 16, 3, 1, np.array([[SHIFT, -SHIFT]]), **IQ1),
    "IQ2_XXS": encoder("IQ2_XXS", iq2_xxs, IQ2_TARGETS, 8, 4, 8, even=True),
    "IQ2_XS": encoder("IQ2_XS", iq2_xs, IQ2_TARGETS, 16, 4, 8, even=True),
    "IQ2_S": encoder("IQ2_S", iq2_s, IQ2_TARGETS, 16, 4, 8),
    "IQ3_XXS": encoder("IQ3_XXS", iq3_xxs, IQ3_XXS_TARGETS, 8, 4, 4, even=True),
    "IQ3_S": encoder("IQ3_S", iq3_s, IQ3_S_TARGETS, 8, 4, 1),
}
