"""Unpacks weights to a slab of BF16 tiles: float formats, and, via float32, blocks of any format."""

from localllm.kernels.cpu.amx.slab import HALF_BYTES, PLANE_BYTES, ROWS
from localllm.kernels.cpu.amx.tiles import TILE, store_high, store_planes
from localllm.kernels.cpu.matmul.matmul_float import PLAIN, block_of, make_blocks, make_plain
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import load_f32x16, load_lanes_f32x16
from localllm.kernels.table import UNPACK


@device
def two(row, k, columns):
    """Load numbers k to k + 31 of a float32 row as two f32x16, with zeros after its end."""
    if k + 32 <= columns:
        return load_f32x16(row + k * 4), load_f32x16(row + k * 4 + 64)
    return load_lanes_f32x16(row + k * 4, columns - k), load_lanes_f32x16(row + k * 4 + 64, columns - k - 16)


def make(format_name):
    """Make the kernel that unpacks a slab of one format."""
    load_row = make_plain(*PLAIN[format_name]) if format_name in PLAIN else make_blocks(format_name)
    block, block_bytes = block_of(format_name)

    @kernel
    def unpack(a, part, parts, thread):
        columns, exact, row = argument(a, UNPACK.columns), argument(a, UNPACK.exact), argument(a, UNPACK.row)
        first = argument(a, UNPACK.weights) + argument(a, UNPACK.column) // block * block_bytes
        for i in range(ROWS):
            load_row(first + min(i, argument(a, UNPACK.last)) * argument(a, UNPACK.row_bytes), columns, row)
            place = argument(a, UNPACK.tiles) + i // 16 * HALF_BYTES + i % 16 * 64
            for k in range(0, columns, 32):
                x, y = two(row, k, columns)
                if exact == 1:
                    store_planes(place + k // 32 * TILE, PLANE_BYTES, x, y)
                else:
                    store_high(place + k // 32 * TILE, 0, x, y)

    return unpack
