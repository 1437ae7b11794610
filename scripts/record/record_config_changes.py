#!/usr/bin/env python3
"""Record what other values in config.json change in metadata, in tests/goldens/config_changes.json.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py PYTHON scripts/record/record_config_changes.py [NAME...]

PYTHON and LLAMA_CPP as for record_checkpoints.py, whose models it takes (NAME: only these; the others stay as they
are). Each value that localllm reads is left out, and changed; what localllm asks for and config.json does not say is
said. Prints where localllm makes something else of it than llama.cpp's converter, which is not recorded: look at it.
"""

import argparse
import copy
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import conversion  # llama.cpp's
import gguf
from record_checkpoints import AS_IT_IS, ROOT, WITH_MTP, written

sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]
from checkpoint import spelled_out, write_family, write_json  # noqa: E402
from config_changes import PATH, read, unlike, with_value  # noqa: E402

from localllm.convert.config import CheckpointConfig  # noqa: E402

OTHERWISE = "architectures", "model_type", "auto_map", "vision_config", "text_config"  # what these say is the model
ODD = "unheard_of"
KINDS = {"count": 3, "number": 0.5, "only": ODD, "get": 3, "flag": None}  # how a value is asked for, and another one


def main() -> None:
    logging.disable()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    models = json.loads((ROOT / "tests" / "goldens" / "checkpoints.json").read_text())
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name in options.names or models:
        model = {**models.get(models[name].get("like", ""), {}), **models[name]}
        known.pop(name, None)
        if found := recorded(name, model):
            known[name] = found
        print(name, sum(map(len, found.values())), file=sys.stderr, flush=True)
    PATH.write_text(written({name: known[name] for name in models if name in known}), encoding="utf-8")


def recorded(name: str, model: Mapping[str, Any]) -> dict[str, list[tuple[Any, Any]]]:
    """All changes of one config.json, by place."""
    config, found = model["config"], dict[str, list[tuple[Any, Any]]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_family(Path(temporary, "model"), config, spelled_out(model["shapes"]))
        theirs, (ours, asked) = converted(folder, config), read_and_asked(config)
        if theirs is None or isinstance(ours, str):
            print(f"{name}: {'llama.cpp does not convert it' if theirs is None else ours}")
            return {}
        said = {place for place, _ in values(config)}
        for place, value in [*changes(config, asked)]:
            outcome = compared(f"{name} {place} = {value}", folder, with_value(config, place, value), theirs, ours)
            if outcome or (outcome == {} and place in said):
                found.setdefault(place, []).append((value, outcome))
    return found


def compared(
    what: str, folder: Path, config: Mapping[str, Any], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any] | str | None:
    """Return the result of a change, None if it should not be recorded; theirs, ours: metadata without it."""
    found, other = read(config), converted(folder, config)
    if isinstance(found, str):
        return found
    if other is None:
        print(f"{what}: only localllm converts it")
        return None
    changed = {key: other.get(key) for key in {**theirs, **other} if other.get(key) != theirs.get(key)}
    if odd := unlike(found, {**ours, **changed}):
        print(f"{what}: {odd}, llama.cpp's converter: {changed}")
        return None
    return changed


def read_and_asked(config: Mapping[str, Any]) -> tuple[dict[str, Any] | str, dict[str, Any]]:
    """Metadata, and what was asked for in config.json: by name, another value of its kind."""
    asked, usual = dict[str, Any](), {kind: getattr(CheckpointConfig, kind) for kind in KINDS}

    def asking(kind: str) -> Any:
        def ask(self: CheckpointConfig, name: str, *rest: Any, **more: Any) -> Any:
            default = (rest or (False,))[0]
            asked.setdefault(name, not default if kind == "flag" else KINDS[kind])
            return usual[kind](self, name, *rest, **more)

        return ask

    for kind in usual:
        setattr(CheckpointConfig, kind, asking(kind))
    try:
        return read(config), asked
    finally:
        for kind, method in usual.items():
            setattr(CheckpointConfig, kind, method)


def changes(config: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Places and other values of what is asked for; None for no value."""
    within = "text_config." if "text_config" in config else ""
    for place, value in values(config):
        if place.rpartition(".")[2] in asked:
            yield place, None
            if (other := changed(value)) is not None:
                yield place, other
    said = {place.rpartition(".")[2] for place, _ in values(config)}
    yield from ((within + name, other) for name, other in asked.items() if name not in {*said, *OTHERWISE})


def values(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All values in a config.json, and objects of values, with their places."""
    for name, value in config.items():
        if name not in OTHERWISE:
            yield before + name, value
        if isinstance(value, dict) and name != "vision_config":
            yield from values(value, f"{before}{name}.")


def changed(value: Any) -> Any:
    """Another value of the same kind, None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 1.5 * value or 0.5
    if isinstance(value, str):
        return ODD
    if isinstance(value, list) and value:
        return value[::-1] if value != value[::-1] else [changed(value[0]), *value[1:]]
    return 2 if value is None else None


def converted(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the hyperparameters that llama.cpp's converter makes of a config.json; None if it fails."""
    write_json(folder / "config.json", config)
    kind = (config.get("text_config", {}).get("architectures") or config["architectures"])[0]
    own = {"hparams": copy.deepcopy(config)} if kind in AS_IT_IS else {}
    try:
        made = conversion.get_model_class(kind)
        if kind in WITH_MTP:
            made.no_mtp = b"mtp.fc.weight" not in (folder / "model.safetensors").read_bytes()
        model = made(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", **own)
        model = getattr(model, "impl", model)  # of Mistral's, which is one of several
        model.set_gguf_parameters()
    except Exception:
        return None
    arch = f"{gguf.MODEL_ARCH_NAMES[model.model_arch]}."
    pairs = [(key, field.value) for shard in model.gguf_writer.kv_data for key, field in shard.items()]
    return {key.removeprefix(arch): value for key, value in pairs if key.startswith(arch)}


if __name__ == "__main__":
    main()
