"""A model author's sampling defaults: the metadata `general.sampling.*`, as llama.cpp defines them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.metadata_reader import Checked
from localllm.generation.sampling.candidates import LARGEST
from localllm.generation.sampling.options import LETTERS, SamplingOptions

OPTIONS = {each.name: each.metadata for each in fields(SamplingOptions) if each.metadata["key"]}


def recommended(metadata: Mapping[str, Any], path: str = "") -> tuple[SamplingOptions, list[str]]:
    """Read the sampling options that a file's metadata recommend, with a warning for each invalid value.

    An invalid value is no reason not to run the model: our default is used instead.
    """
    checked, chosen, warnings = Checked(metadata, "general.sampling.", path), dict[str, Any](), list[str]()
    for name, option in OPTIONS.items():
        key = option["key"]
        if not checked.has(key):
            continue
        value = meant(key, checked.raw(key))
        try:
            SamplingOptions(**{name: value})
        except UsageError:
            warnings.append(f"{checked.wrong(key, expected(name))}; our default is taken")
        else:
            chosen[name] = value
    return SamplingOptions(**chosen), warnings


def expected(name: str) -> str:
    """Describe an option's valid values, for a message."""
    if name == "samplers":
        return f"names of steps with semicolons between them, as in {';'.join(LETTERS)}"
    return OPTIONS[name]["range"].text


def meant(key: str, value: Any) -> Any:
    """Return the value as its author wrote it: 0.6, not the float32 next to it; a top_k below 0 means off."""
    if isinstance(value, float) and abs(value) <= LARGEST:
        return float(str(np.float32(value)))
    if key == "top_k" and isinstance(value, int):
        return max(value, 0)
    return value
