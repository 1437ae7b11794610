"""What a model file holds and needs, found without running it: the service behind `localllm inspect`."""

import math
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from localllm.arch import architecture
from localllm.arch.attention import Transformer
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
from localllm.generation.sampling.model_defaults import recommended
from localllm.services.quantization_info import made_with
from localllm.services.validate import Validity, require_numbers, validity

NAMES = {"mean": "mean of all tokens", "cls": "first token", "last": "last token"}
SHORTEST = 2048  # tokens: where the table of memory needs begins


def inspect_model(path: str | os.PathLike[str], check: bool = False, with_metadata: bool = False) -> dict[str, Any]:
    """Facts about a GGUF file, ready for JSON; None for what it does not tell. Sizes are in bytes.

    Any file that can be read will do: `supported` says whether localllm can run it, `reason` why not, and `valid` is
    false if that is the file's fault. With `check` every weight is read and the chat template compiled, `with_metadata`
    adds all that the file tells. Raises ModelError for a file that cannot be read.
    """
    with GGUFFile.open(path, needed=()) as file:
        found = validity(file)
        if check and found.is_valid:
            found = thorough(file, found)
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
            "heads": heads(h, "heads"),
            "kv_heads": heads(h, "kv_heads"),
            "context": h and h.context,
            "vocabulary": vocabulary(metadata),
            "reads": reads(file, h),
            "sees": sees(found.vision),
            "projector": beside(file.path) if h else None,
            "guessing": guessing(file, h),
            "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
            "sampling": recommended(metadata)[0].chosen,
            "made_with": made_with(metadata),
            "formats": formats(file),
            "memory": memory(h, file.nbytes, KVType()) if h and not is_reader(h) else [],
            **({"metadata": {key: plain(metadata[key]) for key in metadata}} if with_metadata else {}),
            "tensors": [
                {"name": t.name, "format": t.format.name, "shape": list(t.shape), "bytes": t.nbytes}
                for t in file.tensors.values()
            ],
        }


def plain(value: Any) -> Any:
    """A value of metadata as JSON has it; what is no number in a text."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def thorough(file: GGUFFile, found: Validity) -> Validity:
    """What is found of a file when everything in it is read, too."""
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
    """Why a file cannot run, None if it can."""
    if found.problem:
        return str(found.problem).removeprefix(f"{file.path}: ")
    return None if file.tensors else "the file has a vocabulary only"


def heads(h: Hyperparameters | None, name: str) -> int | None:
    """How many heads the layers have, the most if they differ; None for models without attention."""
    return max(getattr(h.attention, name)) if isinstance(h, Transformer) else None


def is_reader(h: Hyperparameters) -> bool:
    """Whether a model makes vectors and scores only."""
    return h.looks_ahead and not h.fills


def reads(file: GGUFFile, h: Hyperparameters | None) -> str | None:
    """What a model makes of a text that it reads whole: "vectors by the mean", "scores", ..., None for nothing."""
    if h is None:
        return None
    kind = h.pooling if is_reader(h) else read_pooling(Fields.of(file))
    return None if kind in (None, NONE) else "scores" if kind == RANK else f"vectors by the {NAMES[kind]}"


def sees(vision: Vision | None) -> dict[str, Any] | None:
    """What a projector makes of a picture: rows of numbers, the most of the largest one; None for another file."""
    if vision is None:
        return None
    return {"type": vision.kind, "side": vision.side, "patch": vision.patch, "width": vision.out}


def beside(path: str) -> dict[str, Any] | None:
    """The projector that a model sees images by, if there is one."""
    try:
        found = find_projector(path)
        return {"path": found, "bytes": os.stat(found).st_size}
    except (UsageError, OSError):
        return None


def guessing(file: GGUFFile, h: Hyperparameters | None) -> dict[str, Any]:
    """The layers that guess further tokens: how many the file has, their bytes, and whether the first one is used."""
    weights = Weights(file.tensors)
    blocks = [weights.block(layer).all() for layer in range(h.layers, h.layers + h.guessing)] if h else []
    there = [[weight.tensor for weight in block] for block in blocks if block]
    is_used = bool(there and h) and hasattr(architecture(file)[0], "guess") and has_guessing_layer(weights, h)
    return {"layers": len(there), "bytes": sum(one.nbytes for block in there for one in block), "used": is_used}


def vocabulary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens there are, and how the tokenizer works."""
    kinds = [text(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    return {
        "size": number_of_strings(metadata, "tokenizer.ggml.tokens") or 0,
        "kind": ", ".join(kind for kind in kinds if kind),
    }


def formats(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Tensors, weights and bytes by format, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        row = found.setdefault(tensor.format.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def memory(h: Hyperparameters, weight_bytes: int, kv_type: KVType, context: int | None = None) -> list[dict[str, int]]:
    """What conversations need: weights and a cache, for lengths that double up to the model's context, or for one."""
    lengths = [context] if context else [SHORTEST << n for n in range(24) if SHORTEST << n < h.context] + [h.context]
    caches = [(n, cache_bytes(h.states(), n, kv_type)) for n in lengths]
    return [{"context": n, "cache_bytes": cache, "total_bytes": weight_bytes + cache} for n, cache in caches]


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
