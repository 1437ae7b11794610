"""The hyperparameters that a family reads of a config.json with one changed value (tests/goldens/checkpoints.json)."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoint import spelled_out
from config_changes import with_value
from project import GOLDENS
from readings import MANY, rounded

from localllm.convert.config import CheckpointConfig
from localllm.convert.folder import detect_expert_packing
from localllm.convert.records import find_family
from localllm.convert.tensor_mapping import list_origins
from localllm.errors import ModelError

PATH = GOLDENS / "config_readings.json"
CHECKPOINTS = json.loads((GOLDENS / "checkpoints.json").read_text(encoding="utf-8"))


def facts_of(variant: str) -> dict[str, Any]:
    """Return a variant's facts; "-old" variants only list differences."""
    content = CHECKPOINTS[variant]
    return {**CHECKPOINTS.get(content.get("like", ""), {}), **content}


def changed(config: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a config.json with a value changed, or removed if None; drop lists by layer for MANY layers."""
    config_changed = with_value(config, place, value)
    if place.endswith("num_hidden_layers") and value == MANY:
        inner = config_changed.get("text_config", config_changed)
        for each in [key for key, values in inner.items() if isinstance(values, list) and key != "architectures"]:
            del inner[each]
    return config_changed


def read_all(variant: str, content: Mapping[str, Any]) -> dict[str, Any] | str:
    """Read a config.json, or return why it is refused.

    Metadata, sizes of matrices, numbers that only GGUF has, warnings, and tensors ("*": the number of layers without
    any; "?": one that may be missing).
    """
    config = CheckpointConfig(content, Path("config.json"))
    try:
        family = find_family(config)
        h = family.read(config := config.merge_text_config(family.defaults))
    except ModelError as error:
        return str(error).removeprefix("config.json: ")
    readings = {**h.metadata, **{f"sizes.{name}": size for name, size in h.sizes.items()}}
    readings |= {name: [*numbers.shape, float(numbers.sum(dtype="f8"))] for name, numbers in h.tensors.items()}
    readings |= {f"factors.{name}": [float(each.sum()) for each in factors] for name, factors in h.factors.items()}
    readings |= {"tied": h.tied, "warnings": config.warnings}
    width, shapes = h.sizes["width"], spelled_out(facts_of(variant)["shapes"])
    tensors: dict[str, Any] = {name: SimpleNamespace(shape=tuple(shape)) for name, shape in shapes.items()}
    h = h.update({"packed": detect_expert_packing(tensors, width)})
    wanted = list_origins(family, h.sizes, h.tied)
    counts = Counter(re.sub(r"blk\.\d+\.", "*", name) + ("" if at.needed else "?") for name, at in wanted.items())
    readings |= {name: h.sizes["layers"] - count if "*" in name else "once" for name, count in counts.items()}
    return {name: rounded(value) for name, value in readings.items()}


def unlike(readings: dict[str, Any] | str, usual: dict[str, Any]) -> dict[str, Any] | str:
    """Return the differences from the usual readings; null: no longer there."""
    if isinstance(readings, str):
        return readings
    return {name: readings.get(name) for name in {**usual, **readings} if readings.get(name) != usual.get(name)}


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the recorded readings by variant, path in its config.json, and value (as JSON)."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
