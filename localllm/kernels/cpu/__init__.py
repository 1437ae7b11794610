"""CPU kernels: one file per kind, all with the signature in signature.py. This file finds a kernel by its name."""

from importlib import import_module
from math import lcm

from localllm.kernels.arguments import PAGE
from localllm.kernels.target import cpu_features


def register_tiles() -> tuple[tuple[int, int], tuple[int, int]]:
    """Vectors of 16 x tokens, of integers (tiles.py) and of float32 (tiles_f32.py), for the registers of the CPU."""
    if "avx512f" in cpu_features():
        return (2, 6), (2, 12)
    return ((1, 4), (1, 4))


SUB_BLOCK = {  # formats with int8 kernels: the weights that share a scale
    "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "IQ4_NL": 32, "MXFP4": 32, "IQ4_XS": 32,
    "Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16,
    "IQ1_S": 32, "IQ1_M": 16, "IQ2_XXS": 32, "IQ2_XS": 16, "IQ2_S": 16, "IQ3_XXS": 32, "IQ3_S": 32,
    "TQ1_0": 32, "TQ2_0": 32,
}  # fmt: skip
SLAB = 1024  # columns of a tile of weights that are unpacked at a time
LINEAR_SCRATCH = 80 * SLAB  # bytes per thread: codes of 16 + 32 rows, their scales and minimums
INTEGER_TILE, FLOAT_TILE = register_tiles()
TOKENS_AT_ONCE = (4, INTEGER_TILE[1], FLOAT_TILE[1])  # products round the tokens of a run up to one of these
# Rows of an expert are rounded up to this, so that products leave those of the next one alone; one row stays one.
EXPERT_ROWS = lcm(*TOKENS_AT_ONCE)
CALL_BYTES = 256  # of scratch memory: the arguments of the product that an expert needs
# For float weights in large batches: the kernel that makes words of 16 bits of activations, how many columns share
# something, and its bytes. Only where the CPU has instructions that multiply such words.
HALVES = {"BF16": ("round_bf16", 2, 0)} if "avx512bf16" in cpu_features() else {}
HALVES |= {"F16": ("quantize_words", 32, 4)} if {"avx512vnni", "avx512bw"} <= cpu_features() else {}
FLOAT_SLAB = 256  # the same for float weights, as words of 4 bytes
FLOAT_SCRATCH = 4 * 48 * FLOAT_SLAB + 4096
PLAIN = {"F32", "F16", "BF16"}
ATTEND_ROWS, ATTEND_KEYS = 96, PAGE  # of a unit of attention at most, and of a block of keys
MOST_SPLITS, FEW_TOKENS = 16, 16  # a context is split up to so often, for so many tokens of a sequence at most
SPLIT_TOKENS = 64  # tokens of a run whose contexts are split at most: so many slots for partial results there are
GENERIC = {"Q1_0", "Q2_0", "NVFP4"}
# BF16 tiles, on CPUs with AMX (amx_tiles.py): columns of a slab of weights, tokens that meet it once it is unpacked,
# and a panel of tokens, of which a slab's columns take so many bytes in two planes.
TILE_SLAB, TILE_TOKENS, PANEL_TOKENS = 256, 512, 16
PANEL_BYTES = 4 * PANEL_TOKENS * TILE_SLAB
TILE_REGISTERS = 8192 + 64  # bytes, for their emulation, and to configure tiles from
ATTEND_TILES = TILE_REGISTERS + 2048 + 64 * ATTEND_ROWS  # what attention needs besides: also a tile, queries' padding
TILES_SCRATCH = TILE_REGISTERS + 128 * (TILE_SLAB + TILE_TOKENS) + 4096  # a slab, sums, a tile, a row
# Tokens from which on a product goes in tiles where there are any, by the format of the weights. A CPU with AMX has yet
# to say better: scripts/measure_lanes.py suggests these numbers.
LEAST_IN_TILES = dict.fromkeys([*sorted(PLAIN), *sorted(GENERIC), *SUB_BLOCK], 9)
SOME_IN_TILES, ALL_IN_TILES = min(LEAST_IN_TILES.values()), max(LEAST_IN_TILES.values())

MODULES = {
    "run": "runner",
    "work": "runner",
    "embed": "embed",
    "quantize": "quantize",
    "linear_quantized": "linear_quantized",
    "linear_one": "linear_quantized",
    "linear_few": "linear_quantized",
    "linear_few_fast": "linear_quantized",
    "linear_precise": "linear_quantized",
    "linear_fast": "linear_quantized",
    "linear_float": "linear_float",
    "unpack_groups": "amx_groups",
    "unpack_rows": "amx_rows",
    "pack": "amx_pack",
    "linear_tiles_quantized": "amx_linear",
    "linear_tiles_float": "amx_linear",
    "round_bf16": "rowwise",
    "quantize_words": "prefill_words",
    "attend": "attention",
    "attend_tiles": "amx_attention",
    "merge": "attention",
    "plan": "attention_plan",
    "store": "cache_store",
    "recall": "cache_recall",
    "hadamard": "hadamard",
    "rms_norm": "norms",
    "layer_norm": "norms",
    "add": "rowwise",
    "swiglu": "rowwise",
    "geglu": "activations",
    "gelu": "activations",
    "relu_squared": "activations",
    "temper": "activations",
    "clamp": "activations",
    "scale": "activations",
    "softcap": "activations",
    "select": "rowwise",
    "columns": "rowwise",
    "join": "rowwise",
    "angles": "rowwise",
    "rope": "rowwise",
    "logits": "logits",
    "route": "routing",
    "plan_experts": "routing",
    "gather": "experts",
    "scatter": "experts",
    "collect": "experts",
    "add_by_expert": "experts",
    "experts_quantized": "experts",
    "experts_float": "experts",
    "experts_tiles_quantized": "amx_experts",
    "experts_tiles_float": "amx_experts",
    "sigmoid_gate": "activations",
    "swiglu_limited": "activations",
    "stream": "stream",
    "add_squares": "collect",
    "multiply": "gates",
    "sigmoid": "gates",
    "softplus": "gates",
    "convolve": "convolution",
    "selective_scan": "selective_scan",
    "head_scan": "head_scan",
}


def kernel(name: str):
    """The kernel of that name; after a hyphen stands the format that it is made for, as in embed-Q8_0; of
    attention those of keys and of values, if they differ, as in attend-Q8_0-Q4_0."""
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cpu.{MODULES[kind]}")
    if not format_name:
        return getattr(module, kind)
    return getattr(module, f"make_{kind}" if hasattr(module, f"make_{kind}") else "make")(format_name)
