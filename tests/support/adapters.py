"""Random low-rank adapters for tests, and the same model with them merged."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from localllm.arch import load_architecture
from localllm.engine.adapter_file import compute_digest
from localllm.engine.adapters import Adapter, LowRankMatrices
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.writer import OutputTensor, build_header
from localllm.kernels.reference import dequantize
from localllm.quant.formats import BY_NAME

# Families, and the first and the last layer that a control vector changes, for llama.cpp's logits.
CONTROL_CASES = [("llama", 1, 1), ("gemma3", 1, 6), ("gemma3", 2, 2), ("gemma3", 6, 6), ("mamba2", 1, 1)]
CONTROL_IDS = [5, 17, 99, 3, 200, 41, 7]
FLOATS = {"F32": np.float32, "F16": np.float16}


def float_tensor(name: str, numbers: np.ndarray, format: str = "F32") -> Tensor:
    data = np.ascontiguousarray(numbers, FLOATS[format])
    return Tensor(name, BY_NAME[format], data.shape, data.view(np.uint8))


def random_low_rank(
    name: str, shape: tuple[int, ...], rank: int, rng: np.random.Generator, format: str
) -> LowRankMatrices:
    *stack, rows, columns = shape
    is_embedding = name == "token_embd.weight"
    a_shape, b_shape = (*stack, rank, columns), (*stack, rows, rank)
    if is_embedding:
        a_shape, b_shape = (rows, rank), (columns, rank)
    a, b = (0.3 * rng.standard_normal(shape) / rank**0.5 for shape in (a_shape, b_shape))
    return LowRankMatrices(float_tensor(f"{name}.lora_a", a, format), float_tensor(f"{name}.lora_b", b, format), 0.75)


def random_adapter(
    file: GGUFFile, names: Collection[str], rank: int = 4, seed: int = 0, format: str = "F32", name: str = "style"
) -> Adapter:
    rng = np.random.default_rng(seed)
    low_ranks = {each: random_low_rank(each, file.tensors[each].shape, rank, rng, format) for each in names}
    return Adapter(f"{name}.gguf", name, low_ranks, digest=compute_digest(low_ranks))


def supported_names(file: GGUFFile) -> list[str]:
    """Return the names of the matrices that an architecture accepts adapters for.

    Without that of an embedding that is also the output matrix: an adapter changes one of them only.
    """
    names = [name for name, tensor in file.tensors.items() if len(tensor.shape) in (2, 3) and min(tensor.shape) > 1]
    if not {"token_embd.weight", "output.weight"} <= file.tensors.keys():
        names = [name for name in names if name not in ("token_embd.weight", "output.weight")]
    while names:
        try:
            Engine(file, EngineOptions(1, backend="reference", lora=((random_adapter(file, names), 1.0),))).close()
        except UnsupportedError as error:
            names = [name for name in names if name not in str(error)]
        else:
            return names
    return names


def merge(file: GGUFFile, adapter: Adapter, scale: float) -> dict[str, Tensor]:
    """Return the model's tensors with scale * factor * B A added to its matrices, in float32."""
    merged = dict(file.tensors)
    for name, each in adapter.low_ranks.items():
        a, b = (dequantize(tensor).astype(np.float64) for tensor in (each.a, each.b))
        product = a @ b.T if name == "token_embd.weight" else b @ a
        numbers = dequantize(merged[name]) + scale * each.factor * product
        merged[name] = float_tensor(name, numbers)
    return merged


def write_adapter(adapter: Adapter, path: Path, alpha: float, **metadata: object) -> Path:
    """Write an adapter as llama.cpp does; metadata replaces the usual values, None leaves one out."""
    about = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    about |= {"adapter.lora.alpha": alpha, **metadata}
    tensors = [tensor for each in adapter.low_ranks.values() for tensor in (each.a, each.b)]
    entries = [OutputTensor(tensor.name, tensor.format, tensor.shape) for tensor in tensors]
    header = build_header({key: value for key, value in about.items() if value is not None}, entries)
    chunks = [header]
    for tensor in tensors:
        data = tensor.data.tobytes()
        chunks.append(data + b"\0" * (-len(data) % 32))
    path.write_bytes(b"".join(chunks))
    return path


def random_directions(file: GGUFFile) -> np.ndarray:
    """Return a control vector of all layers from 1 on, float32 [layers - 1, width]."""
    h = load_architecture(file)[1]
    return np.random.default_rng(0).standard_normal((h.layers - 1, h.width)).astype(np.float32)
