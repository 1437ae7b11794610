"""Codebooks, or grids: a code names 4 or 8 weights at once.

Eight weights of 2 bits have 65536 patterns, most of which rarely occur. A grid keeps the 256 to 2048 patterns that
represent real weights best, so 8 to 11 bits name 8 weights. The grids are ggml's (ggml-common.h), read from the `gguf`
package, which carries them packed. Numba embeds them in the machine code as constants.

A block has 256 weights: 8 runs of 32, 32 octets of 8, or 64 quads of 4. Vector q of a group's codes holds octets 4 *
run + q.

For the int8 kernels, tables have each row of a grid ready: grid value + offset, one byte per weight. A group takes 32
or 64 loads from the table, which take most of the time.
"""

from typing import Any

import numpy as np

from localllm.kernels.cpu.signature import device, inlined
from localllm.kernels.simd import (
    make_shuffle,
    u8x64,
    u8x64_of_quads,
    u8x64_of_words,
)


def codebook(format: Any) -> np.ndarray:
    """Load the grid of a format: int8 [codes, weights per code].

    format: a class of `gguf.quants`.
    """
    format.init_grid()
    return format.grid.reshape(format.grid_shape).astype(np.int8)


STRIPES, RUNS = range(4), range(8)


def for_octets(source, order):
    """Return a shuffle that gives each of eight octets one byte of `source`, repeated for all 8 weights.

    order: the byte for each octet.
    """
    return make_shuffle(u8x64, source, [byte for byte in order for _ in range(8)])


# ---- rows of weights ------------------------------------------------------------------------------------------------


def packed(codes):
    """Pack each row of a grid, [rows, 8 or 4] bytes, into one integer: int64 [rows] or int32 [rows]."""
    return np.ascontiguousarray(codes, np.uint8).view("<i8" if codes.shape[1] == 8 else "<i4").reshape(-1)


def octets(table, row):
    """Make a function (address) that looks up a group's codes, eight weights at a time: four striped u8x64.

    row(address, octet): the row of `table` for an octet of the group.
    """

    @inlined
    def stripe(address, q):
        return u8x64_of_quads(
            table[row(address, q)], table[row(address, 4 + q)],
            table[row(address, 8 + q)], table[row(address, 12 + q)],
            table[row(address, 16 + q)], table[row(address, 20 + q)],
            table[row(address, 24 + q)], table[row(address, 28 + q)],
        )  # fmt: skip

    return device(lambda address: (stripe(address, 0), stripe(address, 1), stripe(address, 2), stripe(address, 3)))


def quads(table, row):
    """Make a function (address) that looks up a group's codes, four weights at a time: four striped u8x64.

    row(address, quad): the row of `table` for a quad of the group.
    """

    @inlined
    def stripe(address, q):
        i, j = 2 * q, 2 * q + 1
        return u8x64_of_words(
            table[row(address, i)], table[row(address, j)],
            table[row(address, 8 + i)], table[row(address, 8 + j)],
            table[row(address, 16 + i)], table[row(address, 16 + j)],
            table[row(address, 24 + i)], table[row(address, 24 + j)],
            table[row(address, 32 + i)], table[row(address, 32 + j)],
            table[row(address, 40 + i)], table[row(address, 40 + j)],
            table[row(address, 48 + i)], table[row(address, 48 + j)],
            table[row(address, 56 + i)], table[row(address, 56 + j)],
        )  # fmt: skip

    return device(lambda address: (stripe(address, 0), stripe(address, 1), stripe(address, 2), stripe(address, 3)))
