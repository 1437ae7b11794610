"""y = W x in AMX tiles, for weights of any format: prefill on CPUs with AMX.

A slab of 32 rows and up to 256 columns of W is unpacked and scaled by the format's own kernel, once for all tokens of
the run. TILE_SLABS slabs, the same columns of consecutive rows, stay in the L2 cache, 16 KB each (32 in two planes),
while the tokens' panels for these columns are read one after the other: 16 tokens are 8 KB. Two panels at a time stay
in the L1 cache until they are multiplied by all these slabs. So tokens are read from the L3 cache once for 256 rows;
when they were read once for every 32 rows, the reads took a third of the time (512 tokens, Emerald Rapids). Sums stay
in the L2 cache from one range of columns to the next, 128 bytes per token and slab; after the last range they are
transposed to rows of y.

Runs of few tokens use the kernel of decode. This kernel is the same for all formats: only unpacking differs. For the
experts' matrices, pack.py defines where the panels of each expert's rows begin.
"""

from localllm.kernels import simd
from localllm.kernels.cpu import PANEL_BYTES, PANEL_TOKENS, TILE_SLAB, TILE_SLABS, TILE_TOKENS
from localllm.kernels.cpu.amx.pack import HALF_BYTES, PLANE_BYTES, ROWS, SLAB_BYTES
from localllm.kernels.cpu.amx.tiles import TILE, configure, make_load, make_products, make_store, make_zero, release
from localllm.kernels.cpu.matmul.experts import EXPERT_BYTES, UNLIMITED, make_experts, store_argument
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import (
    EXPERT,
    EXPERTS_TILES_FLOAT,
    EXPERTS_TILES_QUANTIZED,
    LINEAR_TILES_FLOAT,
    LINEAR_TILES_QUANTIZED,
    UNPACK,
)

# The tokens of rows with more columns do not fit in the L2 cache. Then only as many parts compute as have TILE_SLABS
# slabs, but at least a quarter: 512 tokens of 1536 x 8960 are 1.01 to 1.18 times as fast, of 2048 x 2048 0.91 times.
WIDE = 4096


def make_expert_finish(product, own):
    """Build a function that sets an expert's panels, and whether the run is short enough for both planes.

    product, own: the declarations of the kernel for one matrix and of the kernel for all experts.
    """

    @device
    def finish(a, call, expert, memory):
        number = (expert - load_argument(a, own.active)) // EXPERT_BYTES
        panel = number + load_argument(expert, EXPERT.first) // PANEL_TOKENS
        store_argument(call, product.panels, load_argument(a, own.panels) + panel * PANEL_BYTES)
        is_exact = simd.load_i64(load_argument(a, own.kernel_tokens)) <= simd.load_i64(load_argument(a, own.most_exact))
        simd.store_i64(memory, UNLIMITED if is_exact else 0)
        store_argument(call, product.most_exact, memory)

    return finish


SUMS_BYTES = 2 * TILE * TILE_TOKENS // PANEL_TOKENS


@device
def compute_buffers(scratch):
    """Return a thread's buffers.

    They are slabs, sums, a transposed tile, the arguments of UNPACK, one row, tile registers.
    """
    sums = scratch + TILE_SLABS * SLAB_BYTES
    transposed = sums + TILE_SLABS * SUMS_BYTES
    return scratch, sums, transposed, transposed + TILE, transposed + TILE + 64, transposed + 2 * TILE + 64


def make_multiply(panels, exact):
    numbers = (0, 1, 2, 3)[: 2 * panels]
    zero, load, store = make_zero(numbers), make_load(numbers), make_store(numbers)
    products = make_products(2, panels, exact)

    @device
    def multiply(registers, weights, x, steps, is_first, sums):
        if is_first:
            zero(registers)
        else:
            load(registers, sums, TILE, 64)
        products(registers, steps, weights, HALF_BYTES, 64, TILE, PLANE_BYTES, x, PANEL_BYTES, TILE, PLANE_BYTES)
        store(registers, sums, TILE, 64)

    return multiply


one_fast, two_fast = make_multiply(1, False), make_multiply(2, False)
one_exact, two_exact = make_multiply(1, True), make_multiply(2, True)


@device
def multiply(registers, weights, x, columns, is_first, sums, panels, exact):
    """Multiply a slab by one or two panels of tokens, and add to their sums; exact: in both planes."""
    steps = (columns + 31) // 32
    if panels == 1:
        if exact:
            one_exact(registers, weights, x, steps, is_first, sums)
        else:
            one_fast(registers, weights, x, steps, is_first, sums)
    elif exact:
        two_exact(registers, weights, x, steps, is_first, sums)
    else:
        two_fast(registers, weights, x, steps, is_first, sums)


@device
def prefetch_range(address, size):
    for line in range(0, size, 64):
        simd.prefetch_l2(address + line)


def make_unpack(product):
    @device
    def unpack(a, row, column, width, exact, weights, scratch):
        _, _, _, call, numbers, _ = compute_buffers(scratch)
        row_bytes = load_argument(a, product.row_bytes)
        simd.store_i64(call + 8 * UNPACK.weights, load_argument(a, product.weights) + row * row_bytes)
        simd.store_i64(call + 8 * UNPACK.row_bytes, row_bytes)
        simd.store_i64(call + 8 * UNPACK.last, load_argument(a, product.rows) - row - 1)
        simd.store_i64(call + 8 * UNPACK.column, column)
        simd.store_i64(call + 8 * UNPACK.columns, width)
        simd.store_i64(call + 8 * UNPACK.exact, 1 if exact else 0)
        simd.store_i64(call + 8 * UNPACK.tiles, weights)
        simd.store_i64(call + 8 * UNPACK.row, numbers)
        simd.call_kernel(load_argument(a, product.unpack), call, 0, 1, 0)

    return unpack


def make_fetch(product):
    """Build a function that prefetches a share of the next slabs' weights, called for every two panels.

    The shares are segments of many rows, which no hardware prefetcher predicts.
    """

    @device
    def fetch(a, row, slabs, column, panel, panels):
        columns, row_bytes, rows = load_argument(a, product.columns), load_argument(a, product.row_bytes), ROWS * slabs
        next_row, next_column = row, column + TILE_SLAB
        if next_column >= columns:
            next_row, next_column = row + rows, 0
        first, size = next_column * row_bytes // columns, min(TILE_SLAB, columns - next_column) * row_bytes // columns
        end = min(next_row + rows * (panel + 2) // panels, next_row + rows, load_argument(a, product.rows))
        for r in range(next_row + rows * panel // panels, end):
            prefetch_range(load_argument(a, product.weights) + r * row_bytes + first, size)

    return fetch


def make_finish(product):
    """Build a function that stores the sums of all slabs as rows of y, 16 tokens at a time.

    A token's rows of all slabs are contiguous. Written slab by slab, with the tokens' rows far apart, and without
    prefetches, y took a quarter of a product's time (512 tokens, 4096 x 2048; 1.22 to 1.29 times as fast now).
    """

    @device
    def finish(a, row, slabs, first, tokens, sums, transposed):
        y_stride = load_argument(a, product.y_stride)
        for t in range(0, tokens, PANEL_TOKENS):
            for i in range(slabs):
                rows = load_argument(a, product.rows) - row - i * ROWS
                for half in range(2 if rows > 16 else 1):
                    tile = sums + i * SUMS_BYTES + (t // PANEL_TOKENS * 2 + half) * TILE
                    y = load_argument(a, product.y) + (first + t) * y_stride + (row + i * ROWS + half * 16) * 4
                    for token in range(PANEL_TOKENS, 2 * PANEL_TOKENS):
                        simd.prefetch_l2(y + token * y_stride)
                    simd.transpose_f32(tile, 64, transposed)
                    for token in range(min(PANEL_TOKENS, tokens - t)):
                        simd.store_f32x16(y + token * y_stride, simd.load_f32x16(transposed + token * 64))

    return finish


def make_tile(product):
    """Build a function that multiplies `slabs` slabs, from `row` on, by at most TILE_TOKENS tokens."""
    unpack, fetch, finish = make_unpack(product), make_fetch(product), make_finish(product)

    @device
    def tile(a, row, slabs, first, tokens, exact, scratch):
        weights, sums, transposed, _, _, registers = compute_buffers(scratch)
        columns, panels = load_argument(a, product.columns), (tokens + PANEL_TOKENS - 1) // PANEL_TOKENS
        for column in range(0, columns, TILE_SLAB):
            width = min(TILE_SLAB, columns - column)
            for i in range(slabs):
                unpack(a, row + i * ROWS, column, width, exact, weights + i * SLAB_BYTES, scratch)
            x = load_argument(a, product.panels) + column // TILE_SLAB * load_argument(a, product.slab_bytes)
            x += first // PANEL_TOKENS * PANEL_BYTES
            for panel in range(0, panels, 2):
                fetch(a, row, slabs, column, panel, panels)
                at_once, two = min(2, panels - panel), x + panel * PANEL_BYTES
                for i in range(slabs):
                    slab, place = weights + i * SLAB_BYTES, sums + i * SUMS_BYTES + panel * 2 * TILE
                    multiply(registers, slab, two, width, column == 0, place, at_once, exact)
        finish(a, row, slabs, first, tokens, sums, transposed)

    return tile


def make_linear(product):
    tile = make_tile(product)

    @kernel
    def linear(a, part, parts, thread):
        tokens, rows = simd.load_i64(load_argument(a, product.count)), load_argument(a, product.rows)
        kernel_tokens = simd.load_i64(load_argument(a, product.kernel_tokens))
        if kernel_tokens < load_argument(a, product.least):
            simd.call_kernel(load_argument(a, product.few), a, part, parts, thread)
            return
        scratch = load_argument(a, product.scratch) + thread * load_argument(a, product.scratch_bytes)
        exact, tiles = kernel_tokens <= simd.load_i64(load_argument(a, product.most_exact)), (rows + ROWS - 1) // ROWS
        if load_argument(a, product.columns) > WIDE:
            parts = min(parts, max((tiles + TILE_SLABS - 1) // TILE_SLABS, parts // 4))
        if part >= parts:
            return
        _, _, _, _, _, registers = compute_buffers(scratch)
        configure(registers)
        end = tiles * (part + 1) // parts
        for i in range(tiles * part // parts, end, TILE_SLABS):
            for first in range(0, tokens, TILE_TOKENS):
                count = min(tokens - first, TILE_TOKENS)
                tile(a, i * ROWS, min(TILE_SLABS, end - i), first, count, exact, scratch)
        release()

    return linear


def make_experts_tiles(product, own, is_quantized):
    return make_experts(product, own, is_quantized, make_expert_finish(product, own))


MAKERS = {
    "linear_tiles_quantized": lambda: make_linear(LINEAR_TILES_QUANTIZED),
    "linear_tiles_float": lambda: make_linear(LINEAR_TILES_FLOAT),
    "experts_tiles_quantized": lambda: make_experts_tiles(LINEAR_TILES_QUANTIZED, EXPERTS_TILES_QUANTIZED, True),
    "experts_tiles_float": lambda: make_experts_tiles(LINEAR_TILES_FLOAT, EXPERTS_TILES_FLOAT, False),
}


def __getattr__(name):
    """Build a kernel when it is first requested."""
    if name not in MAKERS:
        raise AttributeError(name)
    return MAKERS[name]()
