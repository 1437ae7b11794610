"""Models for the tests of `quantize`."""

from pathlib import Path

import gguf
import numpy as np

from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.kernels.dequantize_rows import can_dequantize
from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quantizing.plan import COPY, QuantizeRequest, make_plan
from localllm.quantizing.quantize import open_source, quantize_model

MADE = {
    "general.architecture": "made",
    "general.file_type": 0,
    "general.name": "Test",
    "made.block_count": 2,
    "made.attention.head_count": 4,
    "made.attention.head_count_kv": 2,
    "made.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "hybriddna",
    "tokenizer.ggml.tokens": ["a", b"\xff", "c"],
}


SHAPES = {
    "token_embd.weight": (40, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_v.weight": (64, 256),
    "blk.0.ffn_down.weight": (256, 512),
    "blk.0.ffn_up.weight": (96, 320),
    "blk.1.attn_v.weight": (64, 256),
    "blk.1.ffn_gate_exps.weight": (3, 8, 256),
    "blk.1.attn_q.bias": (64,),
    "output.weight": (40, 256),
}


def arrays(dtype=np.float32) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    weights = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {name: array.astype(dtype) if array.ndim > 1 else array for name, array in weights.items()}


def write_model(path: Path, weights: dict[str, np.ndarray] | None = None, **metadata) -> Path:
    weights = arrays() if weights is None else weights
    write_gguf(path, MADE | metadata, [OutputTensor.from_array(name, array) for name, array in weights.items()])
    return path


def quantized(path: Path, target: Path, recipe: str, threads: int = 2, **request) -> GGUFFile:
    """Quantize a file and open the result."""
    request_of_run = QuantizeRequest(COPY if recipe == "COPY" else RECIPES[recipe], **request)
    quantize_model(
        make_plan(open_source(str(path)), request_of_run), str(target), request_of_run, threads, lambda done, name: None
    )
    return GGUFFile.open(target)


def values(file: GGUFFile) -> dict[str, np.ndarray]:
    """Dequantize all weights by the gguf package."""
    return {
        name: gguf.dequantize(np.asarray(t.data), gguf.GGMLQuantizationType(t.format.id)).reshape(t.shape)
        for name, t in file.tensors.items()
    }


QUICK = ("F32", "F16", "BF16", "Q8_0")  # kernels for all formats take a while to compile


UNKNOWN = ("NVFP4", "Q1_0", "Q2_0")  # to `gguf` 0.19


REST = sorted(name for name, format in BY_NAME.items() if can_dequantize(format) and name not in (*QUICK, *UNKNOWN))


def write_imatrix(path: Path, sums: dict[str, np.ndarray]) -> str:
    tensors = [
        OutputTensor.from_array(f"{name}.in_sum2", np.asarray(array, np.float32)) for name, array in sums.items()
    ]
    tensors += [
        OutputTensor.from_array(f"{name}.counts", np.ones((len(array), 1), np.float32)) for name, array in sums.items()
    ]
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": ["text"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    write_gguf(path, keys, tensors)
    return str(path)
