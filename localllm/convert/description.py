"""What a checkpoint says about itself: the general.* keys of a GGUF file."""

import logging
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf

SAMPLING = "general.sampling."  # which sampling.py reads


def description(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Name, size, license, languages, ... out of the model card and the folder's name, by the gguf package's rules.

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
    except Exception:  # the card is free text, and the package trips over some of it
        return named
    values = {key: value.value for key, value in writer.kv_data[0].items() if key != gguf.Keys.General.ARCHITECTURE}
    return named | {key: value for key, value in values.items() if is_plain(value) and not key.startswith(SAMPLING)}


def size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """As "1.5B"; with experts, their number and what one token's share is, as "8x7B"."""
    stacks = {name: shape for name, shape in shapes.items() if "_exps." in name and len(shape) == 3}
    experts = sum(prod(shape) // shape[0] for shape in stacks.values())
    others = sum(prod(shape) for name, shape in shapes.items() if name not in stacks)
    return gguf.size_label(others + experts, others, experts, next(iter(stacks.values()))[0] if stacks else 0)


def is_plain(value: Any) -> bool:
    """What a model card may say: a text, a number, or texts."""
    texts = value if isinstance(value, list) else [value]
    return isinstance(value, int) or (bool(texts) and all(isinstance(text, str) for text in texts))


def cached_name(folder: Path) -> str | None:
    """The model's name, if the folder is one of Hugging Face's cache, whose own name is a hash."""
    match = re.fullmatch(r"models--(?:.+--)?(.+)", folder.parent.parent.name)
    return match[1] if match and folder.parent.name == "snapshots" else None
