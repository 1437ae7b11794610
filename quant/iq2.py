"""IQ2_S, IQ2_XS and IQ2_XXS: a code names the sizes of 8 weights in a codebook; signs are stored beside it.

IQ2_S has 256 weights in 82 bytes (2.56 bits each), groups of 16:

    0 .. 1    d, float16
    2 .. 33   the low 8 bits of 32 codes
    34 .. 65  the signs (set: minus), 8 weights a byte, the lowest bit first
    66 .. 73  the high 2 bits of the codes, four to a byte, the lowest bits first
    74 .. 81  4-bit scales of the groups, two to a byte, the low half first

IQ2_XS has 256 weights in 74 bytes (2.31 bits each), groups of 16, an even number of minus signs in every 8 weights:

    0 .. 1    d, float16
    2 .. 65   16 bits for every 8 weights: a 9-bit code, and on top 7 signs, the eighth being the parity of the others
    66 .. 73  4-bit scales of the groups, two to a byte, the low half first

IQ2_XXS has 256 weights in 66 bytes (2.06 bits each), groups of 32, an even number of minus signs in every 8 weights:

    0 .. 1    d, float16
    2 .. 65   8 bytes a group: 4 codes; then 32 bits with 4 times 7 signs, from the lowest bits up, and a 4-bit scale

In all of them, weight = d * (scale + 0.5) / 4 * grid[code] * sign.
"""

import numpy as np

from localllm.quant.codebook import half_bytes, pairs, search, signs_and_scales

# What the largest weight of a group may be divided by its scale; the largest of a grid is 43.
TARGETS = np.array([24, 30, 36, 41, 46, 53, 63, 80], dtype=np.float32)


def encode_iq2_s(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 82]; importance float32 [columns]."""
    found = search(weights, importance, "IQ2_S", TARGETS, groups=16, scale_bits=4, factor=8)
    blocks, high = out.reshape(-1, 82), (found.codes >> 8).astype(np.uint8)
    blocks[:, :2] = half_bytes(found.d)
    blocks[:, 2:34] = found.codes & 255
    blocks[:, 34:66] = found.signs
    blocks[:, 66:74] = high[:, ::4] | high[:, 1::4] << 2 | high[:, 2::4] << 4 | high[:, 3::4] << 6
    blocks[:, 74:82] = pairs(found.scales)


def encode_iq2_xs(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 74]; importance float32 [columns]."""
    found = search(weights, importance, "IQ2_XS", TARGETS, groups=16, scale_bits=4, factor=8, even=True)
    blocks = out.reshape(-1, 74)
    blocks[:, :2] = half_bytes(found.d)
    blocks[:, 2:66] = (found.codes | (found.signs & 127).astype(np.uint16) << 9).astype("<u2").view(np.uint8)
    blocks[:, 66:74] = pairs(found.scales)


def encode_iq2_xxs(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 66]; importance float32 [columns]."""
    found = search(weights, importance, "IQ2_XXS", TARGETS, groups=8, scale_bits=4, factor=8, even=True)
    blocks = out.reshape(-1, 66)
    blocks[:, :2] = half_bytes(found.d)
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    groups[:, :, :4] = found.codes.reshape(-1, 8, 4)
    groups[:, :, 4:] = signs_and_scales(found).reshape(-1, 8, 4)
    blocks[:, 2:] = groups.reshape(-1, 64)
