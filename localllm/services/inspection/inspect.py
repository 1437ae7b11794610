"""Describe a model file without running it. Implements `localllm inspect`."""

import math
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypedDict

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.decoder import NONE, has_mtp_layer, read_pooling
from localllm.arch.family import DraftingFamily
from localllm.arch.hyperparameters import RANK, Hyperparameters
from localllm.arch.layer_state import KVType, count_cache_bytes
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.vision.hyperparameters import VisionHyperparameters
from localllm.arch.weights import TABLES, Weights, count_table_bytes
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.metadata_reader import count_strings
from localllm.files.models_folder import find_projector
from localllm.frozen import frozen
from localllm.generation.sampling.sampler import read_recommended
from localllm.services.inspection.adapters import describe_adapter
from localllm.services.inspection.validate import ValidationResult, check_validity, require_finite_weights

NAMES = {"mean": "mean of all tokens", "cls": "first token", "last": "last token"}
MIN_CONTEXT = 2048  # tokens of the shortest context in the memory table
# Keys of a file's metadata that record how it was quantized.
TEXTS, TOKENS, VERSION = "localllm.quantize.texts", "localllm.quantize.tokens", "localllm.quantize.version"
SCALED = "localllm.quantize.scaled"
DEFAULT_MIXTURE = "localllm's mixture"  # name of the default calibration texts


class ProjectorFile(TypedDict):
    """A vision projector next to a model; bytes: its size."""

    path: str
    bytes: int


class MemoryRow(TypedDict):
    """Memory for a context length, in bytes."""

    context: int
    cache_bytes: int
    total_bytes: int


@frozen
class MatrixCosts:
    """Costs of a model's matrix products; norms and attention are not counted."""

    weight_bytes: int  # bytes read to decode one token
    per_token: int  # multiply-adds of all matrices except the output matrix
    per_logits: int  # multiply-adds of the output matrix, for a token whose logits are computed
    expert_bytes: int = 0  # of weight_bytes, those of experts
    all_expert_bytes: int = 0  # size of all experts
    table_bytes: int = 0  # size of the tables of which only single rows are read

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], experts_used: int = 0) -> "MatrixCosts":
        """Sum the costs of tensors; experts_used: experts per token. Raises ModelError.

        Of tables of embeddings only one row is read, so they are not counted unless they are the output matrix too.
        """
        weights = Weights(tensors)
        output = (weights.get("output") or weights.token_embd).tensor
        ends = {*TABLES, output.name}
        experts = [tensor for tensor in tensors.values() if "_exps." in tensor.name and len(tensor.shape) == 3]
        matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1 and tensor.name not in ends]
        layers = [tensor for tensor in matrices if tensor not in experts]
        expert_bytes = sum(tensor.nbytes // tensor.shape[0] * experts_used for tensor in experts)
        return cls(
            output.nbytes + sum(tensor.nbytes for tensor in layers) + expert_bytes,
            sum(prod(tensor.shape) for tensor in layers)
            + sum(prod(tensor.shape[1:]) * experts_used for tensor in experts),
            prod(output.shape),
            expert_bytes,
            sum(tensor.nbytes for tensor in experts),
            count_table_bytes(tensors),
        )

    @classmethod
    def from_file(cls, file: GGUFFile) -> "MatrixCosts":
        """Sum the costs of a model file. Raises ModelError."""
        arch = file.metadata.get("general.architecture")
        used_experts = file.metadata.get(f"{arch}.expert_used_count", 0)
        return cls.from_tensors(file.tensors, used_experts if isinstance(used_experts, int) else 0)


def inspect_model(path: str | os.PathLike[str], check: bool = False, with_metadata: bool = False) -> dict[str, Any]:
    """Describe a GGUF file for JSON; unknown facts are None. Sizes are in bytes.

    Works for any readable file: `supported` says whether localllm can run it, `reason` why not; `valid` is False if the
    file is damaged. check: also read every weight and compile the chat template.  with_metadata: add all metadata.
    Raises ModelError for an unreadable file.
    """
    with GGUFFile.open(path, needed=()) as file:
        validity = check_validity(file)
        if check and validity.is_valid:
            validity = check_thoroughly(file, validity)
        h, reason, metadata = validity.hyperparameters, describe_problem(file, validity), file.metadata
        sized = h or validity.vision
        return {
            "path": file.path,
            "name": as_string(metadata.get("general.name")),
            "architecture": as_string(metadata.get("general.architecture")) or "unknown",
            "supported": reason is None,
            "reason": reason,
            "valid": validity.is_valid,
            "warnings": file.oddities.format_lines() if validity.is_valid else [],
            "parameters": file.parameters,
            "weight_bytes": file.nbytes,
            "bits_per_weight": 8 * file.nbytes / file.parameters if file.parameters else 0.0,
            "layers": sized and sized.layers,
            "width": sized and sized.width,
            "heads": count_heads(h, "heads"),
            "kv_heads": count_heads(h, "kv_heads"),
            "context": h and h.context,
            "vocabulary": describe_vocabulary(metadata),
            "reads": describe_reader(file, h),
            "sees": describe_projector(validity.vision),
            "projector": describe_projector_file(file.path) if h else None,
            "adapter": describe_adapter(file) if validity.is_valid else None,
            "guessing": describe_mtp(file, h),
            "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
            "sampling": read_recommended(metadata)[0].explicit,
            "made_with": describe_quantization(metadata),
            "formats": count_formats(file),
            "memory": list_memory(h, file.nbytes, KVType()) if h and not is_embedding_model(h) else [],
            **({"metadata": {key: to_json(metadata[key]) for key in metadata}} if with_metadata else {}),
            "tensors": [
                {"name": t.name, "format": t.format.name, "shape": list(t.shape), "bytes": t.nbytes}
                for t in file.tensors.values()
            ],
        }


def to_json(value: object) -> object:
    if isinstance(value, np.ndarray | list | tuple):
        return [to_json(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_thoroughly(file: GGUFFile, validity: ValidationResult) -> ValidationResult:
    """Check every weight and the chat template of a valid file."""
    try:
        require_finite_weights(file)
        require_template(file)
    except ModelError as error:
        return ValidationResult(validity.hyperparameters, error)
    return validity


def require_template(file: GGUFFile) -> None:
    if isinstance(source := file.metadata.get("tokenizer.chat_template"), str):
        from localllm.text.templates import ChatTemplate  # seldom needed, and slow to import

        ChatTemplate(source)


def describe_problem(file: GGUFFile, validity: ValidationResult) -> str | None:
    """Return why a file cannot run, or None if it can."""
    if validity.problem:
        return str(validity.problem).removeprefix(f"{file.path}: ")
    return None if file.tensors else "the file contains a vocabulary only"


def count_heads(h: Hyperparameters | None, name: str) -> int | None:
    """Return the maximum head count of any layer, or None for models without attention."""
    return max(getattr(h.attention, name)) if isinstance(h, TransformerHyperparameters) else None


def is_embedding_model(h: Hyperparameters) -> bool:
    """Return whether a model computes embeddings or scores, but generates no text."""
    return h.bidirectional and not h.is_diffusion


def describe_reader(file: GGUFFile, h: Hyperparameters | None) -> str | None:
    """Describe the output of an embedding model or reranker, such as "scores"; None for other models."""
    if h is None:
        return None
    kind = h.pooling if is_embedding_model(h) else read_pooling(HyperparameterReader.from_file(file))
    return None if kind in (None, NONE) else "scores" if kind == RANK else f"vectors by the {NAMES[kind]}"


def describe_projector(vision: VisionHyperparameters | None) -> dict[str, object] | None:
    """Describe a vision projector: image and patch size in pixels, output width; None for other files."""
    if vision is None:
        return None
    return {"type": vision.kind, "side": vision.side, "patch": vision.patch, "width": vision.out}


def describe_projector_file(path: str) -> ProjectorFile | None:
    """Describe the projector file next to a model, or return None without one."""
    try:
        projector = find_projector(path)
        return {"path": projector, "bytes": os.stat(projector).st_size}
    except (UsageError, OSError):
        return None


def describe_mtp(file: GGUFFile, h: Hyperparameters | None) -> dict[str, object]:
    """Describe the multi-token prediction layers: count, bytes, and whether the first is used."""
    weights = Weights(file.tensors)
    blocks = (
        [weights.get_layer(layer).list_weights() for layer in range(h.layers, h.layers + h.mtp_layers)] if h else []
    )
    mtp = [[weight.tensor for weight in block] for block in blocks if block]
    has_layer = bool(mtp) and h is not None and has_mtp_layer(weights, h)
    is_used = has_layer and isinstance(load_architecture(file)[0], DraftingFamily)
    return {"layers": len(mtp), "bytes": sum(tensor.nbytes for block in mtp for tensor in block), "used": is_used}


def describe_vocabulary(metadata: Mapping[str, object]) -> dict[str, object]:
    """Describe the tokenizer type and the vocabulary size."""
    kinds = [as_string(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    return {
        "size": count_strings(metadata, "tokenizer.ggml.tokens") or 0,
        "kind": ", ".join(kind for kind in kinds if kind),
    }


def count_formats(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Count tensors, weights and bytes by format, largest first."""
    rows: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        row = rows.setdefault(tensor.format.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return dict(sorted(rows.items(), key=lambda item: -item[1]["bytes"]))


def list_memory(h: Hyperparameters, weight_bytes: int, kv_type: KVType, context: int | None = None) -> list[MemoryRow]:
    """List the memory of weights and KV cache by context length.

    context: the only length; None: lengths that double up to the trained context.
    """
    lengths = (
        [context] if context else [MIN_CONTEXT << n for n in range(24) if MIN_CONTEXT << n < h.context] + [h.context]
    )
    caches = [(n, count_cache_bytes(h.list_states(), n, kv_type)) for n in lengths]
    return [{"context": n, "cache_bytes": cache, "total_bytes": weight_bytes + cache} for n, cache in caches]


def as_string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def make_calibration_metadata(texts: Sequence[str], tokens: int, version: str) -> dict[str, object]:
    """Build a calibrated file's metadata; texts: names of text files.  tokens: count of tokens used."""
    return {TEXTS: list(texts) or [DEFAULT_MIXTURE], TOKENS: tokens, VERSION: version}


def describe_quantization(metadata: Mapping[str, object]) -> str | None:
    """Describe a file's calibration in one line; None if it records none."""
    texts, tokens, version = (metadata.get(name) for name in (TEXTS, TOKENS, VERSION))
    if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
        size = f", {tokens} tokens" if isinstance(tokens, int) else ""
        scaled = metadata.get(SCALED)
        size += f", {scaled} scalings folded away" if isinstance(scaled, int) else ""
        by = f" (localllm {version})" if isinstance(version, str) else ""
        return f"calibrated on {', '.join(texts)}{size}{by}"
    matrix, text = (metadata.get(f"quantize.imatrix.{name}") for name in ("file", "dataset"))
    if isinstance(matrix, str):
        return f"importance matrix {matrix}" + (f" of {text}" if isinstance(text, str) else "")
    return None
