"""What a model file holds and needs, found without running it: the service behind `localllm inspect`."""

import os
from math import prod
from typing import Any

from localllm.arch import architecture, require_known
from localllm.arch.config import Config
from localllm.engine.kv_cache import bytes_per_token
from localllm.errors import ModelError
from localllm.files.gguf_file import GGUFFile

SHORTEST = 2048  # tokens: where the table of memory needs begins


def inspect_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Facts about a GGUF file, ready for JSON; None for what it does not tell. Sizes are in bytes.

    Any valid file will do: `supported` says whether localllm can run it, and `reason` why not. Raises ModelError for a
    file that is not valid.
    """
    with GGUFFile.open(path) as file:
        config, reason = configuration(file)
        metadata = file.metadata
        return {
            "path": file.path,
            "name": text(metadata.get("general.name")),
            "architecture": text(metadata.get("general.architecture")) or "unknown",
            "supported": reason is None,
            "reason": reason,
            "parameters": file.parameters,
            "weight_bytes": file.nbytes,
            "bits_per_weight": 8 * file.nbytes / file.parameters if file.parameters else 0.0,
            "layers": config and config.layers,
            "width": config and config.width,
            "heads": config and config.heads,
            "kv_heads": config and config.kv_heads,
            "context": config and config.context,
            "vocabulary": vocabulary(metadata),
            "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
            "formats": formats(file),
            "memory": memory(config, file.nbytes) if config and reason is None else [],
            "tensors": [
                {"name": t.name, "format": t.format.name, "shape": list(t.shape), "bytes": t.nbytes}
                for t in file.tensors.values()
            ],
        }


def configuration(file: GGUFFile) -> tuple[Config | None, str | None]:
    """The hyperparameters, as far as they can be read, and why the model cannot run, None if it can."""
    config = None
    try:
        require_known(file.metadata, file.path)
        config = Config.from_metadata(file.metadata, file.path)
        architecture(config, file.path)
    except ModelError as error:
        return config, str(error).removeprefix(f"{file.path}: ")
    return config, None if file.tensors else "the file has a vocabulary only"


def vocabulary(metadata: dict[str, Any]) -> dict[str, Any]:
    """How many tokens there are, and how the tokenizer works."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = [text(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    return {
        "size": len(tokens) if isinstance(tokens, list) else 0,
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


def memory(config: Config, weight_bytes: int) -> list[dict[str, int]]:
    """What conversations need: weights and a cache in f16, for lengths that double up to the model's context."""
    per_token = bytes_per_token(config.layers, config.kv_heads, config.head_dim, "f16")
    lengths = [SHORTEST << n for n in range(24) if SHORTEST << n < config.context] + [config.context]
    return [{"context": n, "cache_bytes": n * per_token, "total_bytes": weight_bytes + n * per_token} for n in lengths]


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
