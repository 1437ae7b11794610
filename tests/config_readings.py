"""What a family reads of a config.json of tests/checkpoints.json in which one value is another one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readings import rounded

from localllm.convert.config import Config
from localllm.convert.families import family_of
from localllm.errors import ModelError

PATH = Path(__file__).with_name("config_readings.json")
CHECKPOINTS = json.loads(Path(__file__).with_name("checkpoints.json").read_text(encoding="utf-8"))


def config_of(variant: str) -> dict[str, Any]:
    """Its config.json; an "-old" one has only what is not as in another."""
    content = CHECKPOINTS[variant]
    return {**CHECKPOINTS.get(content.get("like", ""), {}), **content}["config"]


def read_all(content: Mapping[str, Any]) -> dict[str, Any] | str:
    """Metadata, sizes of matrices, numbers that only GGUF has, and warnings; or why it is refused."""
    config = Config(content, Path("config.json"))
    try:
        family = family_of(config)
        h = family.read(config := config.of_text(family.defaults))
    except ModelError as error:
        return str(error).removeprefix("config.json: ")
    found = {**h.metadata, **{f"sizes.{name}": size for name, size in h.sizes.items()}}
    found |= {name: [*numbers.shape, float(numbers.sum(dtype="f8"))] for name, numbers in h.tensors.items()}
    found |= {f"factors.{name}": [float(each.sum()) for each in factors] for name, factors in h.factors.items()}
    found |= {"tied": h.tied, "warnings": config.warnings}
    return {name: rounded(value) for name, value in found.items()}


def unlike(found: dict[str, Any] | str, usual: dict[str, Any]) -> dict[str, Any] | str:
    """What is not as usual; null: no longer there."""
    if isinstance(found, str):
        return found
    return {name: found.get(name) for name in {**usual, **found} if found.get(name) != usual.get(name)}


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """By variant, place in its config.json, and value (as JSON): what is read."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
