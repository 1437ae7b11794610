"""Invalid model files: the tiny model with changes."""

import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny_model import write_tiny_model

from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, PackedValue, write_gguf

GONE = object()  # instead of a value: the key, or the tensor, is left out
Change = Mapping[str, Any]


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a file's metadata as stored, and its tensors in float32."""
    file = GGUFFile.open(path)
    metadata = {key: PackedValue(value.tobytes()) for key, value in file.packed.items()}
    tensors = {name: tensor.data.view(np.float32).reshape(tensor.shape) for name, tensor in file.tensors.items()}
    return metadata, tensors


class Wrong:
    """A writer of models that differ from a valid one."""

    def __init__(self, folder: Path):
        self.valid = write_tiny_model(folder / "valid.gguf")
        self.metadata, self.tensors = parts_of(self.valid)
        self.path = folder / "wrong.gguf"

    def write(self, metadata: Change = {}, tensors: Change = {}) -> Path:  # noqa: B006
        """Write the file with changed metadata and tensors; GONE removes a value, a function changes it."""
        if sys.platform == "win32":
            gc.collect()  # a refused file is mapped until what refused it is gone, and cannot be replaced before
        keys = changed(self.metadata, metadata)
        weights = changed(self.tensors, tensors)
        write_gguf(self.path, keys, [OutputTensor.from_array(name, weight) for name, weight in weights.items()])
        return self.path


def changed(values: Mapping[str, Any], changes: Change) -> dict[str, Any]:
    result = dict(values)
    for key, value in changes.items():
        if value is GONE:
            del result[key]
        elif isinstance(value, Callable):
            result[key] = value(result[key].copy())
        else:
            result[key] = value
    return result
