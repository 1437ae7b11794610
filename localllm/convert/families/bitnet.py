"""BitNet b1.58."""

from collections.abc import Sequence

import numpy as np

from localllm.convert.family import Sizes
from localllm.convert.tensors import Shape, TensorSource, as_float32, from_array


def ternary(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Round a matrix to the sign of its numbers times their mean magnitude, or 0 (Ma et al. 2024)."""
    numbers = as_float32(sources[0].rows(0, shape[0]), sources[0].dtype)
    inverse = np.float32(1) / np.float32(max(np.abs(numbers).mean(dtype=np.float64), 1e-5))
    return from_array(np.clip(np.round(numbers * inverse), -1, 1) / inverse)
