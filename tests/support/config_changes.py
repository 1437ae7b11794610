"""What a config.json of tests/goldens/checkpoints.json says otherwise, and what of it becomes metadata.

config_changes.json has by variant, and by the place of a value in its config.json ("rope_parameters.rope_theta"), pairs
of another value (null: none) and what it changes: by llama.cpp's converter (November 2026, which asks transformers 5.23
for what is unsaid) these metadata, without the architecture in front (null: no longer there); or the message with which
localllm refuses it. Values that localllm does not read are left out, and what it means to read otherwise.
scripts/record/record_config_changes.py makes it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from project import GOLDENS

from localllm.convert.config import Config
from localllm.convert.records import family_of
from localllm.errors import ModelError

PATH = GOLDENS / "config_changes.json"


def with_value(config: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a config.json with another value in that place; None: without it."""
    found = copy.deepcopy(dict(config))
    *around, name = place.split(".")
    inner = found
    for each in around:
        inner = inner[each]
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    return found


def read(content: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the metadata of a config.json, without the architecture in front; or why it is refused."""
    config = Config(content, Path("config.json"))
    try:
        family = family_of(config)
        return dict(family.read(config.text_config(family.defaults)).metadata)
    except ModelError as error:
        return str(error).removeprefix("config.json: ")


def spelled_out(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """With what readers take for granted."""
    heads = metadata.get("attention.head_count") or 1
    usual = (metadata.get("embedding_length") or 0) // (max(heads) if isinstance(heads, list) else heads)
    lengths = {f"attention.{side}_length": usual for side in ("key", "value")}
    said = {key: value for key, value in metadata.items() if value is not None and value is not False and value != 0}
    return {**lengths, "rope.freq_base": 10000.0, **said}


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Metadata that differ, by key: what is found, and what is expected."""
    found, expected = spelled_out(found), spelled_out(expected)
    keys = {**found, **expected}
    return {k: (found.get(k), expected.get(k)) for k in keys if not is_close(found.get(k), expected.get(k))}


def is_close(first: Any, second: Any) -> bool:
    """Whether two values are the same in float32."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_close, first, second))
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return first == second or (numbers and abs(first - second) <= 1e-6 * max(abs(first), abs(second)))
