"""Read metadata with checks: a value of a wrong type or range raises ModelError with its key."""

import math
from collections.abc import Mapping
from typing import TypeGuard

import numpy as np

from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities, Metadata

MAX_SHOWN_ITEMS = 8  # items of an array in a message
SMALLEST = float(np.finfo(np.float32).tiny)  # smaller positive float32 numbers are subnormal: surely a mistake


def format_value(value: object) -> str:
    """Format a metadata value for a message in one short line."""
    if isinstance(value, list | np.ndarray) and len(value) > MAX_SHOWN_ITEMS:
        return f"an array of {len(value)}"
    return printable(str(value))


class MetadataReader:
    """Reads the metadata under a key prefix, with checks.

    Methods take keys without the prefix; they raise ModelError.
    """

    def __init__(
        self, metadata: Mapping[str, object], prefix: str, path: str = "", oddities: Irregularities | None = None
    ):
        """Wrap metadata.

        path: of the file, for messages; "" if it is not known yet. oddities: receives notes on harmless irregularities.
        """
        self.metadata, self.prefix, self.path = metadata, prefix, path
        self.oddities = Irregularities() if oddities is None else oddities

    def make_error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}" if self.path else problem)

    def make_unsupported_error(self, problem: str) -> UnsupportedError:
        return UnsupportedError(str(self.make_error(problem)))

    def make_value_error(self, name: str, expected: str) -> ModelError:
        """Build the error for a value that is not as `expected`, with the value that was found."""
        value = self.read_raw(name)
        return self.make_error(
            f"{self.format_key(name)} must be {expected} (found {'missing' if value is None else format_value(value)})"
        )

    def format_key(self, name: str) -> str:
        """Return the full key, escaped for a message."""
        return printable(self.prefix + name)

    def read_raw(self, name: str, default: object = None) -> object:
        """Return a value without checking it."""
        return self.metadata.get(self.prefix + name, default)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def read_integer(self, name: str, default: int | None, minimum: int, maximum: int) -> int:
        """Read an integer from `minimum` to `maximum`."""
        value = self.read_raw(name, default)
        if not is_integer(value) or not minimum <= value <= maximum:
            raise self.make_value_error(name, f"a number from {minimum} to {maximum}")
        return value

    def read_number(self, name: str, default: float | None = None) -> float:
        """Read a finite number that is 0 or above, and not subnormal in float32."""
        value = self.read_raw(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_number(value):
            raise self.make_value_error(name, "a positive number")
        return float(value)

    def read_flag(self, name: str, default: bool | None = None) -> bool:
        """Read a boolean."""
        value = self.read_raw(name, default)
        if not isinstance(value, bool):
            raise self.make_value_error(name, "true or false")
        return value

    def read_text(self, name: str, default: str | None = None) -> str:
        value = self.read_raw(name, default)
        if not isinstance(value, str):
            raise self.make_value_error(name, "a string")
        return value

    def read_array(self, name: str, kinds: str, expected: str) -> np.ndarray:
        """Read an array of numbers, [count].

        kinds: accepted NumPy dtype kinds, such as "iu". expected: describes the array in messages.
        """
        value = self.read_raw(name)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            raise self.make_value_error(name, expected)
        return value

    def read_strings(self, name: str) -> list[str]:
        value = self.read_raw(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value[:1]):
            raise self.make_value_error(name, "an array of strings")
        return value


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: float) -> bool:
    """Return whether a value is 0, or positive, finite and not subnormal in float32."""
    return value == 0 or SMALLEST <= value < math.inf


def count_strings(metadata: Mapping[str, object], key: str) -> int | None:
    """Return the length of an array of strings without decoding it; None if the value is something else."""
    if isinstance(metadata, Metadata):
        return metadata.count_strings(key)
    value = metadata.get(key)
    return len(value) if isinstance(value, list) else None


def is_text(metadata: Mapping[str, object], key: str) -> bool:
    """Return whether a value is a string, without decoding it."""
    return metadata.is_text(key) if isinstance(metadata, Metadata) else isinstance(metadata.get(key), str)
