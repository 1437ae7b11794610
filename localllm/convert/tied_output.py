"""Decide whether to write an output matrix although config.json ties it to the embedding."""

import gguf
import numpy as np

from localllm.convert.tensors import TensorSource, as_float32

ROWS = 4096  # compared at once


def unties_output(
    embedding: TensorSource, output: TensorSource, arch: gguf.MODEL_ARCH, warnings: list[str], name: str
) -> bool:
    """Return whether the stored output matrix differs from the embedding. name: name of the output matrix.

    Tools that merge adapters or train heads store such a matrix without changing `tie_word_embeddings`; transformers 5
    and llama.cpp's converter then use both.
    """
    if is_same(embedding, output):
        return False
    differs = f"{name} differs from the embedding, though config.json ties them"
    if gguf.MODEL_TENSOR.OUTPUT not in gguf.MODEL_TENSORS[arch]:
        warnings.append(f"{differs}: it is left out, because {gguf.MODEL_ARCH_NAMES[arch]} has no output matrix")
        return False
    warnings.append(f"{differs}: both are written")
    return True


def is_same(a: TensorSource, b: TensorSource) -> bool:
    """Return whether two matrices have the same numbers."""
    if a.shape != b.shape:
        return False
    return all(
        np.array_equal(dequantize_rows(a, first), dequantize_rows(b, first), equal_nan=True)
        for first in range(0, a.shape[0], ROWS)
    )


def dequantize_rows(source: TensorSource, first: int) -> np.ndarray:
    """Read ROWS rows from `first` on, float32 [rows, columns]."""
    return as_float32(source.rows(first, min(first + ROWS, source.shape[0])), source.dtype)
