"""Fill the general.* keys of a GGUF file from a checkpoint's model card, folder name and shapes."""

import logging
import math
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import gguf
import numpy as np

from localllm.convert.config import GENERATION_KEYS, warn_unused
from localllm.convert.files import read_json
from localllm.files.gguf.header import printable
from localllm.generation.sampling.options import OPTIONS, map_names


def build_general_metadata(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], warnings: list[str]
) -> dict[str, object]:
    """Build name, size, license, languages, ... by the rules of the gguf package.

    shapes: of all tensors, by name. Appends a warning if the model card cannot be parsed.
    """
    folder = folder.resolve()
    named: dict[str, object] = {"general.type": "model", "general.name": find_cached_name(folder) or folder.name}
    named["general.size_label"] = format_size(shapes)
    logging.getLogger("metadata").setLevel(logging.CRITICAL)
    config, parameters = read_json(folder / "config.json") or {}, sum(map(prod, shapes.values()))
    try:
        return named | parse_card(folder, gguf.Metadata.load_model_card(folder), config, parameters)
    except MemoryError:
        raise
    except Exception as error:  # the card is free text, and the package fails on some
        problem = printable(" ".join(str(error).split()), 80) or type(error).__name__
        warnings.append(f"README.md: the model card's metadata is invalid ({problem}) and ignored")
    try:
        return named | parse_card(folder, {}, config, parameters)
    except (AttributeError, LookupError, TypeError, ValueError):  # by a config.json with an odd name
        return named


def parse_card(
    folder: Path, card: Mapping[str, object], config: Mapping[str, object], parameters: int
) -> dict[str, object]:
    """Translate the front matter of a model card to GGUF keys. A malformed card can raise any exception."""
    writer = gguf.GGUFWriter(None, "")
    about = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), dict(card), dict(config), folder, parameters)
    about.name = find_cached_name(folder) or about.name
    about.set_gguf_meta_model(writer)
    values = {key: value.value for key, value in writer.kv_data[0].items() if key != gguf.Keys.General.ARCHITECTURE}
    return {key: value for key, value in values.items() if is_plain(value)}


def format_size(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Format the parameter count as "1.5B"; with experts as "8x7B", their count and the size of one."""
    stacks = {name: shape for name, shape in shapes.items() if "_exps." in name and len(shape) == 3}
    experts = sum(prod(shape) // shape[0] for shape in stacks.values())
    dense = sum(prod(shape) for name, shape in shapes.items() if name not in stacks)
    return gguf.size_label(dense + experts, dense, experts, next(iter(stacks.values()))[0] if stacks else 0)


def is_plain(value: object) -> bool:
    """Return whether GGUF can hold a value of the model card: a string, a number, or a list of strings."""
    texts = value if isinstance(value, list) else [value]
    return isinstance(value, int) or (bool(texts) and all(isinstance(text, str) for text in texts))


def find_cached_name(folder: Path) -> str | None:
    """Return the model's name from the path of Hugging Face's cache, where folders are named by a hash.

    None for a folder outside the cache.
    """
    match = re.fullmatch(r"models--(?:.+--)?(.+)", folder.parent.parent.name)
    return match[1] if match and folder.parent.name == "snapshots" else None


FILE = "generation_config.json"
FLOAT32, INT32 = np.float32, np.int32
# Names in generation_config.json: GGUF's keys and types, as llama.cpp's converter writes them.
KEYS: dict[str, tuple[str, type]] = {
    name: (OPTIONS[own].key, INT32 if OPTIONS[own].kind is int else FLOAT32)
    for name, own in map_names("transformers", OPTIONS).items()
}
SEQUENCE = "sequence"  # order of samplers, a string


def translate_sampling(content: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Translate generation_config.json to GGUF keys.

    Returns them with warnings about settings that are invalid or have no key.
    """
    metadata: dict[str, object] = {}
    warnings: list[str] = []
    if isinstance(content.get(SEQUENCE), str):
        metadata["general.sampling.sequence"] = content[SEQUENCE]
    for name, (key, kind) in KEYS.items():
        value = content.get(name)
        if value is None:
            continue
        if fits_type(kind, value):
            metadata[f"general.sampling.{key}"] = kind(value)
        else:
            expected = "a whole number" if kind is INT32 else "a number"
            warnings.append(f"{FILE}: {name} must be {expected} (found {printable(str(value), 40)}); it is ignored")
    return metadata, warnings + warn_unused(FILE, content, {*KEYS, SEQUENCE}, GENERATION_KEYS)


def fits_type(kind: type, value: object) -> bool:
    """Return whether a JSON value is a finite number within the range of INT32 or FLOAT32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return abs(value) < 1e38 if kind is FLOAT32 else value == int(value) and abs(value) < 1 << 31
