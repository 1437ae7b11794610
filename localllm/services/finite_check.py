"""Checks that weights are finite."""

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import SourceTensor
from localllm.kernels.dequantize_rows import Widener


def dequantize_finite(widener: Widener, tensor: SourceTensor, first: int, last: int) -> np.ndarray:
    """Dequantize rows [first, last) to float32 [rows, columns]. Raises ModelError for a weight that is not finite."""
    weights = widener.widen(tensor.format, tensor.rows(first, last), tensor.shape[-1])
    if not (np.isfinite(weights.max()) and np.isfinite(weights.min())):
        check_finite(tensor, weights, first)
    return weights


def check_finite(tensor: SourceTensor, weights: np.ndarray, first: int) -> None:
    """Raise ModelError for the first weight that is NaN or infinite; first: the number of weights' first row."""
    positions = np.argwhere(~np.isfinite(weights))
    if len(positions):
        row, column = positions[0]
        value = weights[row, column]
        raise ModelError(
            f"tensor {printable(tensor.name)}: the weight in row {first + row}, column {column} is {value}"
        )
