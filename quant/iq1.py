"""IQ1_S and IQ1_M: a code names 8 weights of -1, 0 or 1, and a shift of all of them takes the place of a minimum.

IQ1_S has 256 weights in 50 bytes (1.56 bits each), groups of 32:

    0 .. 1    d, float16
    2 .. 33   the low 8 bits of 32 codes
    34 .. 49  16 bits for each group: the high 3 bits of its 4 codes, from the lowest bits up, a 3-bit scale, and on top
              the sign of the group's shift (set: minus)

IQ1_M has 256 weights in 56 bytes (1.75 bits each), groups of 16:

    0 .. 31   the low 8 bits of 32 codes
    32 .. 47  4 bits for every 8 weights, the low half first: the high 3 bits of the code, and the sign of the shift
    48 .. 55  four 16-bit integers: the 3-bit scales of 4 groups each, from the lowest bits up; their topmost 4
              bits are d, float16, the lowest first

In both, weight = d * (1 + 2 * scale) * (grid[code] ± 1/8).
"""

import numpy as np

from localllm.quant.codebook import half_bytes, pairs, search

SHIFT = np.float32(0.125)
# What the largest weight of a group may be divided by its scale; the largest of the grid, shifted, is 1 1/8.
TARGETS = np.array([1.1, 1.5, 2, 2.8], dtype=np.float32)


def encode_iq1_s(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 50]; importance float32 [columns]."""
    shifts = np.array([[SHIFT], [-SHIFT]])
    found = search(weights, importance, "IQ1_S", TARGETS, groups=8, scale_bits=3, factor=1, shifts=shifts, signed=False)
    blocks, high = out.reshape(-1, 50), found.codes >> 8
    fields = found.scales.astype(np.uint16) << 12 | found.shifts.astype(np.uint16) << 15
    for n in range(4):
        fields |= high[:, n::4] << (3 * n)
    blocks[:, :2] = half_bytes(found.d)
    blocks[:, 2:34] = found.codes & 255
    blocks[:, 34:50] = fields.astype("<u2").view(np.uint8)


def encode_iq1_m(weights: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """float32 [rows, columns] to uint8 [rows, columns / 256 * 56]; importance float32 [columns]."""
    shifts = np.array([[SHIFT, -SHIFT]])
    found = search(
        weights, importance, "IQ1_S", TARGETS, groups=16, scale_bits=3, factor=1, shifts=shifts, signed=False
    )
    blocks, d = out.reshape(-1, 56), found.d.astype(np.float16).view(np.uint16)
    fields = (d >> np.array([0, 4, 8, 12], dtype=np.uint16)) << 12
    for n in range(4):
        fields |= found.scales[:, n::4].astype(np.uint16) << (3 * n)
    blocks[:, :32] = found.codes & 255
    blocks[:, 32:48] = pairs((found.codes >> 8).astype(np.uint8) | found.chosen << 3)
    blocks[:, 48:56] = fields.astype("<u2").view(np.uint8)
