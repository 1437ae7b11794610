"""CPU kernels: one file per kind, all with the signature in signature.py. This file finds a kernel by its name."""

from importlib import import_module
from math import lcm
from typing import NamedTuple

from localllm.kernels.arguments import PAGE
from localllm.kernels.formats import FAMILIES
from localllm.kernels.machine import Lane, this_lane
from localllm.kernels.verbs import ROWWISE
from localllm.quant.layouts import LAYOUTS


def register_tiles(of: Lane) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of register tiles on a lane, (vectors of 16 rows, tokens): integer, then float32 ones.

    See matmul/tiles.py and matmul/tiles_f32.py.
    """
    if of.has_512_bits:
        return (2, 6), (2, 12)
    return (2, 4) if of.has_avx2_only else (1, 4), (1, 4)


class AsWords(NamedTuple):
    """The conversion of activations to words of 16 bits."""

    kernel: str
    multiple: int  # of which columns are
    run: int  # columns that share something; they are rounded up to whole runs
    shared: int  # its bytes

    def bytes(self, columns: int) -> int:
        """Return the bytes of a token."""
        return -(-columns // self.run) * (2 * self.run + self.shared)


def halves(of: Lane) -> dict[str, AsWords]:
    """Return the kernels by float format that make 16-bit words of activations, for large batches.

    There are none unless the lane has instructions that multiply such words.
    """
    words = {"BF16": AsWords("round_bf16", 2, 2, 0)} if "avx512bf16" in of.features else {}
    return words | ({"F16": AsWords("quantize_words", 16, 32, 4)} if of.has_vnni else {})


def linear_scratch(columns: int) -> int:
    """Return bytes that a thread needs for products of blocks."""
    in_words = 2 * columns * MOST_IN_WORDS if this_lane().has_avx2_only else 0
    return max(LINEAR_SCRATCH, columns // 256 * ONE_TOKEN_BYTES, in_words)


# Formats with int8 kernels: the weights that share a scale.
SUB_BLOCK = {name: LAYOUTS[name].sub_block for name in FAMILIES}
SLAB = 1024  # columns of a tile of weights that are unpacked at a time
LINEAR_SCRATCH = 80 * SLAB  # bytes per thread: codes of 16 + 32 rows, their scales and minimums
ONE_TOKEN_BYTES = 640  # of 256 columns of one token in the order of gemv_k_sub_blocks.py
# Tokens that meet rows as in decode with AVX2 only (gemv_int16.py). Against tiles, on an idle Zen 3, rows take 0.4 to
# 0.6 of the time at 4 tokens and 0.7 to 0.9 at 8; at 12 0.9 to 1.2, at 16 0.9 to 1.45, most in matrices of 1000 rows.
MOST_IN_WORDS = 10
INTEGER_TILE, FLOAT_TILE = register_tiles(this_lane())
TOKENS_AT_ONCE = (4, INTEGER_TILE[1], FLOAT_TILE[1])  # products round the tokens of a run up to one of these
# Rows of an expert are rounded up to this, so that products leave those of the next one alone; one row stays one.
EXPERT_ROWS = lcm(*TOKENS_AT_ONCE)
CALL_BYTES = 256  # of scratch memory: the arguments of the product that an expert needs
HALVES = halves(this_lane())
FLOAT_SLAB = 256  # the same for float weights, as words of 4 bytes
FLOAT_SCRATCH = 4 * 48 * FLOAT_SLAB + 4096
PLAIN = {"F32", "F16", "BF16"}
ATTEND_ROWS, ATTEND_KEYS = 96, PAGE  # of a unit of attention at most, and of a block of keys
MOST_SPLITS, FEW_TOKENS = 16, 16  # a context is split up to so often, for so many tokens of a sequence at most
SPLIT_TOKENS = 64  # tokens of a run whose contexts are split at most: so many slots for partial results there are
# BF16 tiles, on CPUs with AMX (amx/tiles.py): columns of a slab of weights, slabs of 32 rows that are unpacked at once,
# tokens that meet them then, and a panel of tokens, of which a slab's columns take so many bytes in two planes.
TILE_SLAB, TILE_SLABS, TILE_TOKENS, PANEL_TOKENS = 256, 8, 512, 16
PANEL_BYTES = 4 * PANEL_TOKENS * TILE_SLAB
TILE_REGISTERS = 8192 + 64  # bytes, for their emulation, and to configure tiles from
ATTEND_TILES = TILE_REGISTERS + 2048 + 64 * ATTEND_ROWS  # what attention needs besides: also a tile, queries' padding
TILES_SCRATCH = TILE_REGISTERS + TILE_SLABS * 128 * (TILE_SLAB + TILE_TOKENS) + 4096  # slabs, sums, a tile, a row
# The products that `bench` compares prefill with (peak_products.py): sums of 64 bytes, as many as registers hold; the
# memory of a part, for bytes and sums, or for tile registers; products of a round, of bytes and of tiles.
PEAK_CHAINS = 12 if this_lane().has_512_bits else 6
PEAK_BYTES = 16384
PEAK_PRODUCTS, PEAK_TILE_PRODUCTS = 64 * PEAK_CHAINS, 4 * 16 * 16 * 32
# Tokens from which on a product goes in tiles where there are any, by the format of the weights: where the times of
# scripts/measure/measure_lanes.py cross on an Emerald Rapids (4096 x 2048, 2 threads; quantized: 24 to 48, here one
# number).
LEAST_IN_TILES = dict.fromkeys(sorted(PLAIN), 16) | dict.fromkeys(SUB_BLOCK, 32)
SOME_IN_TILES, ALL_IN_TILES = min(LEAST_IN_TILES.values()), max(LEAST_IN_TILES.values())

MODULES = {
    **{name: verb.cpu for name, verb in ROWWISE.items()},
    "run": "tape_runner",
    "work": "tape_runner",
    "embed": "matmul.embed",
    "quantize": "matmul.quantize",
    "linear_quantized": "matmul.matmul_quantized",
    "linear_one": "matmul.matmul_quantized",
    "linear_few": "matmul.matmul_quantized",
    "linear_few_fast": "matmul.matmul_quantized",
    "linear_precise": "matmul.matmul_quantized",
    "linear_fast": "matmul.matmul_quantized",
    "linear_float": "matmul.matmul_float",
    "unpack_groups": "amx.groups",
    "unpack_rows": "amx.rows",
    "pack": "amx.pack",
    "linear_tiles_quantized": "amx.linear",
    "linear_tiles_float": "amx.linear",
    "round_bf16": "elementwise.rowwise",
    "quantize_words": "matmul.gemm_f16_words",
    "attend": "attention.attend",
    "attend_tiles": "amx.attention",
    "merge": "attention.attend",
    "select_keys": "attention.select_keys",
    "select_key_blocks": "attention.select_key_blocks",
    "plan": "attention.plan",
    "store": "attention.cache_store",
    "recall": "attention.cache_recall",
    "hadamard": "elementwise.hadamard",
    "scale_by_position": "elementwise.activations",
    "select": "elementwise.rowwise",
    "replace_ids": "elementwise.rowwise",
    "as_column": "elementwise.hashing",
    "hash": "elementwise.hashing",
    "pool": "elementwise.collect",
    "slice_columns": "elementwise.rowwise",
    "concat_heads": "elementwise.rowwise",
    "angles": "elementwise.rowwise",
    "rope": "elementwise.rowwise",
    "logits": "elementwise.logits",
    "route": "matmul.routing",
    "plan_experts": "matmul.routing",
    "gather": "matmul.experts",
    "scatter": "matmul.experts",
    "from_heads": "matmul.experts",
    "add_by_expert": "matmul.experts",
    "experts_quantized": "matmul.experts",
    "experts_float": "matmul.experts",
    "experts_tiles_quantized": "amx.experts",
    "experts_tiles_float": "amx.experts",
    "stream": "memory_bandwidth",
    "multiply_peak": "peak_products",
    "multiply_peak_tiles": "peak_products",
    "add_squares": "elementwise.collect",
    "add_expert_squares": "elementwise.collect",
    "convolve": "recurrent.convolution",
    "gated_mean": "recurrent.gated_mean",
    "selective_scan": "recurrent.selective_scan",
    "head_scan": "recurrent.head_scan",
    "wkv": "recurrent.wkv",
    "head_dots": "elementwise.heads",
    "mix_streams": "elementwise.heads",
}


def kernel(name: str):
    """Return the kernel of that name; a format follows after a hyphen, as in embed-Q8_0.

    Attention has the format of keys, and that of values if it differs, as in attend-Q8_0-Q4_0.
    """
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cpu.{MODULES[kind]}")
    if not format_name:
        return getattr(module, kind)
    return getattr(module, f"make_{kind}" if hasattr(module, f"make_{kind}") else "make")(format_name)
