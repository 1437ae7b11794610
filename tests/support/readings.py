"""The hyperparameters that a family reads of a tiny model's metadata with one changed value."""

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
from models import ANSWERING, DECLARATIONS, ENCODERS, MASKED, PARTLY
from models.declaration import dims_of, fields
from models.projectors import PROJECTORS, projector
from project import GOLDENS

from localllm.arch import ARCHITECTURES
from localllm.arch.metadata import HyperparameterReader, require_types
from localllm.arch.vision import FAMILIES
from localllm.arch.vision.hyperparameters import VisionHyperparameters
from localllm.errors import ModelError

PATH = GOLDENS / "readings.json"
MODELS = {**DECLARATIONS, **MASKED, **ENCODERS, **ANSWERING, **PARTLY}
SEEING = "picture_"  # before the names of projectors
# The families of all: of projectors by their types.
KINDS = {
    **{name: model.arch for name, model in MODELS.items()},
    **{f"{SEEING}{name}": projector.kind for name, projector in PROJECTORS.items()},
}
NUMBERS = {"i": np.int32, "f": np.float32}  # of arrays, as files have them
FACTOR = 4.0  # of yarn, which needs one
FEW = 4
MANY = 13  # layers: more than any period has, and then no list says how each is

Metadata = dict[str, Any]
Facts = dict[str, Any]


def metadata_of(name: str) -> Metadata:
    """Return a model's metadata as in a file, without the architecture's prefix."""
    if name.startswith(SEEING):
        metadata = projector(name.removeprefix(SEEING)).metadata
        return {key.removeprefix("clip."): in_file(value) for key, value in metadata.items() if key.startswith("clip.")}
    declaration = MODELS[name]
    metadata = fields(declaration, dims_of(declaration), dict(declaration.dims))
    return {key.removeprefix(f"{declaration.arch}."): in_file(value) for key, value in metadata.items()}


def in_file(value: Any) -> Any:
    """Return a value as it is read from a file."""
    if not isinstance(value, list | tuple) or not value or isinstance(value[0], str):
        return value
    array = np.asarray(value)
    return array.astype(NUMBERS.get(array.dtype.kind, array.dtype))


def changed(metadata: Metadata, key: str, value: Any) -> Metadata:
    """Return metadata with a value changed, or removed if None."""
    more: dict[str, Any] = {"rope.scaling.factor": FACTOR} if value == "yarn" else {}
    if (key, value) == ("block_count", MANY):
        more = {name: None for name, each in metadata.items() if isinstance(each, np.ndarray)}
    return {k: v for k, v in {**metadata, **more, key: in_file(value)}.items() if v is not None}


def read(name: str, metadata: Metadata, of: type[HyperparameterReader] = HyperparameterReader) -> Facts | str:
    """Return a family's reading of the metadata, or why it refuses them."""
    if name.startswith(SEEING):
        arch, vocab, module = "clip", 0, f"arch.vision.{FAMILIES[KINDS[name]]}"
    else:
        arch, vocab, module = KINDS[name], dims_of(MODELS[name]).vocab, f"arch.families.{ARCHITECTURES[KINDS[name]]}"
    bare = ("xielu.", "tokenizer.")
    named = {key if key.startswith(bare) else f"{arch}.{key}": value for key, value in metadata.items()}
    named["general.architecture"] = arch
    try:
        if arch != "clip":
            require_types(HyperparameterReader(named, "", vocab))
        return facts(import_module(f"localllm.{module}").read(of(named, "", vocab)))
    except ModelError as error:
        return str(error).replace(f"{arch}.", "")


def facts(h: Any) -> Facts:
    """Return hyperparameters by name, with derived facts: states, windows and rotation of layers."""
    values = {name: value for name, value in flat(h) if name not in ("windows", "chunks")}
    values["states"] = " ".join(kept_by(state) for state in h.list_states())
    if callable(getattr(h, "get_rope", None)):
        values["bases"] = [rounded((rope := h.get_rope(layer)) and rope.base) for layer in range(h.layers)]
    if isinstance(h, VisionHyperparameters):
        sizes = ("row_width", "max_patches", "max_grid", "input_width", "head_dim", "uses_rms_norm")
        values |= {name: rounded(getattr(h, name)) for name in sizes}
        values["windowed"] = [layer for layer in range(h.layers) if h.is_windowed(layer)]
    return {**values, "scale": rounded(getattr(h, "scale", None))}


def kept_by(state: Any) -> str:
    """Return a state's type, layer and window."""
    return f"{type(state).__name__[0]}{state.layer}{f':{window}' if (window := getattr(state, 'window', None)) else ''}"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, also of nested records."""
    if hasattr(value, "__dataclass_fields__"):
        for field in value.__dataclass_fields__:
            yield from flat(getattr(value, field), f"{name}.{field}" if name else field)
    elif isinstance(value, tuple | list) and any(hasattr(item, "__dataclass_fields__") for item in value):
        for number, item in enumerate(value):
            yield from flat(item, f"{name}.{number}")
    else:
        yield name, rounded(value)


def rounded(value: Any) -> Any:
    """Round to six digits as JSON holds them, and shorten."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, tuple | list) and len(value) > FEW and all(item == value[0] for item in value):
        return f"{len(value)} times {rounded(value[0])}"
    if isinstance(value, tuple | list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def unlike(readings: Facts | str, usual: Facts) -> Facts | str:
    """Return the readings that differ from defaults."""
    if isinstance(readings, str):
        return readings
    return {name: value for name, value in readings.items() if name not in usual or value != usual[name]}


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the recorded readings by model, hyperparameter and value (as JSON)."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
