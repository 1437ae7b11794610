"""Check arguments: accept NumPy scalars as Python numbers, and refuse bytes as text."""

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex, TypeVar

from localllm.errors import UsageError

T = TypeVar("T")


def to_python_number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return anything else unchanged."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


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
        raise UsageError(f"token ids must be a list of integers, not {type(ids).__name__}")
    try:
        return [index(token) for token in ids]
    except TypeError:
        raise UsageError("token ids must be a list of integers") from None
