#!/usr/bin/env python3
"""Record what families read of other values than the tiny models have, in tests/readings.json.

    python scripts/record_readings.py [NAME...]

Without names: all models. A variant of an architecture has only what it does not read as one before. Look at what has
changed: nobody else says whether it is right.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from readings import MODELS, PATH, changed, metadata_of, read, recorded, unlike

from localllm.arch.fields import Fields

# What all families read alike: tests/test_hyperparameters.py has it.
ALIKE = ("context_length", "vocab_size", "nextn_predict_layers", "rope.scaling.attn_factor", "rope.scale_linear",
         "rope.scaling.original_context_length", "rope.scaling.factor", "rope.freq_base",
         "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # fmt: skip
TYPES = "rope.scaling.type"
NO_COUNT = re.compile(r"should be a number from \d+ to 16777216, is (0|missing)$")  # known of all: test_unsaid.py
# What is tried where a model says nothing, by the method that asks for it.
TRIED = {"count": (0, 1, 2), "counts": (0, 1, 2), "number": (0.0, 0.5), "factor": (0.5,), "epsilon": (1e-3,),
         "flag": (False, True), "text": ("x",), "array": ([1, 0, 1],), "whole": (1, 2), "raw": (2,)}  # fmt: skip


class Watched(Fields):
    """Remembers how it was asked."""

    heard: defaultdict[str, list[str]]


def heard_by(method: str) -> Any:
    def ask(self: Watched, name: str, *given: Any, **named: Any) -> Any:
        Watched.heard[name].append(method)
        return getattr(Fields, method)(self, name, *given, **named)

    return ask


for method in TRIED:
    setattr(Watched, method, heard_by(method))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    names, known, seen = parser.parse_args().names, recorded(), set[tuple[str, str, str, str]]()
    for name in MODELS:
        if not names or name in names:
            known[name] = readings(name)
        own = MODELS[name].arch
        known[name] = {key: less for key, found in known[name].items() if (less := new(own, key, found, seen))}
    lines = (f" {json.dumps(name)}: {{{of_keys(known[name])}\n }}" for name in MODELS)
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def of_keys(found: dict[str, Any]) -> str:
    return ",".join(f"\n  {json.dumps(key)}: {json.dumps(values)}" for key, values in found.items())


def new(arch: str, key: str, found: dict[str, Any], seen: set[tuple[str, str, str, str]]) -> dict[str, Any]:
    """What no variant before reads so."""
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
        return [said + 1] if key == "block_count" else sorted({0, abs(said - 1), said + 1, 2 * said} - {said})
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


if __name__ == "__main__":
    main()
