"""Dequantizes weights to float32 in plain NumPy. Tests compare the kernels with it."""

import numpy as np

from localllm.errors import ModelError


def dequantize(tensor) -> np.ndarray:
    """Dequantize a tensor, a tensor of a model file, to float32 in its shape.

    Raises ModelError for an unsupported format.
    """
    import gguf

    data = np.asarray(tensor.data)
    if tensor.format.name in ("Q1_0", "Q2_0"):  # `gguf` 0.19 cannot dequantize these
        return dequantized_bits(data, tensor.format.name).reshape(tensor.shape)
    try:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType(tensor.format.id))
    except (NotImplementedError, ValueError):
        raise ModelError(f"tensor {tensor.name}: format {tensor.format.name} is not supported") from None
    return values.astype(np.float32).reshape(tensor.shape)


def dequantized_bits(data: np.ndarray, format: str) -> np.ndarray:
    """Dequantize blocks of Q1_0 or Q2_0, which are 18 bytes each.

    Layout: a float16 d, then 16 bytes of codes, the lowest bits of a byte first. Q1_0 has 128 codes of one bit, weight
    = d * (2 * code - 1); Q2_0 has 64 codes of two bits, weight = d * (code - 1).
    """
    blocks = data.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little").astype(np.float32)
    return scales * (2 * bits - 1 if format == "Q1_0" else bits[:, 0::2] + 2 * bits[:, 1::2] - 1)
