"""Derive the general.* keys of a GGUF file from a checkpoint's model card and folder name."""

import logging
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf

SAMPLING = "general.sampling."  # sampling.py reads them


def description(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Build name, size, license, languages, ... by the gguf package's rules.

    shapes: of the tensors, by name.
    """
    parameters = sum(map(prod, shapes.values()))
    folder = folder.resolve()
    named = {"general.type": "model", "general.name": cached_name(folder) or folder.name}
    named["general.size_label"] = size_label(shapes)
    logging.getLogger("metadata").setLevel(logging.CRITICAL)
    writer = gguf.GGUFWriter(None, "")
    try:
        card = gguf.Metadata.load(model_path=folder, total_params=parameters)
        card.name = cached_name(folder) or card.name
        card.set_gguf_meta_model(writer)
    except MemoryError:
        raise
    except Exception:  # the card is free text, and the package fails on some
        return named
    values = {key: value.value for key, value in writer.kv_data[0].items() if key != gguf.Keys.General.ARCHITECTURE}
    return named | {key: value for key, value in values.items() if is_plain(value) and not key.startswith(SAMPLING)}


def size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Format the number of parameters as "1.5B"; with experts, as "8x7B": their number and the size of one."""
    stacks = {name: shape for name, shape in shapes.items() if "_exps." in name and len(shape) == 3}
    experts = sum(prod(shape) // shape[0] for shape in stacks.values())
    others = sum(prod(shape) for name, shape in shapes.items() if name not in stacks)
    return gguf.size_label(others + experts, others, experts, next(iter(stacks.values()))[0] if stacks else 0)


def is_plain(value: Any) -> bool:
    """Tell whether a value from the model card is a string, a number, or a list of strings."""
    texts = value if isinstance(value, list) else [value]
    return isinstance(value, int) or (bool(texts) and all(isinstance(text, str) for text in texts))


def cached_name(folder: Path) -> str | None:
    """Derive the model's name from a folder of Hugging Face's cache, whose own name is a hash; None elsewhere."""
    match = re.fullmatch(r"models--(?:.+--)?(.+)", folder.parent.parent.name)
    return match[1] if match and folder.parent.name == "snapshots" else None
