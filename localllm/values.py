"""Check and parse arguments: accept NumPy scalars as Python numbers, and refuse bytes as text."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex, TypeVar

from localllm.errors import UsageError

T = TypeVar("T")
DURATION = re.compile(r"(?P<sign>-?)(?:(?P<h>\d{1,9})h)?(?:(?P<m>\d{1,9})m)?(?:(?P<s>\d{1,9}(?:\.\d*)?)s?)?")


def to_python_number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return anything else unchanged."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration as Ollama writes it: 300, 5m, 1h30m, -1; None if it is invalid."""
    match = DURATION.fullmatch(text) if text.strip("-") else None
    if not match:
        return None
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return (3600 * hours + 60 * minutes + seconds) * (-1 if match["sign"] else 1)


def require_integer(name: str, value: object, least: int = 0) -> int:
    """Return value as an int.

    Raises UsageError, which begins with `name`, for another type or a value below `least`.
    """
    value = to_python_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise UsageError(f"{name} must be {least} or greater, not {value}")
    return value


def require_string(name: str, value: object) -> str:
    """Return value, a str. Raises UsageError, which begins with `name`, for another type."""
    if not isinstance(value, str):
        advice = ": decode it first" if isinstance(value, bytes | bytearray | memoryview) else ""
        raise UsageError(f"{name} must be a str, not {type(value).__name__}{advice}")
    return value


def require_iterable(name: str, value: Iterable[T]) -> Iterable[T]:
    """Return value, an iterable. Raises UsageError, which begins with `name`, for a single text or message."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list, not {type(value).__name__}")
    return value


def to_token_ids(ids: Iterable[SupportsIndex]) -> list[int]:
    """Convert token ids to ints. Raises UsageError."""
    if isinstance(ids, str | bytes | bytearray | memoryview):
        hint = ": `tokenize` makes them" if isinstance(ids, str) else ""
        raise UsageError(f"token ids must be a list of integers, not {type(ids).__name__}{hint}")
    try:
        return [index(token) for token in ids]
    except TypeError:
        raise UsageError("token ids must be a list of integers") from None


def parse_scaled_files(text: str) -> list[tuple[str, float]]:
    """Parse FILE[:SCALE],...; the scale of a FILE alone is 1, and ~ is the home folder. Raises ValueError."""
    pairs = list[tuple[str, float]]()
    for each in text.split(","):
        path, colon, scale = each.rpartition(":")
        try:
            pairs.append((path, float(scale)) if colon else (each, 1.0))
        except ValueError:  # a colon in the path, as in C:\\adapter.gguf
            pairs.append((each, 1.0))
    if not all(path and math.isfinite(scale) for path, scale in pairs):
        raise ValueError(f"{text!r} is not a list of files, each with a scale, such as a.gguf:0.5,b.gguf")
    return [(os.path.expanduser(path), scale) for path, scale in pairs]


def parse_layer_range(text: str) -> tuple[int, int]:
    """Parse the numbers of the first and the last layer. Raises ValueError."""
    numbers = text.split()
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{text!r} is not the first and the last layer, such as 10 20")
    return int(numbers[0]), int(numbers[1])
