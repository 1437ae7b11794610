"""Checked access to metadata: a value has the type and size that it should have, or ModelError tells the key."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.header import Metadata, shown
from localllm.files.oddities import Oddities

SHOWN = 8  # items of an array in a message
SMALLEST = float(np.finfo(np.float32).tiny)  # a positive float32 below is subnormal: nobody means it


def show(value: Any) -> str:
    """A metadata value fit for a message: one line, not long."""
    if isinstance(value, list | np.ndarray) and len(value) > SHOWN:
        return f"an array of {len(value)}"
    return shown(str(value))


class Checked:
    """The metadata whose keys begin with a prefix, by what stands behind it."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str, path: str = "", oddities: Oddities | None = None):
        """path: of the file, for messages; where it is known later, none.  oddities: gets what is odd, and clear."""
        self.metadata, self.prefix, self.path = metadata, prefix, path
        self.oddities = Oddities() if oddities is None else oddities

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}" if self.path else problem)

    def unsupported(self, problem: str) -> UnsupportedError:
        return UnsupportedError(str(self.error(problem)))

    def wrong(self, name: str, expected: str) -> ModelError:
        """For a value that is not what is expected."""
        value = self.raw(name)
        return self.error(f"{self.key(name)} should be {expected}, is {'missing' if value is None else show(value)}")

    def key(self, name: str) -> str:
        """As the metadata have it, fit for a message."""
        return shown(self.prefix + name)

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is, of any type."""
        return self.metadata.get(self.prefix + name, default)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def whole(self, name: str, default: int | None, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        value = self.raw(name, default)
        if not is_whole(value) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number that is not negative, and not subnormal."""
        value = self.raw(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_number(value):
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Yes or no."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def array(self, name: str, kinds: str, expected: str) -> np.ndarray:
        """An array of numbers of these NumPy kinds, [count]; `expected`: what it is, for a message."""
        value = self.raw(name)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            raise self.wrong(name, expected)
        return value

    def strings(self, name: str) -> list[str]:
        value = self.raw(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value[:1]):
            raise self.wrong(name, "an array of strings")
        return value


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: float) -> bool:
    """Whether float32 can hold a number that is not negative as it is meant."""
    return value == 0 or SMALLEST <= value < math.inf


def number_of_strings(metadata: Mapping[str, Any], key: str) -> int | None:
    """How many an array has, not decoded for that; None if there is no such array."""
    if isinstance(metadata, Metadata):
        return metadata.strings(key)
    value = metadata.get(key)
    return len(value) if isinstance(value, list) else None


def is_text(metadata: Mapping[str, Any], key: str) -> bool:
    """Whether a value is a text, not decoded for that."""
    return metadata.is_text(key) if isinstance(metadata, Metadata) else isinstance(metadata.get(key), str)
