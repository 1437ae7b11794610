"""A tiny random model with recurrent layers in a real GGUF file: a qwen35 of three layers, the second of which attends.

Its dimensions are odd on purpose: heads of 24 and 12 numbers, and 6 of them to 2 of keys.
"""

from pathlib import Path

import gguf
import numpy as np
from recurrent_models import qwen35
from tiny_model import CHATML, add_vocabulary, finish, vocabulary


def write_tiny_hybrid(path: Path, context: int = 512) -> Path:
    """Write the model to `path` in F32 and return the path; `context`: its trained context length."""
    arch, metadata, tensors = qwen35(vocabulary=len(vocabulary()), context=context)
    writer = gguf.GGUFWriter(str(path), arch)
    for name, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint32, np.ndarray: add_array(writer)}[type(value)]
        add(f"{arch}.{name}", value)
    add_vocabulary(writer, CHATML)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def add_array(writer: gguf.GGUFWriter):
    return lambda name, values: writer.add_array(name, values.tolist())
