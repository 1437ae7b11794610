"""Checkpoints and settings for the tests of converting."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_folder
from localllm.errors import ModelError

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


def all_rows(tensor: Any) -> np.ndarray:
    return tensor.read_rows(0, prod(tensor.shape[:-1]))


def refused(folder: Path) -> str:
    """Return the one line with which a folder is refused."""
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


def splits(*patterns: str, byte_level_words: bool = False) -> dict[str, Any]:
    """Return a pre-tokenizer of regular expressions, then bytes."""
    parts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": byte_level_words}
    return {"type": "Sequence", "pretokenizers": [*parts, byte_level]}


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
