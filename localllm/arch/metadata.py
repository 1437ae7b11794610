"""Checked access to a file's metadata: the keys that begin with the architecture's name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata_reader import Checked, is_whole, number_of_strings, show
from localllm.files.oddities import Oddities

__all__ = ["Fields", "show"]

MOST, MOST_LAYERS = 1 << 24, 4096  # no dimension of a real model is larger
LEAST_EPSILON, MOST_EPSILON = 1e-20, 0.1  # of a norm: a larger one would be much of what is left


class Fields(Checked):
    """The hyperparameters of a file, by the names that GGUF gives them, without the architecture in front.

    Every method raises ModelError, with the key, for a value that it should not have.

    Attributes:
        asked: names that somebody has asked for, or may.
    """

    def __init__(self, metadata: Mapping[str, Any], path: str, vocab_size: int, oddities: Oddities | None = None):
        """Wrap metadata; vocab_size: rows of the embedding matrix.  oddities: as of Checked."""
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{path}: the metadata has no string general.architecture; is this a language model?")
        super().__init__(metadata, f"{arch}.", path, oddities)
        self.arch, self.vocab_size = arch, vocab_size
        self.asked = set[str]()

    @classmethod
    def of(cls, file: GGUFFile) -> "Fields":
        """Return those of a file, whose vocabulary must be as large as its embedding matrix."""
        embedding = file.tensors.get("token_embd.weight")
        count = number_of_strings(file.metadata, "tokenizer.ggml.tokens")
        size = embedding.shape[0] if embedding is not None else count or 0
        fields = cls(file.metadata, file.path, size, file.oddities)
        if count is not None and count != size:
            raise fields.error(f"{count} tokens, but token_embd.weight has {size} rows")
        if (said := fields.count("vocab_size", size)) != size:
            if count is None:
                raise fields.error(f"{fields.key('vocab_size')} is {said}, the vocabulary has {size}")
            key = fields.key("vocab_size")
            fields.oddities.note(f"{key} is {said}, where there are {size} tokens and rows", key)
        return fields

    def raw(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().raw(name, default)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number of sensible size, above 0 unless the default is 0."""
        value = self.raw(name, default)
        if isinstance(value, np.ndarray) and self._is_one_for_all(value):
            value = value.flat[0].item()
        return self._checked_count(name, value, 0 if default == 0 else 1)

    def _is_one_for_all(self, value: np.ndarray) -> bool:
        """Return whether it is one value per layer, and they are all the same."""
        layers = self.raw("block_count")
        return is_whole(layers) and value.shape == (layers,) and layers > 0 and bool((value == value[0]).all())

    def counts(self, name: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """Return one number per layer; a single one holds for all."""
        value = self.raw(name, default)
        if not isinstance(value, np.ndarray):
            return (self.count(name, default),) * layers
        if value.shape != (layers,):
            raise self.error(f"{self.key(name)} has {value.size} values for {layers} layers")
        return tuple(self._checked_count(name, item.item(), 0 if default == 0 else 1) for item in value)

    def _checked_count(self, name: str, value: Any, least: int) -> int:
        if not is_whole(value) or not least <= value <= MOST:
            raise self.wrong(name, f"a number from {least} to {MOST}")
        return value

    def factor(self, name: str, default: float | None = None) -> float:
        """Return a number that is not 0."""
        value = self.number(name, default)
        if value == 0:
            raise self.error(f"{self.key(name)} should not be 0")
        return value

    def epsilon(self, name: str) -> float:
        """Compute what a norm adds to a mean square."""
        value = self.factor(name)
        if not LEAST_EPSILON <= value <= MOST_EPSILON:
            raise self.wrong(name, f"from {LEAST_EPSILON:g} to {MOST_EPSILON:g}")
        return value

    def layers(self) -> int:
        """Read block_count, the number of layers."""
        layers = self.count("block_count")
        if layers > MOST_LAYERS:
            raise self.error(f"{layers} layers are more than any model has")
        return layers

    def common(self) -> dict[str, Any]:
        """Compute what every model has: the arguments of localllm.arch.hyperparameters.Hyperparameters."""
        guessing = self.count("nextn_predict_layers", 0)
        if guessing >= self.layers():
            raise self.error(f"{self.key('nextn_predict_layers')} leaves no layers")
        return {
            "arch": self.arch,
            "layers": self.layers() - guessing,
            "guessing": guessing,
            "width": self.count("embedding_length"),
            "vocab_size": self.vocab_size,
            "context": self.count("context_length"),
        }
