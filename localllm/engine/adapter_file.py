"""Read LoRA adapters and control vectors from GGUF files as llama.cpp writes them.

A LoRA file has general.type "adapter", adapter.type "lora", adapter.lora.alpha, and for each matrix NAME.lora_a and
NAME.lora_b. An activated one also has adapter.alora.invocation_tokens. A control vector's file has general.architecture
"controlvector" and a vector direction.N for some layers.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.engine.adapters import Adapter, LowRankMatrices
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.kinds import ADAPTER, CONTROL_VECTOR, get_kind
from localllm.kernels.reference import dequantize

ALPHA, TYPE = "adapter.lora.alpha", "general.type"
NEEDED = (TYPE, "general.architecture", "adapter.type", ALPHA, "general.name")
INVOCATION = "adapter.alora.invocation_tokens"
SUFFIXES = (".lora_a", ".lora_b")


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read a LoRA file. Raises ModelError that names the file and the tensor."""
    with GGUFFile.open(path, NEEDED) as file:
        adapter = parse_adapter(file)
        require_finite(adapter.path, adapter.low_ranks)
        return replace(adapter, digest=compute_digest(adapter.low_ranks))


def parse_adapter(file: GGUFFile) -> Adapter:
    """Return the adapter in an open file, without its digest. Raises ModelError."""
    require_kind(file)
    alpha = file.metadata.get(ALPHA, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ModelError(f"{file.path}: {ALPHA} must be a number (found {printable(repr(alpha))})")
    low_ranks = pair_matrices(file.path, file.tensors, float(alpha))
    arch = file.metadata.get("general.architecture")
    invocation = file.metadata.get(INVOCATION, ())
    ids = tuple(int(id) for id in invocation) if isinstance(invocation, np.ndarray) else ()
    return Adapter(file.path, PurePath(file.path).name.removesuffix(".gguf"), low_ranks, str(arch or ""), ids)


def require_kind(file: GGUFFile) -> None:
    """Raise ModelError unless a file is a LoRA adapter."""
    kind, type = get_kind(file.metadata), file.metadata.get("adapter.type")
    if kind != ADAPTER:
        what = "a control vector: use --control-vector" if kind == CONTROL_VECTOR else "no adapter"
        raise ModelError(f"{file.path}: this is {what} (general.type is {printable(repr(file.metadata.get(TYPE)))})")
    if not isinstance(type, str) or type != "lora":
        raise ModelError(f"{file.path}: adapter.type must be lora (found {printable(repr(type))})")


def pair_matrices(path: str, tensors: Mapping[str, Tensor], alpha: float) -> dict[str, LowRankMatrices]:
    """Pair the matrices A and B by the name of the model's tensor. Raises ModelError if one is missing."""
    low_ranks = dict[str, LowRankMatrices]()
    for name in tensors:
        base = name.removesuffix(".lora_a").removesuffix(".lora_b")
        if base == name:
            raise ModelError(f"{path}: tensor {printable(name)} is not part of a LoRA adapter")
        missing = [base + suffix for suffix in SUFFIXES if base + suffix not in tensors]
        if missing:
            raise ModelError(f"{path}: has {printable(name)}, but not {printable(missing[0])}")
        a, b = (tensors[base + suffix] for suffix in SUFFIXES)
        if not 2 <= len(b.shape) == len(a.shape) <= 3 or not b.shape[-1]:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ModelError(f"{path}: the matrices for {printable(base)} must be pairs (found the shapes {shapes})")
        low_ranks[base] = LowRankMatrices(a, b, alpha / b.shape[-1] if alpha else 1.0)
    if not low_ranks:
        raise ModelError(f"{path}: the file must have at least one pair of matrices")
    return low_ranks


def require_finite(path: str, low_ranks: Mapping[str, LowRankMatrices]) -> None:
    """Raise ModelError if an element of a matrix is infinite or NaN."""
    for each in low_ranks.values():
        for tensor in (each.a, each.b):
            if not np.isfinite(dequantize(tensor)).all():
                raise ModelError(f"{path}: tensor {printable(tensor.name)} has elements that are not finite")


def compute_digest(low_ranks: Mapping[str, LowRankMatrices]) -> str:
    """Hash all matrices with their names and factors."""
    key = hashlib.blake2b(digest_size=16)
    for name, each in sorted(low_ranks.items()):
        key.update(f"{name} {each.a.format.name} {each.b.format.name} {each.a.shape} {each.factor} ".encode())
        key.update(each.a.data.tobytes())
        key.update(each.b.data.tobytes())
        if each.magnitude:
            key.update(each.magnitude.values.tobytes())
    return key.hexdigest()


def read_control_vector(path: str | os.PathLike[str], width: int, layers: int) -> dict[int, np.ndarray]:
    """Read a control vector: float32 [width] by the layer to whose output it is added.

    Raises ModelError if the file is invalid or for another model.
    """
    with GGUFFile.open(path, NEEDED) as file:
        directions = parse_control_vector(file)
        for layer, direction in directions.items():
            if layer >= layers:
                raise ModelError(f"{path}: tensor direction.{layer} is not direction.N of one of {layers} layers")
            if len(direction) != width:
                found = f"F32 [{len(direction)}]"
                raise ModelError(f"{path}: tensor direction.{layer} must be F32 [{width}] (found {found})")
        return directions


def parse_control_vector(file: GGUFFile) -> dict[int, np.ndarray]:
    """Return the vectors in an open file, float32 [width] by layer. Raises ModelError."""
    if get_kind(file.metadata) != CONTROL_VECTOR:
        raise ModelError(f"{file.path}: the file must be a control vector: general.architecture must be controlvector")
    directions = dict[int, np.ndarray]()
    for name, tensor in file.tensors.items():
        prefix, _, number = name.partition(".")
        if prefix != "direction" or not number.isdecimal() or not 0 < int(number) < 1 << 16:
            raise ModelError(f"{file.path}: tensor {printable(name)} is not direction.N of a layer from 1 on")
        if tensor.format.name != "F32" or len(tensor.shape) != 1:
            found = f"{tensor.format.name} {list(tensor.shape)}"
            raise ModelError(f"{file.path}: tensor {printable(name)} must be a vector of F32 (found {found})")
        directions[int(number)] = np.array(tensor.data.reshape(-1).view(np.float32))
    if not directions:
        raise ModelError(f"{file.path}: the file must have at least one vector direction.N")
    return directions


def sum_control_vectors(
    files: Sequence[tuple[str, float]], layers: tuple[int, int] | None, h: Hyperparameters
) -> dict[int, np.ndarray]:
    """Return the sum of scaled control vectors, float32 [width] by layer.

    layers: the first and the last layer to keep; None for all. Raises ModelError, and UsageError for layers that the
    model does not have.
    """
    first, last = layers or (1, h.layers - 1)
    if not 1 <= first <= last:
        raise UsageError(f"the layers of control vectors must be from 1 to {h.layers - 1} (found {first} to {last})")
    total = dict[int, np.ndarray]()
    for path, scale in files:
        for layer, vector in read_control_vector(path, h.width, h.layers).items():
            if first <= layer <= last:
                total[layer] = total.get(layer, np.float32(0)) + np.float32(scale) * vector
    return total
