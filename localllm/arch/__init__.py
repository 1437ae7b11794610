"""The architectures, one file each; a file's general.architecture names the one to use."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from localllm.arch.config import Config
from localllm.errors import ModelError
from localllm.files.gguf_header import shown

ARCHITECTURES = {"llama": "llama"}


def require_known(metadata: Mapping[str, Any], path: str) -> None:
    """Raise ModelError if the architecture is not supported: its metadata may then mean anything."""
    name = metadata.get("general.architecture")
    if isinstance(name, str) and name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{path}: architecture {shown(name)} is not supported (supported: {known})")


def architecture(config: Config, path: str) -> ModuleType:
    """The module for a model: its `forward(builder, weights)` and `INTERLEAVED_ROPE`. Raises ModelError."""
    require_known({"general.architecture": config.arch}, path)
    if config.experts:
        raise ModelError(f"{path}: mixtures of experts are not supported yet ({config.experts} experts)")
    return import_module(f"localllm.arch.{ARCHITECTURES[config.arch]}")
