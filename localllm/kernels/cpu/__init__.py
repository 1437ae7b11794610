"""CPU kernels: one file per kind, all with the signature in signature.py. This file finds a kernel by its name."""

from importlib import import_module

SUB_BLOCK = {  # formats with int8 kernels: the weights that share a scale
    "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "IQ4_NL": 32, "MXFP4": 32, "IQ4_XS": 32,
    "Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16,
}  # fmt: skip
SLAB = 1024  # columns of a tile of weights that are unpacked at a time
LINEAR_SCRATCH = 80 * SLAB  # bytes per thread: codes of 16 + 32 rows, their scales and minimums
PLAIN = {"F32", "F16", "BF16"}
GENERIC = {
    "Q1_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4",
}  # fmt: skip

MODULES = {
    "run": "runner",
    "work": "runner",
    "embed": "embed",
    "quantize": "quantize",
    "linear_quantized": "linear_quantized",
    "linear_float": "linear_float",
    "attend": "attention",
    "merge": "attention",
    "store": "cache_store",
    "rms_norm": "rowwise",
    "add": "rowwise",
    "swiglu": "rowwise",
    "select": "rowwise",
    "angles": "rowwise",
    "rope": "rowwise",
    "stream": "stream",
}


def kernel(name: str):
    """The compiled kernel of that name; after a hyphen stands the format that it is made for, as in embed-Q8_0."""
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cpu.{MODULES[kind]}")
    return module.make(format_name) if format_name else getattr(module, kind)
