"""Checked access to a checkpoint's config.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.arch.metadata import MOST
from localllm.convert.files import read_json
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

LARGEST = 1e38  # largest number that is accepted


def quoted(value: object) -> str:
    """Format a value for a message, a text in quotes."""
    return printable(f'"{value}"' if isinstance(value, str) else str(value))


class Config:
    """The values of a JSON object. Every method raises ModelError, with the name, for a value of a wrong type."""

    def __init__(
        self,
        content: Mapping[str, object],
        path: Path,
        warnings: list[str] | None = None,
        asked: set[str] | None = None,
        prefix: str = "",
    ):
        """Wrap an object; asked: collects the names that are read; prefix: the object's path in the file, "a.b."."""
        self.content, self.path, self.prefix = content, path, prefix
        self.warnings = [] if warnings is None else warnings  # lines for the user
        self.asked = set[str]() if asked is None else asked

    @classmethod
    def of(cls, folder: Path) -> "Config":
        """Read a checkpoint's config.json."""
        content = read_json(folder / "config.json")
        if content is None:
            raise ModelError(f"{folder}: no config.json; expected the folder of a Hugging Face checkpoint")
        return cls(content, folder / "config.json")

    @property
    def architecture(self) -> str:
        """The first of `architectures`, e.g. "LlamaForCausalLM"; "" if there is none."""
        names = self.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else ""

    def text_config(self, defaults: Mapping[str, object]) -> "Config":
        """Merge the language model's section (text_config of vision models) into the values, over `defaults`."""
        content = {**defaults, **self.content, **self.section("text_config").content}
        if "tie_word_embeddings" in self.content:  # here the outer value counts
            content["tie_word_embeddings"] = self.content["tie_word_embeddings"]
        return self.with_content(content)

    def updated(self, **changes: object) -> "Config":
        """Copy the object with these values added."""
        return self.with_content({**self.content, **changes})

    def with_content(self, content: Mapping[str, object]) -> "Config":
        """Copy the object with other content."""
        return Config(content, self.path, self.warnings, self.asked, self.prefix)

    def section(self, name: str) -> "Config":
        """Return a nested object; an empty one if there is none."""
        content = self.get(name)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise self.refusal(f"{name}: expected an object")
        return Config(content, self.path, self.warnings, self.asked, f"{self.prefix}{name}.")

    def place(self, key: str) -> tuple["Config", str]:
        """Return the section of a key like "attn_config.alibi", and the key within."""
        *sections, name = key.split(".")
        config = self
        for section in sections:
            config = config.section(section)
        return config, name

    def refusal(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of any type; null counts as missing."""
        self.asked.add(self.prefix + name)
        value = self.content.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, maximum: int = MOST) -> int:
        """Return a whole number from 1 to `maximum`, or the default."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not (1 <= value <= maximum or value == default):
            raise self.refusal(f"{name} should be a number from 1 to {maximum}, is {quoted(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number that float32 can hold."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
            raise self.refusal(f"{name} should be a positive number, is {quoted(value)}")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of `count` positive numbers."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.refusal(f"{name} should be a list of {count} numbers")
        return [Config({name: value}, self.path).number(name) for value in values]

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{name} should be true or false, is {quoted(value)}")
        return value

    def only(self, name: str, *allowed: object) -> None:
        """Refuse values other than `allowed` (or none), which the GGUF architecture cannot express."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(f"{name} {printable(str(value))} is not supported")

    def windows(self, expected: Sequence[bool]) -> None:
        """Refuse layer_types other than `expected`: whether each layer has a sliding window."""
        types = self.get("layer_types")
        if types is not None and types != ["sliding_attention" if window else "full_attention" for window in expected]:
            raise self.refusal("layer_types: windows in other layers than usual are not supported")
