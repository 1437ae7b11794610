"""CPU kernels: one file per kind, all with the signature in signature.py. This file finds a kernel by its name."""

from importlib import import_module

SUB_BLOCK = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "Q4_K": 32,
    "Q5_K": 32,
    "Q6_K": 16,
}  # int8 kernels
PLAIN = {"F32", "F16", "BF16"}
GENERIC = {
    "Q1_0", "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
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
}


def kernel(name: str):
    """The compiled kernel of that name; after a hyphen stands the format that it is made for, as in embed-Q8_0."""
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.cpu.{MODULES[kind]}")
    return module.make(format_name) if format_name else getattr(module, kind)
