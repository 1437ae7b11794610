"""The layout of a slab of weights as BF16 tiles: 32 rows of up to TILE_SLAB columns.

    [2 times 16 rows][plane, high and low][32 columns][16 rows][32]

So each tile is contiguous, and each of its rows is one cache line.
"""

from localllm.kernels.cpu import TILE_SLAB
from localllm.kernels.cpu.amx.tiles import TILE

ROWS = 32
PLANE_BYTES = TILE_SLAB // 32 * TILE
HALF_BYTES = 2 * PLANE_BYTES  # bytes of 16 rows
SLAB_BYTES = 2 * HALF_BYTES
