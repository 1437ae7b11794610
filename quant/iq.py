"""Encoders of the i-quants, which pack the results of the codebook search into the fields of blocks.

A code names 4 or 8 weights in a codebook. IQ2 and IQ3 store signs apart from codes. In IQ2_XXS, IQ2_XS and IQ3_XXS
every 8 weights have an even number of minus signs, so only 7 signs are stored. The codes of IQ1_S and IQ1_M name
weights of -1, 0 or 1, and a shift of all weights of a group takes the place of a minimum.
"""

from collections.abc import Callable

import numpy as np

from localllm.quant.codebook import SearchResult, search
from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

# Candidates for (largest weight of a group) / scale. The largest values of the grids are 1 1/8 (with the shift), 43, 15
# and 62.
IQ1_TARGETS = np.array([1.1, 1.5, 2, 2.8], dtype=np.float32)
IQ2_TARGETS = np.array([24, 30, 36, 41, 46, 53, 63, 80], dtype=np.float32)
IQ3_S_TARGETS = np.array([8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18.5, 21], dtype=np.float32)
IQ3_XXS_TARGETS = np.array([32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 74, 84], dtype=np.float32)
SHIFT = np.float32(0.125)


Fields = Callable[[SearchResult], dict[str, np.ndarray]]


def encoder(name: str, fields: Fields, *how, grid: str = "", **more) -> Callable:
    """Make the encoder of a format.

    fields: converts the search's results to the fields of blocks, by name, uint8 [blocks, bytes of the field]; grid:
    the format whose codebook is searched, `name` by default; how, more: the arguments of `search` after `grid`.
    """
    layout, block_bytes = LAYOUTS[name], BY_NAME[name].bytes

    def encode(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        """Encode float32 [rows, columns] to uint8 [rows, bytes]; importance float32 [columns]."""
        result, blocks = search(weights, importance, grid or name, *how, **more), out.reshape(-1, block_bytes)
        if layout.d is not None:
            blocks[:, layout.d : layout.d + 2] = result.d.astype("<f2").view(np.uint8)
        for part, numbers in fields(result).items():
            at = layout.part(part)
            blocks[:, at : at + numbers.shape[1]] = numbers

    return encode


def iq1_s(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ1_S."""
    words = result.scales.astype(np.uint16) << 12 | result.shifts.astype(np.uint16) << 15
    return {"codes": low_bytes(result.codes), "scales": as_bytes(words | in_words(result.codes >> 8, 4, 3))}


def iq1_m(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ1_M."""
    d = result.d.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << 12
    high = (result.codes >> 8).astype(np.uint8) | result.chosen << 3
    words = d | in_words(result.scales.astype(np.uint16), 4, 3)
    return {"codes": low_bytes(result.codes), "high": in_words(high, 2, 4), "scales": as_bytes(words)}


def iq2_xxs(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ2_XXS."""
    codes, rest = low_bytes(result.codes).reshape(-1, 8, 4), signs_and_scales(result).reshape(-1, 8, 4)
    return {"codes": np.concatenate((codes, rest), axis=2).reshape(-1, 64)}


def iq2_xs(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ2_XS."""
    codes = result.codes | (result.signs & 127).astype(np.uint16) << 9
    return {"codes": as_bytes(codes), "scales": in_words(result.scales, 2, 4)}


def iq2_s(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ2_S."""
    high = in_words((result.codes >> 8).astype(np.uint8), 4, 2)
    fields = {"codes": low_bytes(result.codes), "signs": result.signs, "high": high}
    return fields | {"scales": in_words(result.scales, 2, 4)}


def iq3_xxs(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ3_XXS."""
    return {"codes": low_bytes(result.codes), "scales": signs_and_scales(result)}


def iq3_s(result: SearchResult) -> dict[str, np.ndarray]:
    """Return the fields of blocks of IQ3_S."""
    high = in_words((result.codes >> 8).astype(np.uint8), 8, 1)
    fields = {"codes": low_bytes(result.codes), "signs": result.signs, "high": high}
    return fields | {"scales": in_words(result.scales, 2, 4)}


def low_bytes(codes: np.ndarray) -> np.ndarray:
    """Return the low 8 bits of each code."""
    return (codes & 255).astype(np.uint8)


def as_bytes(words: np.ndarray) -> np.ndarray:
    """Convert integers [blocks, words] to little-endian uint8 [blocks, bytes]."""
    return words.astype(words.dtype.newbyteorder("<")).view(np.uint8)


def in_words(numbers: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Pack every `count` numbers of `bits` bits into one number, the first in the lowest bits.

    numbers: [blocks, n]; result: [blocks, n / count] of the same type.
    """
    shifts = (np.arange(count) * bits).astype(numbers.dtype)
    return np.bitwise_or.reduce(numbers.reshape(len(numbers), -1, count) << shifts, axis=2)


def signs_and_scales(result: SearchResult) -> np.ndarray:
    """Pack the signs and the scale of every 32 weights into 32 bits: uint8 [blocks, 32].

    Four times 7 sign bits, the first lowest, then the scale, 4 bits.
    """
    return as_bytes(in_words((result.signs & 127).astype(np.uint32), 4, 7) | result.scales.astype(np.uint32) << 28)


ENCODERS = {  # the numbers: groups in a block, bits of a scale, factor (see `search`)
    "IQ1_S": encoder("IQ1_S", iq1_s, IQ1_TARGETS, 8, 3, 1, np.array([[SHIFT], [-SHIFT]]), grid="IQ1_S", signed=False),
    "IQ1_M": encoder("IQ1_M", iq1_m, IQ1_TARGETS, 16, 3, 1, np.array([[SHIFT, -SHIFT]]), grid="IQ1_S", signed=False),
    "IQ2_XXS": encoder("IQ2_XXS", iq2_xxs, IQ2_TARGETS, 8, 4, 8, even=True),
    "IQ2_XS": encoder("IQ2_XS", iq2_xs, IQ2_TARGETS, 16, 4, 8, even=True),
    "IQ2_S": encoder("IQ2_S", iq2_s, IQ2_TARGETS, 16, 4, 8),
    "IQ3_XXS": encoder("IQ3_XXS", iq3_xxs, IQ3_XXS_TARGETS, 8, 4, 4, even=True),
    "IQ3_S": encoder("IQ3_S", iq3_s, IQ3_S_TARGETS, 8, 4, 1),
}
