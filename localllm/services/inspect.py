"""Describe a model file without running it: Implements `localllm inspect`."""

import math
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from localllm.arch import architecture
from localllm.arch.attention import Transformer
from localllm.arch.family import DraftingFamily
from localllm.arch.hyperparameters import RANK, Hyperparameters
from localllm.arch.kv_cache_types import KVType
from localllm.arch.layer_state import cache_bytes
from localllm.arch.metadata import Fields
from localllm.arch.mtp import has_guessing_layer
from localllm.arch.pooling import NONE, read_pooling
from localllm.arch.vision.hyperparameters import Vision
from localllm.arch.weights import Weights
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata_reader import number_of_strings
from localllm.files.gguf.projectors import find_projector
from localllm.generation.sampling.options import read_recommended
from localllm.services.quantization_info import describe_quantization
from localllm.services.validate import Validity, check_validity, require_numbers

NAMES = {"mean": "mean of all tokens", "cls": "first token", "last": "last token"}
SHORTEST = 2048  # tokens: where the table of memory needs begins


def inspect_model(path: str | os.PathLike[str], check: bool = False, with_metadata: bool = False) -> dict[str, Any]:
    """Describe a GGUF file for JSON; None for unknown facts. Sizes are in bytes.

    Works for any readable file: `supported` says whether localllm can run it, `reason` why not, and `valid` is false
    if that is the file's fault. With `check` every weight is read and the chat template compiled, `with_metadata` adds
    all metadata. Raises ModelError for an unreadable file.
    """
    with GGUFFile.open(path, needed=()) as file:
        found = check_validity(file)
        if check and found.is_valid:
            found = check_thoroughly(file, found)
        h, reason, metadata = found.hyperparameters, reason_of(file, found), file.metadata
        sized = h or found.vision
        return {
            "path": file.path,
            "name": text(metadata.get("general.name")),
            "architecture": text(metadata.get("general.architecture")) or "unknown",
            "supported": reason is None,
            "reason": reason,
            "valid": found.is_valid,
            "warnings": file.oddities.lines() if found.is_valid else [],
            "parameters": file.parameters,
            "weight_bytes": file.nbytes,
            "bits_per_weight": 8 * file.nbytes / file.parameters if file.parameters else 0.0,
            "layers": sized and sized.layers,
            "width": sized and sized.width,
            "heads": count_heads(h, "heads"),
            "kv_heads": count_heads(h, "kv_heads"),
            "context": h and h.context,
            "vocabulary": vocabulary(metadata),
            "reads": describe_reader(file, h),
            "sees": describe_projector(found.vision),
            "projector": describe_projector_of(file.path) if h else None,
            "guessing": describe_mtp(file, h),
            "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
            "sampling": read_recommended(metadata)[0].explicit,
            "made_with": describe_quantization(metadata),
            "formats": formats(file),
            "memory": memory(h, file.nbytes, KVType()) if h and not is_reader(h) else [],
            **({"metadata": {key: to_json(metadata[key]) for key in metadata}} if with_metadata else {}),
            "tensors": [
                {"name": t.name, "format": t.format.name, "shape": list(t.shape), "bytes": t.nbytes}
                for t in file.tensors.values()
            ],
        }


def to_json(value: Any) -> Any:
    """Convert metadata for JSON; NaN and infinity become strings."""
    if isinstance(value, np.ndarray | list | tuple):
        return [to_json(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_thoroughly(file: GGUFFile, found: Validity) -> Validity:
    """Check the weights and the template, too."""
    try:
        require_numbers(file)
        require_template(file)
    except ModelError as error:
        return Validity(found.hyperparameters, error)
    return found


def require_template(file: GGUFFile) -> None:
    """Raise ModelError for a chat template that does not compile."""
    if isinstance(source := file.metadata.get("tokenizer.chat_template"), str):
        from localllm.text.templates import ChatTemplate  # seldom needed, and slow to import

        ChatTemplate(source)


def reason_of(file: GGUFFile, found: Validity) -> str | None:
    """Return why a file cannot run, None if it can."""
    if found.problem:
        return str(found.problem).removeprefix(f"{file.path}: ")
    return None if file.tensors else "the file only contains a vocabulary"


def count_heads(h: Hyperparameters | None, name: str) -> int | None:
    """Return the largest number of heads of a layer, None for models without attention."""
    return max(getattr(h.attention, name)) if isinstance(h, Transformer) else None


def is_reader(h: Hyperparameters) -> bool:
    """Return whether a model only makes embeddings or scores."""
    return h.bidirectional and not h.fills


def describe_reader(file: GGUFFile, h: Hyperparameters | None) -> str | None:
    """Describe the output for whole texts, for example "scores"; None if there is none."""
    if h is None:
        return None
    kind = h.pooling if is_reader(h) else read_pooling(Fields.of(file))
    return None if kind in (None, NONE) else "scores" if kind == RANK else f"vectors by the {NAMES[kind]}"


def describe_projector(vision: Vision | None) -> dict[str, Any] | None:
    """Describe a projector: its output rows, and the largest image's; None for other files."""
    if vision is None:
        return None
    return {"type": vision.kind, "side": vision.side, "patch": vision.patch, "width": vision.out}


def describe_projector_of(path: str) -> dict[str, Any] | None:
    """Describe a model's projector, if there is one."""
    try:
        found = find_projector(path)
        return {"path": found, "bytes": os.stat(found).st_size}
    except (UsageError, OSError):
        return None


def describe_mtp(file: GGUFFile, h: Hyperparameters | None) -> dict[str, Any]:
    """Describe the multi-token prediction layers: number, bytes, and whether the first is used."""
    weights = Weights(file.tensors)
    blocks = [weights.block(layer).all() for layer in range(h.layers, h.layers + h.guessing)] if h else []
    there = [[weight.tensor for weight in block] for block in blocks if block]
    has_layer = bool(there) and h is not None and has_guessing_layer(weights, h)
    is_used = has_layer and isinstance(architecture(file)[0], DraftingFamily)
    return {"layers": len(there), "bytes": sum(one.nbytes for block in there for one in block), "used": is_used}


def vocabulary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the tokenizer and its number of tokens."""
    kinds = [text(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    return {
        "size": number_of_strings(metadata, "tokenizer.ggml.tokens") or 0,
        "kind": ", ".join(kind for kind in kinds if kind),
    }


def formats(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Count tensors, weights and bytes by format, largest first."""
    found: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        row = found.setdefault(tensor.format.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def memory(h: Hyperparameters, weight_bytes: int, kv_type: KVType, context: int | None = None) -> list[dict[str, int]]:
    """List the memory for weights and KV cache by context length.

    Lengths double up to the model's context; context: the only one.
    """
    lengths = [context] if context else [SHORTEST << n for n in range(24) if SHORTEST << n < h.context] + [h.context]
    caches = [(n, cache_bytes(h.states(), n, kv_type)) for n in lengths]
    return [{"context": n, "cache_bytes": cache, "total_bytes": weight_bytes + cache} for n, cache in caches]


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
