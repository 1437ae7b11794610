"""Checked access to a file's metadata: the keys that begin with the architecture's name."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf_file import GGUFFile
from localllm.files.gguf_header import shown

MOST, MOST_LAYERS = 1 << 24, 4096  # no dimension of a real model is larger


def show(value: Any) -> str:
    """A metadata value fit for a message: one line, not long."""
    return shown(str(value))


class Fields:
    """The hyperparameters of a file, by the names that GGUF gives them, without the architecture in front.

    Every method raises ModelError, with the key, for a value that it should not have.
    """

    def __init__(self, metadata: Mapping[str, Any], path: str, vocab_size: int):
        """vocab_size: rows of the embedding matrix."""
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{path}: no text general.architecture in the metadata; not a language model?")
        self.metadata, self.path, self.arch, self.vocab_size = metadata, path, arch, vocab_size

    @classmethod
    def of(cls, file: GGUFFile) -> "Fields":
        """Those of a file, whose vocabulary must be as large as its embedding matrix."""
        embedding = file.tensors.get("token_embd.weight")
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, list) else None
        size = embedding.shape[0] if embedding is not None else count or 0
        fields = cls(file.metadata, file.path, size)
        if count is not None and count != size:
            raise fields.error(f"{count} tokens, but token_embd.weight has {size} rows")
        if fields.count("vocab_size", size) != size:
            raise fields.error(f"{fields.key('vocab_size')} is {fields.raw('vocab_size')}, the vocabulary has {size}")
        return fields

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def key(self, name: str) -> str:
        """As the metadata have it, fit for a message."""
        return f"{shown(self.arch)}.{name}"

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is, of any type."""
        return self.metadata.get(f"{self.arch}.{name}", default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of sensible size, above 0 unless the default is 0."""
        value = self.raw(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()  # one value per layer, all the same
        return self._checked_count(name, value, 0 if default == 0 else 1)

    def counts(self, name: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """One number per layer; a single one holds for all."""
        value = self.raw(name, default)
        if not isinstance(value, np.ndarray):
            return (self.count(name, default),) * layers
        if value.shape != (layers,):
            raise self.error(f"{self.key(name)} has {value.size} values for {layers} layers")
        return tuple(self._checked_count(name, item.item(), 0 if default == 0 else 1) for item in value)

    def _checked_count(self, name: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            raise self.error(f"{self.key(name)} should be a number from {least} to {MOST}, is {show(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self.raw(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.error(f"{self.key(name)} should be a positive number, is {show(value)}")
        return float(value)

    def factor(self, name: str, default: float | None = None) -> float:
        """A number that is not 0."""
        value = self.number(name, default)
        if value == 0:
            raise self.error(f"{self.key(name)} should not be 0")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Yes or no."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{self.key(name)} should be true or false, is {show(value)}")
        return value

    def layers(self) -> int:
        """block_count."""
        layers = self.count("block_count")
        if layers > MOST_LAYERS:
            raise self.error(f"{layers} layers are more than any model has")
        return layers

    def common(self) -> dict[str, Any]:
        """What every model has: the arguments of localllm.arch.hyperparameters.Hyperparameters."""
        return {
            "arch": self.arch,
            "layers": self.layers(),
            "width": self.count("embedding_length"),
            "vocab_size": self.vocab_size,
            "context": self.count("context_length"),
        }
