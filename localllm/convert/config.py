"""Checked access to a checkpoint's config.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.arch.metadata import MOST
from localllm.convert.files import read_json
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

LARGEST = 1e38  # number


class Config:
    """The values of a JSON object. Every method raises ModelError, with the name, for one that it should not have."""

    def __init__(
        self,
        content: Mapping[str, Any],
        path: Path,
        warnings: list[str] | None = None,
        asked: set[str] | None = None,
        prefix: str = "",
    ):
        """asked: gets the names that somebody asks for.  prefix: of names in it, where it is within another."""
        self.content, self.path, self.prefix = content, path, prefix
        self.warnings = [] if warnings is None else warnings  # one line each, for the user
        self.asked = set[str]() if asked is None else asked

    @classmethod
    def of(cls, folder: Path) -> "Config":
        """That of a checkpoint."""
        content = read_json(folder / "config.json")
        if content is None:
            raise ModelError(f"{folder}: no config.json; expected the folder of a Hugging Face checkpoint")
        return cls(content, folder / "config.json")

    @property
    def architecture(self) -> str:
        """As "LlamaForCausalLM"; "" if there is none."""
        names = self.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else ""

    def text_config(self, defaults: Mapping[str, Any]) -> "Config":
        """What it says of the language model: beside others, in models that see too. With what it need not say."""
        content = {**defaults, **self.content, **self.section("text_config").content}
        if "tie_word_embeddings" in self.content:  # of which the outer one counts
            content["tie_word_embeddings"] = self.content["tie_word_embeddings"]
        return self.with_content(content)

    def plus(self, **more: Any) -> "Config":
        """The same, as if it said these things, too."""
        return self.with_content({**self.content, **more})

    def with_content(self, content: Mapping[str, Any]) -> "Config":
        """The same object with this in it."""
        return Config(content, self.path, self.warnings, self.asked, self.prefix)

    def section(self, name: str) -> "Config":
        """An object in it; an empty one if there is none."""
        content = self.get(name)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise self.refusal(f"{name}: expected an object")
        return Config(content, self.path, self.warnings, self.asked, f"{self.prefix}{name}.")

    def refusal(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, of any type; null is as good as none."""
        self.asked.add(self.prefix + name)
        value = self.content.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number above 0, or the default."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not (1 <= value <= most or value == default):
            raise self.refusal(f"{name} should be a number from 1 to {most}, is {printable(str(value))}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0 that float32 can hold."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
            raise self.refusal(f"{name} should be a positive number, is {printable(str(value))}")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """So many numbers above 0."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.refusal(f"{name} should be a list of {count} numbers")
        return [Config({name: value}, self.path).number(name) for value in values]

    def flag(self, name: str, default: bool = False) -> bool:
        """Yes or no."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{name} should be true or false, is {printable(str(value))}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any other value than these (or none): the GGUF architecture could not tell it."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(f"{name} {printable(str(value))} is not supported")

    def windows(self, expected: Sequence[bool]) -> None:
        """Refuse layer_types other than these: whether a layer sees a window only."""
        types = self.get("layer_types")
        if types is not None and types != ["sliding_attention" if window else "full_attention" for window in expected]:
            raise self.refusal("layer_types: windows in other layers than usual are not supported")
