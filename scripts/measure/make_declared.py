"""Write a model declared in tests/support/models at a realistic size, with random blocks, to measure its speed.

    python scripts/measure make-declared falcon_h1 model.gguf [--format Q4_K_M]

Matrices whose rows are no multiple of the format's block are Q8_0 or F32. Measure it with
`scripts/measure peers`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from models import DECLARATIONS, Model, write
from models.declaration import dims_of, fields, shapes, values_of
from models.numbers import Numbers
from models.quantized import PLAIN, format_of
from synthetic_blocks import random_matrix

from localllm.quant.formats import BY_NAME, Format

SMALL: dict[str, Any] = {"vocab": 32768, "context": 8192, "epsilon": 1e-5}
MAMBA2 = {"state": 128, "rank": 48, "groups": 1, "inner": 3072}
# About a billion weights; of mixtures of experts, half a billion that a token meets.
SHAPES: dict[str, dict[str, Any]] = {
    "falcon_h1_raw": {**MAMBA2, "layers": 24, "width": 2048, "heads": 8, "kv_heads": 2, "head_dim": 128,
                      "hidden": 4096},
    "granitehybrid": {**MAMBA2, "layers": 30, "width": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128,
                      "hidden": 4096},
    "nemotron_h": {**MAMBA2, "layers": 32, "width": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "hidden": 8192,
                   "groups": 8},
    "rwkv7": {"layers": 24, "width": 2048, "kv": 32, "hidden": 8192, "rank": 96, "rank2": 96, "rank3": 64,
              "gate_rank": 256},
    "gemma3n": {"layers": 24, "width": 1536, "heads": 8, "kv_heads": 2, "head_dim": 256, "hidden": 6144},
    "glm4moe": {"layers": 12, "width": 1024, "heads": 16, "kv_heads": 4, "head_dim": 128, "rotated": 64,
                "hidden": 4096, "experts": 16, "used": 4, "expert_hidden": 1024, "shared_hidden": 1024},
    "minimax_m2": {"layers": 12, "width": 1024, "heads": 16, "kv_heads": 4, "head_dim": 128, "rotated": 64,
                   "hidden": 1024, "experts": 16, "used": 4, "expert_hidden": 1024},
}  # fmt: skip


def made(name: str, quantization: str) -> Model:
    """Return the enlarged model."""
    declaration, random = DECLARATIONS[name], np.random.default_rng(0)
    own = {**SMALL, **SHAPES[name]}
    d = dims_of(declaration, **own)
    tensors, formats = {}, {}
    for tensor, shape in shapes(declaration, d).items():
        if format := fitting(tensor, shape, quantization):
            pieces = random_matrix(format, int(np.prod(shape[:-1])), shape[-1], random)
            tensors[tensor] = np.concatenate([*pieces]).reshape(*shape[:-1], -1)
            formats[tensor] = format.name
        else:
            kind = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
            values = declaration.values.get(kind) or values_of(tensor, False)
            tensors[tensor] = values(Numbers(0, name, tensor), shape)
    metadata = fields(declaration, d, {**declaration.dims, **own})
    return Model(declaration.arch, {"general.architecture": declaration.arch, **metadata}, tensors, formats)


def fitting(tensor: str, shape: tuple[int, ...], quantization: str) -> Format | None:
    """Return the format of a matrix; None for F32."""
    if len(shape) < 2 or any(part in tensor for part in (*PLAIN, "lerp", "time_mix_w", "time_mix_a", "time_mix_v1")):
        return None
    wanted = format_of(tensor, quantization)
    choices = (wanted, BY_NAME["Q8_0"])
    return next((format for format in choices if shape[-1] % format.block == 0), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--format", default="Q4_K_M")
    options = parser.parse_args()
    write(made(options.name, options.format), options.path)
