"""Models to split: the tiny one, and one with tensors of some hundred kB, for gguf-split sizes in megabytes."""

from pathlib import Path

import numpy as np
from tiny_model import write_tiny_model

from localllm.files.gguf.writer import OutputTensor, write_gguf


def write_large(path: Path) -> Path:
    """Write a model of 5 MB: tensors of 0.1 to 1.2 MB, one of them larger than a split may be."""
    rows = [100, 300, 700, 50, 20, 900, 1200, 2, 400, 333, 17, 2]
    values = (np.full((count, 250), number, np.float32) for number, count in enumerate(rows))
    tensors = [OutputTensor.from_array(f"blk.{number}.x.weight", value) for number, value in enumerate(values)]
    write_gguf(path, {"general.architecture": "made", "general.name": "Large"}, tensors)
    return path


MODELS = {"tiny": write_tiny_model, "large": write_large}
CASES = [
    "tiny --split-max-tensors 1",
    "tiny --split-max-tensors 5",
    "tiny --split-max-tensors 7 --no-tensor-first-split",
    "tiny",
    "large --split-max-size 1M",
    "large --split-max-size 1M --no-tensor-first-split",
    "large --split-max-size 2M",
]
