"""Tensors of other parts that a language model's file may hold, as in Ollama's store.

They do not change its texts.
"""

from collections.abc import Iterable

from localllm.files.gguf.header import printable
from localllm.files.oddities import Oddities

PARTS = {"v": "vision", "mm": "vision", "a": "audio", "mtp": "draft layers"}  # by the beginning of their names


def part_of(name: str) -> str | None:
    """Name the part that a tensor belongs to, None for the language model."""
    beginning, point, _ = name.partition(".")
    return PARTS.get(beginning) if point else None


def without_other_parts(names: Iterable[str], oddities: Oddities) -> list[str]:
    """Leave out the tensors of other parts, and note that they are there."""
    others = {name: part for name in names if (part := part_of(name))}
    if others:
        parts = " and ".join(sorted(set(others.values())))
        oddities.note(f"{len(others)} tensors of {parts}, which are not used ({printable(next(iter(others)))})")
    return [name for name in names if name not in others]
