"""What a checkpoint says about itself: the general.* keys of a GGUF file."""

import logging
import re
from pathlib import Path
from typing import Any

import gguf


def description(folder: Path, parameters: int) -> dict[str, Any]:
    """Name, size, license, languages, ... out of the model card and the folder's name, by the gguf package's rules."""
    folder = folder.resolve()
    named = {"general.type": "model", "general.name": cached_name(folder) or folder.name}
    named["general.size_label"] = gguf.size_label(parameters, parameters, 0, 0)
    logging.getLogger("metadata").setLevel(logging.CRITICAL)
    writer = gguf.GGUFWriter(None, "")
    try:
        card = gguf.Metadata.load(model_path=folder, total_params=parameters)
        card.name = cached_name(folder) or card.name
        card.set_gguf_meta_model(writer)
    except Exception:  # the card is free text, and the package trips over some of it
        return named
    values = {key: value.value for key, value in writer.kv_data[0].items() if key != gguf.Keys.General.ARCHITECTURE}
    return named | {key: value for key, value in values.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """What a model card may say: a text, a number, or texts."""
    texts = value if isinstance(value, list) else [value]
    return isinstance(value, int) or (bool(texts) and all(isinstance(text, str) for text in texts))


def cached_name(folder: Path) -> str | None:
    """The model's name, if the folder is one of Hugging Face's cache, whose own name is a hash."""
    match = re.fullmatch(r"models--(?:.+--)?(.+)", folder.parent.parent.name)
    return match[1] if match and folder.parent.name == "snapshots" else None
