"""Changed values of the config.json in tests/goldens/checkpoints.json, and the metadata they become.

config_changes.json has, by variant and path in its config.json ("rope_parameters.rope_theta"), a list of another value
(null: none) and its effect: the metadata that llama.cpp's converter writes (November 2026, which asks transformers 5.23
for missing values), without the architecture's prefix (null: no longer there); or the message of its
refusal. Values that localllm does not read, or reads otherwise on purpose, are left out.
scripts/record/record_config_changes.py writes it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from project import GOLDENS

from localllm.convert.config import CheckpointConfig
from localllm.convert.records import find_family
from localllm.errors import ModelError

PATH = GOLDENS / "config_changes.json"


def with_value(config: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a config.json with a value changed, or removed if None."""
    changed = copy.deepcopy(dict(config))
    *around, name = place.split(".")
    inner = changed
    for each in around:
        inner = inner[each]
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    return changed


def read(content: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the metadata of a config.json without the architecture's prefix, or why it is refused."""
    config = CheckpointConfig(content, Path("config.json"))
    try:
        family = find_family(config)
        return dict(family.read(config.merge_text_config(family.defaults)).metadata)
    except ModelError as error:
        return str(error).removeprefix("config.json: ")


def spelled_out(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults that readers assume."""
    heads = metadata.get("attention.head_count") or 1
    usual = (metadata.get("embedding_length") or 0) // (max(heads) if isinstance(heads, list) else heads)
    lengths = {f"attention.{side}_length": usual for side in ("key", "value")}
    metadata_set = {
        key: value for key, value in metadata.items() if value is not None and value is not False and value != 0
    }
    return {**lengths, "rope.freq_base": 10000.0, **metadata_set}


def unlike(metadata: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the metadata that differ, by key: (found, expected)."""
    metadata, expected = spelled_out(metadata), spelled_out(expected)
    keys = {**metadata, **expected}
    return {k: (metadata.get(k), expected.get(k)) for k in keys if not is_close(metadata.get(k), expected.get(k))}


def is_close(first: Any, second: Any) -> bool:
    """Return whether two values are equal in float32."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_close, first, second))
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return first == second or (numbers and abs(first - second) <= 1e-6 * max(abs(first), abs(second)))
