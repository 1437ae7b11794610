"""The sampling options that a model's file recommends in `general.sampling.*`, as in llama.cpp."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.metadata_reader import Checked
from localllm.generation.sampling.candidates import LARGEST
from localllm.generation.sampling.options import LETTERS, OPTIONS, SamplingOptions


def read_recommended(metadata: Mapping[str, object], path: str = "") -> tuple[SamplingOptions, list[str]]:
    """Read the sampling options that a file recommends, with a warning for each invalid value.

    An invalid value is replaced by the default, so that the model still runs.
    """
    checked, values, warnings = Checked(metadata, "general.sampling.", path), dict[str, Any](), list[str]()
    for name, key in ((name, option.key) for name, option in OPTIONS.items()):
        if not key or not checked.has(key):
            continue
        option_value: dict[str, Any] = {name: normalized_value(key, checked.raw(key))}
        try:
            SamplingOptions(**option_value)
        except UsageError:
            warnings.append(f"{checked.wrong(key, describe_valid_values(name))}; using the default")
        else:
            values |= option_value
    return SamplingOptions(**values), warnings


def describe_valid_values(name: str) -> str:
    if name == "samplers":
        return f"names of steps with semicolons between them, as in {';'.join(LETTERS)}"
    range = OPTIONS[name].range
    assert range
    return range.text


def normalized_value(key: str, value: object) -> object:
    """Return a metadata value as its author wrote it: 0.6 for its float32, 0 (off) for a top_k below 0."""
    if isinstance(value, float) and abs(value) <= LARGEST:
        return float(str(np.float32(value)))
    if key == "top_k" and isinstance(value, int):
        return max(value, 0)
    return value
