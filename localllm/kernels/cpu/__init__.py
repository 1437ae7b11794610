"""CPU kernels: one file per operation.

This module finds a kernel by its name, and has the constants of their sizes. All kernels have the signature in
signature.py. The folders: matmul/ (products of matrices, routing of experts), amx/ (products in AMX tiles), attention/,
recurrent/, elementwise/ (row-wise operations). Their vocabulary (part, tile, slab, plane, ...) is defined in
localllm/kernels/__init__.py.
"""

from math import lcm
from typing import Any, NamedTuple

from localllm.kernels.formats import FAMILIES
from localllm.kernels.machine import Lane, get_lane
from localllm.kernels.table import PAGE, load_kernel
from localllm.quant.formats import LAYOUTS


def get_register_tiles(of: Lane) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a lane's register tiles, (vectors of 16 rows, tokens).

    The first is that of matmul/tiles.py, the second that of matmul/tiles_f32.py.
    """
    if of.has_512_bits:
        return (2, 6), (2, 12)
    return (2, 4) if of.has_avx2_only else (1, 4), (1, 4)


class WordConversion(NamedTuple):
    """The conversion of activations to 16-bit values for products with weights in BF16 or F16."""

    kernel: str
    multiple: int  # the number of columns must be a multiple of this
    run: int  # columns that share a scale; the number of columns is rounded up to whole runs
    shared: int  # bytes of a scale

    def count_bytes(self, columns: int) -> int:
        return -(-columns // self.run) * (2 * self.run + self.shared)


def select_word_conversions(of: Lane) -> dict[str, WordConversion]:
    """Return the conversion for large batches, by the format of the weights.

    It is empty if the lane does not multiply 16-bit values.
    """
    words = {"BF16": WordConversion("round_bf16", 2, 2, 0)} if "avx512bf16" in of.features else {}
    return words | ({"F16": WordConversion("quantize_words", 16, 32, 4)} if of.has_vnni else {})


def compute_linear_scratch(columns: int) -> int:
    """Compute the size in bytes of a thread's scratch memory for products of `columns` columns."""
    in_words = 2 * columns * MAX_WORD_TOKENS if get_lane().has_avx2_only else 0
    blocks = columns // 256 * 640 + columns % 256 // 64 * 256  # bytes of a token, see gemv_few.py
    return max(LINEAR_SCRATCH, columns // 256 * ONE_TOKEN_BYTES, FEW_AT_ONCE * (FEW_TOTAL_BYTES + blocks), in_words)


# Formats with int8 kernels: the number of weights that share a scale.
SUB_BLOCK = {name: LAYOUTS[name].sub_block for name in FAMILIES}
SLAB = 1024  # columns of a tile of rows that are unpacked at a time
LINEAR_SCRATCH = 80 * SLAB  # bytes per thread: codes of 16 + 32 rows, their scales and minimums
ONE_TOKEN_BYTES = 640  # bytes of 256 columns of a token, as gemv_k_sub_blocks.py orders them
FEW_AT_ONCE = 32  # tokens for which a row is read and unpacked once (gemv_few.py)
FEW_TOTAL_BYTES = 256  # of scratch memory, at most, for a token's totals
# Maximum number of tokens for which rows are read as in decode, with AVX2 only (gemv_int16.py). Compared with tiles, on
# an idle Zen 3, rows take 0.4 to 0.6 of the time at 4 tokens and 0.7 to 0.9 at 8; at 12 0.9 to 1.2, at 16 0.9 to 1.45,
# most in matrices of 1000 rows.
MAX_WORD_TOKENS = 10
INTEGER_TILE, FLOAT_TILE = get_register_tiles(get_lane())
TOKENS_AT_ONCE = (4, INTEGER_TILE[1], FLOAT_TILE[1])  # products round up the number of tokens to multiples of these
# The rows of an expert are rounded up to a multiple of this, so that products do not touch the next expert's rows. A
# single row is not rounded up.
EXPERT_ROWS = lcm(*TOKENS_AT_ONCE)
PRECISE_TOKENS = 128  # activations keep 16 bits in runs of at most this many tokens
CALL_BYTES = 256  # of scratch memory, for the arguments of an expert's product
# A product with a low-rank update: offsets in scratch memory of the update's arguments and of its own scratch memory;
# rows of a unit of work, a multiple of all tiles; minimum number of tokens for which it is computed slice by slice.
UPDATE_CALL, UPDATE_SCRATCH, SLICE_UNIT, MIN_SLICED_TOKENS = CALL_BYTES, 2 * CALL_BYTES, 32, 32
HALVES = select_word_conversions(get_lane())
MAX_FLOAT_ROW_TOKENS = 8  # maximum of kernel_tokens for which rows of float weights are read as in decode
FLOAT_SLAB = 256  # columns of a slab of float weights, 4 bytes each
FLOAT_SCRATCH = 4 * 48 * FLOAT_SLAB + 4096
FLOAT_FORMATS = {"F32", "F16", "BF16"}
ATTEND_ROWS, ATTEND_KEYS = 96, PAGE  # maximum rows of a unit of attention; keys of a block
MAX_SPLITS, FEW_TOKENS = 16, 16  # maximum sections of a context; maximum tokens of a sequence whose context is split
SPLIT_TOKENS = 64  # slots for partial results: maximum tokens of a run whose contexts are split
# BF16 tiles, on CPUs with AMX (amx/tiles.py): columns of a slab of weights; slabs, of 32 rows each, that are unpacked
# together; maximum tokens that are multiplied by them; tokens of a panel; bytes of a panel's columns of a slab, in two
# planes.
TILE_SLAB, TILE_SLABS, TILE_TOKENS, PANEL_TOKENS = 256, 8, 512, 16
PANEL_BYTES = 4 * PANEL_TOKENS * TILE_SLAB
TILE_REGISTERS = 8192 + 64  # bytes for emulated tile registers, and for their configuration
ATTEND_TILES = TILE_REGISTERS + 2048 + 64 * ATTEND_ROWS  # further bytes for attention: with a tile, padding of q
TILES_SCRATCH = TILE_REGISTERS + TILE_SLABS * 128 * (TILE_SLAB + TILE_TOKENS) + 4096  # slabs, sums, a tile, a row
# For peak.py: sums of 64 bytes that fit in registers; bytes of memory per part; products of a round, of bytes
# and of tiles.
PEAK_CHAINS = 12 if get_lane().has_512_bits else 6
PEAK_BYTES = 16384
PEAK_PRODUCTS, PEAK_TILE_PRODUCTS = 64 * PEAK_CHAINS, 4 * 16 * 16 * 32
# Minimum number of tokens for products in AMX tiles, by the format of the weights: where the times of scripts/measure
# lanes cross on an Emerald Rapids (4096 x 2048, 2 threads; for quantized formats between 24 and 48, simplified to one
# value). Since 30 November a 1.2 B model reads 34 tokens 1.23 times as fast by rows, 44 tokens as fast.
MIN_TILE_TOKENS = dict.fromkeys(sorted(FLOAT_FORMATS), 16) | dict.fromkeys(SUB_BLOCK, 32)
MIN_SOME_TILES, MIN_ALL_TILES = min(MIN_TILE_TOKENS.values()), max(MIN_TILE_TOKENS.values())


def find_kernel(name: str) -> Any:
    return load_kernel("cpu", name)
