"""IQ3_S and IQ3_XXS: a code names the sizes of 4 weights in a codebook; signs are stored beside it.

IQ3_S has 256 weights in 110 bytes (3.44 bits each), groups of 32:

    0 .. 1     d, float16
    2 .. 65    the low 8 bits of 64 codes
    66 .. 73   the ninth bits of the codes, eight to a byte, the lowest bit first
    74 .. 105  the signs (set: minus), eight to a byte, the lowest bit first
    106 .. 109 4-bit scales of the groups, two to a byte, the low half first

    weight = d * (1 + 2 * scale) * grid[code] * sign

IQ3_XXS has 256 weights in 98 bytes (3.06 bits each), groups of 32, an even number of minus signs in every 8 weights:

    0 .. 1    d, float16
    2 .. 65   64 codes
    66 .. 97  32 bits for each group: the signs of 4 times 8 weights, 7 bits each, from the lowest bits up, the eighth
              being the parity of the others; and a 4-bit scale on top

    weight = d * (scale + 0.5) / 2 * grid[code] * sign
"""

import numpy as np

from localllm.quant.codebook import half_bytes, pairs, search, signs_and_scales

# What the largest weight of a group may be divided by its scale.
IQ3_S_TARGETS = np.array([8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18.5, 21], dtype=np.float32)
IQ3_XXS_TARGETS = np.array([32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 74, 84], dtype=np.float32)


def encode_iq3_s(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 110]; importance float32 [columns]."""
    found = search(weights, importance, "IQ3_S", IQ3_S_TARGETS, groups=8, scale_bits=4, factor=1)
    blocks = out.reshape(-1, 110)
    blocks[:, :2] = half_bytes(found.d)
    blocks[:, 2:66] = found.codes & 255
    blocks[:, 66:74] = np.packbits(found.codes >> 8, axis=1, bitorder="little")
    blocks[:, 74:106] = found.signs
    blocks[:, 106:110] = pairs(found.scales)


def encode_iq3_xxs(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 98]; importance float32 [columns]."""
    found = search(weights, importance, "IQ3_XXS", IQ3_XXS_TARGETS, groups=8, scale_bits=4, factor=4, even=True)
    blocks = out.reshape(-1, 98)
    blocks[:, :2] = half_bytes(found.d)
    blocks[:, 2:66] = found.codes
    blocks[:, 66:98] = signs_and_scales(found)
