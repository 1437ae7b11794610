#!/usr/bin/env python3
"""Record what files need not say, by llama.cpp, in tests/goldens/unsaid.json.

    python scripts/record/record_optional_fields.py --peer-python PEER/bin/python [NAME...]

PEER as for record_goldens.py. Each hyperparameter of a tiny model is left out: llama.cpp does not open it then, or
computes the same logits, or others, which the reference has to compute as well; and so is each tensor of all layers.
Without names: all models that are not there yet. Prints where the two differ, which is not recorded: look at it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from record_goldens import ROOT, logits

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "support"))
from models import DECLARATIONS, Model, model, write
from models.golden import LONG, Golden, context_for, kept

from localllm.arch import load_architecture
from localllm.arch.metadata import HyperparameterReader
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile
from tests.goldens.test_optional_fields import NEAR, READ, SOME, last_logits, of_any_layer, read

PATH = ROOT / "tests" / "goldens" / "unsaid.json"
SAME, CLOSE = 1e-5, 0.05  # of logits: those of GELU are looked up in a table, which adds up
BY_SIZE = ("vocab_size",)  # what llama.cpp counts itself
ALWAYS = (0, 1, 0.0, 1.0, 10000.0, False, True)  # what may be meant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("names", nargs="*", choices=[[], *DECLARATIONS], metavar="NAME")
    options = parser.parse_args()
    known = json.loads(PATH.read_text())
    for name in options.names or [name for name in DECLARATIONS if name not in (*known, *LONG)]:
        with tempfile.TemporaryDirectory() as folder:
            known[name] = recorded(name, Path(folder), options.peer_python)
        print(name, {kind: len(keys) for kind, keys in known[name].items()}, file=sys.stderr, flush=True)
    lines = (f" {json.dumps(name)}: {json.dumps(known[name])}" for name in DECLARATIONS if name in known)
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def recorded(name: str, folder: Path, peer: str) -> dict[str, Any]:
    """Return the metadata that a model may leave out, and what it may not."""
    made, golden = model(name), Golden.load(name)
    file = GGUFFile.open(write(made, folder / "whole.gguf"))
    usual, found = (
        load_architecture(file)[1],
        {"idle": [], "as": {}, "needed": [], "without": with_less(name, folder, peer)},
    )
    for key in [key.removeprefix(f"{made.arch}.") for key in made.metadata if key.startswith(f"{made.arch}.")]:
        if key in BY_SIZE:
            continue
        theirs = last_row(without(made, key), golden, folder, peer)
        try:
            h = read(file, key)
        except LocalllmError as error:
            if theirs is None:
                found["needed"].append(key)
            else:
                print(f"{name} {key}: only llama.cpp opens it: {error}")
            continue
        if theirs is None:
            continue
        is_same = np.abs(theirs - golden.prefill[-1]).max() < SAME
        if h == usual and is_same:
            found["idle"].append(key)
        elif is_same or h == usual or np.abs(ours(file, made, key, golden) - theirs).max() > CLOSE:
            print(f"{name} {key}: other logits than llama.cpp's")
        elif (value := next(meant(file, key, h), None)) is not None:
            found["as"][key] = value
        else:
            print(f"{name} {key}: no number says the same")
    return found


def with_less(name: str, folder: Path, peer: str) -> dict[str, list[float]]:
    """Logits without tensors that a model may lack, by what these are called in a layer."""
    made, found = model(name), dict[str, list[float]]()
    tokens = Golden.load(name).tokens[:READ]
    file = GGUFFile.open(write(made, folder / "whole.gguf"))
    for kind in dict.fromkeys(map(of_any_layer, made.tensors)):
        less = replace(made, tensors={k: v for k, v in made.tensors.items() if of_any_layer(k) != kind})
        rows = logits(less, tokens.tolist(), [], folder, peer)
        try:
            other = last_logits(file, kind, tokens)
        except LocalllmError as error:
            if rows is not None:
                print(f"{name} {kind}: only llama.cpp opens it: {error}")
            continue
        if rows is None:
            continue
        theirs = kept(rows["prefill"])[-1][SOME]
        if np.abs(other - theirs).max() < NEAR:
            found[kind] = [round(float(x), 4) for x in theirs]
        else:
            print(f"{name} {kind}: other logits than llama.cpp's")
    return found


def without(made: Model, key: str) -> Model:
    return replace(made, metadata={k: value for k, value in made.metadata.items() if k != f"{made.arch}.{key}"})


def last_row(made: Model, golden: Golden, folder: Path, peer: str) -> np.ndarray | None:
    """llama.cpp's logits behind the prompt; None if it does not open the file."""
    found = logits(made, golden.tokens.tolist(), [], folder, peer)
    return None if found is None else kept(found["prefill"])[-1]


def ours(file: GGUFFile, made: Model, key: str, golden: Golden) -> np.ndarray:
    """Return the same by the reference."""
    metadata = file.metadata
    file.metadata = {k: value for k, value in metadata.items() if k != f"{made.arch}.{key}"}
    engine = Engine(file, EngineOptions(1, context_for(len(golden.tokens)), "f32", "reference"))
    rows = engine.sequence().append(golden.tokens, "all")
    engine.close()
    file.metadata = metadata
    return kept(rows)[-1]


def meant(file: GGUFFile, key: str, h: Any) -> Iterator[Any]:
    """Values that say the same as nothing: of those that are asked for where there is none."""
    for value in (*asking(lambda: read(file, key), key), *ALWAYS):
        try:
            if value is not None and read(file, key, value) == h:
                yield value
        except LocalllmError:
            continue


def asking(reads: Callable[[], Any], key: str) -> Iterator[Any]:
    """Return the defaults with which a key is asked for."""
    found, raw = list[Any](), HyperparameterReader.read_raw

    def ask(self: HyperparameterReader, name: str, default: Any = None) -> Any:
        if name == key and isinstance(default, int | float):
            found.append(default)
        return raw(self, name, default)

    HyperparameterReader.read_raw = ask  # type: ignore[method-assign]
    try:
        reads()
    finally:
        HyperparameterReader.read_raw = raw  # type: ignore[method-assign]
    return iter(found)


if __name__ == "__main__":
    main()
