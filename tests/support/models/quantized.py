"""Models in all block formats: valid blocks of random codes, whose scales make them spread like other weights."""

import sys
from functools import cache
from pathlib import Path

import numpy as np

from localllm.files.gguf.file import Tensor
from localllm.kernels.reference import dequantize
from localllm.quant.formats import BY_NAME, Format, list_float_offsets

from .declaration import Model
from .numbers import Numbers

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "measure"))
from synthetic_blocks import mend_codes, set_scales

PURE = [
    "F16", "BF16", "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0",
    "TQ2_0",
]  # fmt: skip
MIXES = {  # what a part of a tensor's name makes of it; "" is any other
    "Q3_K_M": {"attn_v": "Q5_K", "ffn_down": "Q4_K", "output.": "Q6_K", "": "Q3_K"},
    "Q4_K_M": {"attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "output.": "Q6_K", "token_embd": "Q5_0", "": "Q4_K"},
    "Q5_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "": "Q5_K"},
    "MXFP4_MOE": {"_exps": "MXFP4", "": "Q8_0"},
}
QUANTIZED = {f"llama-{name}": ("llama", name) for name in [*PURE, "Q3_K_M", "Q4_K_M", "Q5_K_M"]}
QUANTIZED |= {f"{base}-{name}": (base, name) for base, name in [
    ("deepseek2_v3", "Q8_0"), ("gemma2", "F16"), ("gemma3", "Q5_1"), ("gpt_oss", "MXFP4_MOE"), ("gpt_oss", "Q8_0"),
    ("lfm2moe", "Q5_0"), ("llama_moe", "Q4_0"), ("mamba2", "Q8_0"), ("phi3", "Q4_1"), ("qwen2", "BF16"),
    ("qwen35", "Q8_0"), ("qwen3moe", "IQ4_NL"), ("apertus", "Q5_1"), ("chatglm", "Q4_0"), ("granite_swa_moe", "Q8_0"),
    ("hunyuan", "Q8_0"), ("laguna", "Q4_1"), ("qwen3vl", "BF16"), ("phimoe", "Q4_0"), ("grovemoe", "Q5_1"),
    ("hy_v3", "Q8_0"), ("hrm_text", "Q5_0"), ("dots1", "IQ4_NL"), ("bailingmoe3", "Q8_0"), ("deepseek32", "Q8_0"),
    ("glm4moe", "Q4_1"), ("kimi_k3", "Q8_0"), ("graniteswitch", "Q8_0"), ("minimax_m3", "Q8_0"), ("glm5_next", "Q5_1"),
    ("qwen4exp", "Q8_0"), ("deepseek4", "Q8_0"),
]}  # fmt: skip
PLAIN = (
    "norm",
    "ffn_gate_inp",
    "conv",
    "ssm_a",
    "ssm_d",
    "ssm_alpha",
    "ssm_beta",
    "rope_",
    "position_embd",
    ".bias",
    "hc_",
    "indexer_compressor",
)


def format_of(name: str, quantization: str) -> Format:
    rules = MIXES.get(quantization, {"": quantization})
    return BY_NAME[next(format for part, format in rules.items() if part in name)]


def in_blocks(model: Model, name: str, quantization: str, seed: int = 0) -> Model:
    """Return the model with matrices of random blocks; rows that are not whole blocks stay float32."""
    tensors, formats = dict(model.tensors), dict(model.formats)
    for tensor, values in model.tensors.items():
        format = format_of(tensor, quantization)
        if (
            tensor not in formats
            and values.ndim > 1
            and values.shape[-1] % format.block == 0
            and not any(part in tensor for part in PLAIN)
        ):
            tensors[tensor] = matrix(Numbers(seed, name, tensor, quantization), format, values)
            formats[tensor] = format.name
    return Model(model.arch, model.metadata, tensors, formats)


def matrix(numbers: Numbers, format: Format, values: np.ndarray) -> np.ndarray:
    """Other numbers that spread as these do, in a format: uint8 [..., bytes of a row]."""
    if format.name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if format.name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    count = values.size // format.block
    scale = float(f"{values.std():.2g}") / deviation_of_scale_one(format)
    return blocks(numbers, format, count, scale).reshape(*values.shape[:-1], -1)


def blocks(numbers: Numbers, format: Format, count: int, scale: float) -> np.ndarray:
    """uint8 [count, bytes of a block], with scales that differ by up to a quarter."""
    found = numbers.raw(count * format.bytes).reshape(count, format.bytes)
    mend_codes(format, found)
    scales = numbers.uniform((count,), 0.75 * scale, 1.25 * scale)
    if len(list_float_offsets(format.name)) == 1:  # codes like Q4_0's -8 to 7 need scales of both signs for a mean of 0
        scales *= numbers.signs((count,))
    set_scales(format, found, scales)
    return found


@cache
def deviation_of_scale_one(format: Format) -> float:
    """Return the weights' deviation at scale 1, rounded, because sums depend on the CPU's order of adding."""
    data = blocks(Numbers("deviation", format.name), format, 1024, 1.0)
    return float(f"{dequantize(Tensor('', format, (1024, format.block), data)).std():.2g}")


def exact(model: Model) -> Model:
    """Return the same weights in float32."""
    tensors, whole = dict(model.tensors), {name: "I32" for name, format in model.formats.items() if format == "I32"}
    for name, format in model.formats.items():
        if name in whole:
            continue
        data = tensors[name]
        shape = *data.shape[:-1], data.shape[-1] // BY_NAME[format].bytes * BY_NAME[format].block
        tensors[name] = dequantize(Tensor(name, BY_NAME[format], shape, data))
    return Model(model.arch, model.metadata, tensors, whole)
