#!/usr/bin/env python3
"""Record how families read other values than those of tiny models and checkpoints.

Writes tests/goldens/readings.json and tests/goldens/config_readings.json.

    python scripts/record/record_metadata_variants.py [NAME...]

Without names: all of them. Of a config.json, what tests/goldens/config_changes.json has by llama.cpp is left out. A
variant of an architecture has only what it does not read as one before. Look at what has changed: nobody else says
whether it is right.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import config_readings
from config_changes import PATH as CHANGES
from config_readings import facts_of, read_all
from readings import KINDS, MANY, PATH, SEEING, changed, metadata_of, read, recorded, unlike

from localllm.arch.metadata import HyperparameterReader
from localllm.convert.config import CheckpointConfig
from tests.unit.convert.projectors.test_projectors import CHECKPOINTS, read_projector, small_files

# What all families read alike: tests/unit/arch/test_hyperparameters.py has it.
ALIKE = ("context_length", "vocab_size", "nextn_predict_layers", "rope.scaling.attn_factor", "rope.scale_linear",
         "rope.scaling.original_context_length", "rope.scaling.factor", "rope.freq_base",
         "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # fmt: skip
TYPES = "rope.scaling.type"
# Known of all: tests/goldens/test_optional_fields.py.
NO_COUNT = re.compile(r"must be a number from \d+ to 16777216 \(found (0|missing)\)$")
# What is tried where a model says nothing, by the method that asks for it.
TRIED = {"count": (0, 1, 2), "counts": (0, 1, 2), "number": (0.0, 0.5), "factor": (0.5,), "epsilon": (1e-3,),
         "flag": (False, True), "text": ("x",), "array": ([1, 0, 1],), "whole": (1, 2), "raw": (2,)}  # fmt: skip


OTHERWISE = "architectures", "model_type", "auto_map", "vision_config", "text_config"  # what these say is the model
# The same of a config.json, where other values are known of config_changes.json.
UNSAID = {"count": (1, 2), "number": (2.0,), "flag": (False, True), "get": (1,)}
BEYOND = "sizes.", "factors.", "tied", "warnings", "rope_"  # what config_changes.json does not have
FEW = 4  # of which one less is tried, too


class Watched(HyperparameterReader):
    """Remembers how it was asked."""

    heard: defaultdict[str, list[str]]


def heard_by(method: str) -> Any:
    def ask(self: Watched, name: str, *given: Any, **named: Any) -> Any:
        Watched.heard[name].append(method)
        return getattr(HyperparameterReader, method)(self, name, *given, **named)

    return ask


for method in TRIED:
    setattr(Watched, method, heard_by(method))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names, changes = parser.parse_args().names, json.loads(CHANGES.read_text(encoding="utf-8"))
    record(PATH, names, recorded(), KINDS, readings)
    configs = {**{f"{SEEING}{name}": config for name, (config, _) in CHECKPOINTS.items()},
               **{variant: facts_of(variant)["config"] for variant in config_readings.CHECKPOINTS}}  # fmt: skip
    kinds = {name: str(config.get("architectures")) for name, config in configs.items()}
    with tempfile.TemporaryDirectory() as folder:
        of_pictures = partial(read_projector, small_files(Path(folder)))

        def found(name: str) -> dict[str, dict[str, Any]]:
            read = of_pictures if name.startswith(SEEING) else partial(read_all, name)
            return of_config(configs[name], read, changes.get(name, {}))

        record(config_readings.PATH, names, config_readings.recorded(), kinds, found)


def record(
    path: Path, names: list[str], known: dict[str, Any], kinds: dict[str, str], found: Callable[[str], Any]
) -> None:
    """Write what is known and found; kinds: the architecture of each name."""
    seen = set[tuple[str, str, str, str]]()
    for name, kind in kinds.items():
        if not names or name in names:
            known[name] = found(name)
        known[name] = {key: less for key, values in known[name].items() if (less := new(kind, key, values, seen))}
    lines = (f" {json.dumps(name)}: {{{of_keys(known[name])}\n }}" for name in kinds)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def of_keys(found: dict[str, Any]) -> str:
    return ",".join(f"\n  {json.dumps(key)}: {json.dumps(values)}" for key, values in found.items())


def new(arch: str, key: str, found: dict[str, Any], seen: set[tuple[str, str, str, str]]) -> dict[str, Any]:
    """Return the readings that no earlier variant has."""
    left = {value: what for value, what in found.items() if (arch, key, value, json.dumps(what)) not in seen}
    seen |= {(arch, key, value, json.dumps(what)) for value, what in left.items()}
    return left


def readings(name: str) -> dict[str, dict[str, Any]]:
    """By hyperparameter and value, what is read that is not as usual."""
    metadata, found = metadata_of(name), defaultdict[str, dict[str, Any]](dict)
    Watched.heard = defaultdict(list)
    usual = read(name, metadata, Watched)
    assert isinstance(usual, dict), f"{name}: {usual}"
    for key, methods in sorted(Watched.heard.items()):
        for value in others(key, metadata.get(key), methods):
            what = unlike(read(name, changed(metadata, key, value)), usual)
            if not (isinstance(what, str) and NO_COUNT.search(what)):
                found[key][json.dumps(value)] = what
    return dict(found)


def others(key: str, said: Any, methods: list[str]) -> Iterator[Any]:
    """Other values, as JSON has them; None for none."""
    if key in ALIKE:
        return
    if key == TYPES:
        yield from ("yarn", "longrope")
    elif said is None:
        yield from TRIED[next((method for method in methods if method != "raw"), "raw")]
    else:
        yield from (None, *near(key, said))


def near(key: str, said: Any) -> list[Any]:
    if isinstance(said, bool):
        return [not said]
    if isinstance(said, int):
        return [said + 1, MANY] if key == "block_count" else sorted({0, abs(said - 1), said + 1, 2 * said} - {said})
    if isinstance(said, float):
        return [0.0, 2 * said] if said else [0.5]
    if isinstance(said, np.ndarray):
        return [with_other(said, 0), with_other(said, -1), said[:-1].tolist(), said[0].item()]
    return ["other"]


def with_other(said: np.ndarray, place: int) -> list[Any]:
    """With another number at a place."""
    numbers = said.tolist()
    numbers[place] = not numbers[place] if isinstance(numbers[place], bool) else numbers[place] + 1
    return numbers


def of_config(
    config: Mapping[str, Any], read: Callable[[Any], Any], changes: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the same of a config.json, by places in it."""
    found = defaultdict[str, dict[str, Any]](dict)
    usual, asked = read_and_asked(read, config)
    for place, value in other_values(config, asked, usual):
        what = config_readings.unlike(read(config_readings.changed(config, place, value)), usual)
        is_known = any(json.dumps(other) == json.dumps(value) for other, _ in changes.get(place, ()))
        is_more = isinstance(what, dict) and any(name.startswith(BEYOND) or ".weight" in name for name in what)
        if (what != {} or value is None) and (is_more or not is_known):
            found[place][json.dumps(value)] = what
    return dict(found)


def read_and_asked(read: Callable[[Any], Any], config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the readings, and how each name of config.json was read."""
    asked, usual = dict[str, str](), {kind: getattr(CheckpointConfig, kind) for kind in (*UNSAID, "only", "numbers")}

    def asking(kind: str) -> Any:
        def ask(self: CheckpointConfig, name: str, *rest: Any, **more: Any) -> Any:
            asked.setdefault(name, kind)
            return usual[kind](self, name, *rest, **more)

        return ask

    for kind in usual:
        setattr(CheckpointConfig, kind, asking(kind))
    try:
        found = read(config)
    finally:
        for kind, method in usual.items():
            setattr(CheckpointConfig, kind, method)
    assert isinstance(found, dict), found
    return found, asked


def other_values(
    config: Mapping[str, Any], asked: Mapping[str, str], usual: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Places and other values of what is asked for; None for no value."""
    sees = "projector_type" in usual
    said = [*places(config, sees)]
    for place, value in said:
        if place.rpartition(".")[2] in asked:
            many = [MANY] if place.endswith("num_hidden_layers") else []
            yield from ((place, other) for other in (None, *unlike_said(value), *many))
    names, within = (
        {place.rpartition(".")[2] for place, _ in said},
        "vision_config." if sees else "text_config." if "text_config" in config else "",
    )
    for name in sorted(asked.keys() - names - {*OTHERWISE}):
        yield from ((within + name, other) for other in UNSAID.get(asked[name], ()))


def places(config: Mapping[str, Any], sees: bool, before: str = "") -> Iterator[tuple[str, Any]]:
    """All values in a config.json, and objects of values, with their places."""
    for name, value in config.items():
        if name not in OTHERWISE:
            yield before + name, value
        if isinstance(value, dict) and (sees or name != "vision_config"):
            yield from places(value, sees, f"{before}{name}.")


def unlike_said(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1] if value <= FEW else [value + 1]
    if isinstance(value, list) and value:
        return [value[:-1], [*value[:1], *value]]
    return [2 * value] if isinstance(value, float) else ["other"] if isinstance(value, str) else []


if __name__ == "__main__":
    main()
