"""Translate generation_config.json to the general.sampling.* keys of a GGUF file."""

import math
from collections.abc import Mapping

import numpy as np

from localllm.convert.unused_keys import OF_GENERATION, warn_unused
from localllm.files.gguf.header import printable
from localllm.generation.sampling.declaration import names_for
from localllm.generation.sampling.options import OPTIONS

FILE = "generation_config.json"
FLOAT32, INT32 = np.float32, np.int32
# Names in generation_config.json: GGUF's keys and types, as llama.cpp's converter writes them.
KEYS: dict[str, tuple[str, type]] = {
    name: (OPTIONS[own].key, INT32 if OPTIONS[own].kind is int else FLOAT32)
    for name, own in names_for("transformers", OPTIONS).items()
}
SEQUENCE = "sequence"  # order of samplers, a string


def sampling_metadata(content: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the metadata of sampling settings, and warnings about invalid values and settings without a GGUF key."""
    metadata: dict[str, object] = {}
    warnings: list[str] = []
    if isinstance(content.get(SEQUENCE), str):
        metadata["general.sampling.sequence"] = content[SEQUENCE]
    for name, (key, kind) in KEYS.items():
        value = content.get(name)
        if value is None:
            continue
        if is_of(kind, value):
            metadata[f"general.sampling.{key}"] = kind(value)
        else:
            expected = "a whole number" if kind is INT32 else "a number"
            warnings.append(f"{FILE}: {name} should be {expected}, is {printable(str(value), 40)}: left out")
    return metadata, warnings + warn_unused(FILE, content, {*KEYS, SEQUENCE}, OF_GENERATION)


def is_of(kind: type, value: object) -> bool:
    """Return whether a JSON value is a number that the type can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return abs(value) < 1e38 if kind is FLOAT32 else value == int(value) and abs(value) < 1 << 31
