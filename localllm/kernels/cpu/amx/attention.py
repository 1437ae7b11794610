"""The two products of attention for many rows, in AMX tiles.

They are queries times keys, and weights times values; cpu/attention/products.py defines the products. All values are in
two planes of BF16: scores become exponents, and with one plane, scores of 10 would cause an error of a percent in
weights. Queries and weights are left operands. Keys and values, the right operands, are packed once for all rows of a
unit: keys are transposed, values are grouped in pairs of tokens. Rows, keys and dimensions are processed 32 at a time;
results beyond their ends are not used.
"""

from localllm.kernels import simd
from localllm.kernels.cpu import ATTEND_KEYS as KEYS
from localllm.kernels.cpu import ATTEND_TILES, TILE_REGISTERS
from localllm.kernels.cpu.amx.tiles import (
    TILE,
    configure,
    make_load,
    make_products,
    make_store,
    make_zero,
    release,
    store_alternating,
    store_planes,
)
from localllm.kernels.cpu.attention import attend as attention
from localllm.kernels.cpu.attention.products import ManyRowProducts, compute_query_scale, find_row
from localllm.kernels.cpu.signature import device, load_argument
from localllm.kernels.table import ATTEND

STRIDE = KEYS * 4  # bytes from one row of scores to the next
four, two = make_products(2, 2, True), make_products(2, 1, True)
zero, load_left, load_right = make_zero((0, 1, 2, 3)), make_load((0, 1)), make_load((2, 3))
store_left, store_right = make_store((0, 1)), make_store((2, 3))  # sums of the first and the second right operand


@device
def load_queries(a, first, rows, group, kv_head, key_dim, q):
    """Load the unit's rows of q, scaled, as left operands.

    The layout is [rows / 16][plane][dimensions / 32][16 rows][32].
    """
    head_dim, scale = load_argument(a, ATTEND.key_dim), simd.splat_f32x16(compute_query_scale(a))
    low = (key_dim + 31) // 32 * TILE
    for r in range(rows):
        source = find_row(
            load_argument(a, ATTEND.q), load_argument(a, ATTEND.q_stride), first + r, group, kv_head, head_dim
        )
        target = q + r // 16 * 2 * low + r % 16 * 64
        for d in range(0, head_dim, 32):
            x = simd.load_lanes_f32x16(source + d * 4, head_dim - d) * scale
            y = simd.load_lanes_f32x16(source + d * 4 + 64, head_dim - d - 16) * scale
            store_planes(target + d // 32 * TILE, low, x, y)


def make_pack_keys(load):
    """Build a function that packs keys as right operands.

    The layout is [keys / 16][plane][dimensions / 32][16 pairs][16 keys][2].
    """

    @device
    def pack_keys(keys, count, token_bytes, padded, transposed, tiles):
        low = (padded + 31) // 32 * TILE
        for i in range(0, count, 16):
            for d in range(0, padded, 32):
                for t in range(16):
                    key = keys + (i + t) * token_bytes
                    y = load(key, d + 16) if d + 16 < padded else simd.zero_f32x16()
                    store_planes(transposed + t * 64, TILE, load(key, d), y)
                target = tiles + i // 16 * 2 * low + d // 32 * TILE
                simd.transpose_f32(transposed, 64, target)
                simd.transpose_f32(transposed + TILE, 64, target + low)

    return pack_keys


def make_pack_values(load):
    """Build a function that packs 64 values as right operands.

    The layout is [dimensions / 16][plane][2][16 pairs of keys][16][2].
    """

    @device
    def pack_values(values, count, token_bytes, padded, tiles):
        for i in range(0, (count + 31) // 32 * 32, 2):
            value, place = values + i * token_bytes, tiles + i // 32 * TILE + i % 32 * 32
            for d in range(0, padded, 16):
                x, y = simd.zero_f32x16(), simd.zero_f32x16()
                if i < count:
                    x = load(value, d)
                if i + 1 < count:
                    y = load(value + token_bytes, d)
                store_alternating(place + d // 16 * 4 * TILE, 2 * TILE, x, y)

    return pack_values


@device
def pack_weights(weights, rows, count):
    """Pack rows of weights in place as left operands [rows][plane][64]; those after `count` become zero."""
    count = (count + 15) // 16 * 16
    for r in range(rows):
        row = weights + r * STRIDE
        w0, w1 = simd.load_f32x16(row), simd.load_lanes_f32x16(row + 64, count - 16)
        w2, w3 = simd.load_lanes_f32x16(row + 128, count - 32), simd.load_lanes_f32x16(row + 192, count - 48)
        store_planes(row, 2 * KEYS, w0, w1)
        store_planes(row + 64, 2 * KEYS, w2, w3)


def make_many(load_key, load_value):
    pack_keys, pack_values = make_pack_keys(load_key), make_pack_values(load_value)

    @device
    def scores(q, rows, keys, count, token_bytes, padded, tiles, scores):
        """Compute the scores, f32 [rows][KEYS]. Up to 15 keys beyond `count` are read, too."""
        registers, low = tiles - TILE_REGISTERS, (padded + 31) // 32 * TILE
        transposed = registers - 2 * TILE
        pack_keys(keys, count, token_bytes, padded, transposed, tiles)
        for i in range(0, count, 32):
            for r in range(0, rows, 32):
                x, y, z = q + r // 16 * 2 * low, tiles + i // 16 * 2 * low, scores + r * STRIDE + i * 4
                zero(registers)
                four(registers, low // TILE, x, 2 * low, 64, TILE, low, y, 2 * low, TILE, low)
                store_left(registers, z, 16 * STRIDE, STRIDE)
                store_right(registers, z + 64, 16 * STRIDE, STRIDE)

    @device
    def add_values(weights, rows, values, count, token_bytes, padded, tiles, output):
        registers, apart, steps = tiles - TILE_REGISTERS, 16 * padded * 4, (count + 31) // 32
        pack_weights(weights, rows, count)
        pack_values(values, count, token_bytes, padded, tiles)
        for d in range(0, padded, 32):
            for r in range(0, rows, 32):
                x, y, z = weights + r * STRIDE, tiles + d // 16 * 4 * TILE, output + (r * padded + d) * 4
                load_left(registers, z, apart, padded * 4)
                if d + 16 < padded:
                    load_right(registers, z + 64, apart, padded * 4)
                    four(registers, steps, x, 16 * STRIDE, STRIDE, 64, 2 * KEYS, y, 4 * TILE, TILE, 2 * TILE)
                    store_right(registers, z + 64, apart, padded * 4)
                else:
                    two(registers, steps, x, 16 * STRIDE, STRIDE, 64, 2 * KEYS, y, 4 * TILE, TILE, 2 * TILE)
                store_left(registers, z, apart, padded * 4)

    return scores, add_values


@device
def start_tiles(tiles):
    """Configure the tile registers. Without AMX, their emulation is in memory just before `tiles`."""
    configure(tiles - TILE_REGISTERS)


@device
def finish_tiles():
    release()


IN_TILES = ManyRowProducts(make_many, load_queries, start_tiles, finish_tiles, ATTEND_TILES)


def make(format_name):
    return attention.make(format_name, IN_TILES)
