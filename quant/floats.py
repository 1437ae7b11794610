"""Encoders of F32, F16 and BF16: each number is a block."""

import numpy as np
from numpy.typing import NDArray

from localllm.quant.float16 import narrow_to_bf16, narrow_to_half


def encode_f32(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    """Encode float32 [rows, columns] to uint8 [rows, 4 columns]."""
    out[:] = weights.view(np.uint8)


def encode_f16(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    """Encode float32 [rows, columns] to uint8 [rows, 2 columns]."""
    narrow_to_half(weights.reshape(-1), out.reshape(-1).view(np.uint16))


def encode_bf16(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    """Encode float32 [rows, columns] to uint8 [rows, 2 columns]."""
    narrow_to_bf16(weights.reshape(-1), out.reshape(-1).view(np.uint16))
