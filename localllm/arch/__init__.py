"""The architectures, one file each; a file's general.architecture names the one to use."""

from importlib import import_module
from types import ModuleType

from localllm.config import Config
from localllm.errors import ModelError

ARCHITECTURES = {"llama": "llama"}


def architecture(config: Config, path: str) -> ModuleType:
    """The module for a model: its `forward(builder, weights)` and `INTERLEAVED_ROPE`. Raises ModelError."""
    if config.arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{path}: architecture {config.arch!r} is not supported (supported: {known})")
    if config.experts:
        raise ModelError(f"{path}: mixtures of experts are not supported yet ({config.experts} experts)")
    return import_module(f"localllm.arch.{ARCHITECTURES[config.arch]}")
