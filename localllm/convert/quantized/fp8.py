"""Dequantize FP8 weights, which have a scale per block, per row or per tensor.

weight = code * scale. Blocks: DeepSeek, Qwen; rows: FBGEMM; tensors: ModelOpt, static FP8. Sources: the checkpoints'
own model code (DeepSeek-V3's weight_dequant), transformers' quantizer_finegrained_fp8 and quantizer_fbgemm_fp8,
ModelOpt's unified checkpoint format.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.quantized.unpacking import (
    E2M1,
    TensorCollection,
    decode,
    load,
    make_error,
    require_dtype,
    unpack_nibbles,
)
from localllm.convert.safetensors_files import StoredTensor

EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
# Scales of activations and of the KV cache, on which no weights depend.
ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".output_scale", ".input_scale_ub")
SCALES = ("_scale_inv", "_scale")  # after a weight's name


def open_fp8(tensors: TensorCollection, config: CheckpointConfig) -> TensorCollection:
    """Dequantize every tensor that has a scale. Raises ModelError."""
    tensors.drop(*ACTIVATIONS)
    block = config.get("weight_block_size") or [128, 128]
    for name in [name for suffix in SCALES for name in tensors.list_modules(suffix)]:
        weight = tensors.remaining.get(name)
        if weight is not None and weight.dtype in EIGHT_BITS:
            scale = tensors.take_optional(*(name + suffix for suffix in SCALES))
            assert scale is not None
            add_scaled_weight(tensors, tensors.take(name), scale, name, block if isinstance(block, list) else None)
    for name in tensors.list_modules(".weight_scale_2"):
        add_nvfp4_weight(tensors, name)
    return tensors


def open_unscaled(tensors: TensorCollection) -> TensorCollection:
    """Decode 8-bit floats without scales, in checkpoints without a quantization method."""
    for name, weight in [*tensors.remaining.items()]:
        if weight.dtype in EIGHT_BITS and weight.shape:
            add_unscaled_weight(tensors, name, weight)
    return tensors


def add_unscaled_weight(tensors: TensorCollection, name: str, weight: StoredTensor) -> None:
    """Add a weight of 8-bit floats without scales."""
    tensors.put(name, weight, weight.shape, lambda first, last: decode(weight.read_rows(first, last), weight.dtype))


def add_scaled_weight(
    tensors: TensorCollection, weight: StoredTensor, scale: StoredTensor, name: str, block: Sequence[int] | None
) -> None:
    """Add a weight of 8-bit floats times scales. Raises ModelError for scales of a wrong shape.

    block: rows and columns that share a scale, if config.json says so.
    """
    scales = load(scale)
    scales = scales if scales.ndim >= 2 else scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(1, 1)
    *stack, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    tall, wide = find_block_size(weight, scale, scales.shape, (rows, columns), block)
    scales = np.broadcast_to(scales, (*stack, *scales.shape[-2:])).reshape(-1, *scales.shape[-2:])

    def read(first: int, last: int) -> np.ndarray:
        numbers = decode(weight.read_rows(first, last), weight.dtype)
        matrix, row = np.divmod(np.arange(first, last), rows)
        of_rows = scales[matrix, row // tall]
        return numbers * np.repeat(of_rows, wide, axis=1)[:, :columns]

    tensors.put(name, weight, weight.shape, read)


def find_block_size(
    weight: StoredTensor, scale: StoredTensor, shape: Sequence[int], size: tuple[int, int], block: Sequence[int] | None
) -> tuple[int, int]:
    """Return how many rows and columns share a scale.

    Raises ModelError if the scales do not fit the weight.
    """
    (rows, columns), (down, across) = size, shape[-2:]
    candidates = [(int(block[0]), int(block[1]))] if block else []
    candidates += [(tall, wide) for tall in (rows, 1) for wide in (columns, 1)]
    if across and columns % across == 0:
        candidates += [(tall, columns // across) for tall in (rows, 1)]
    is_stack = len(shape) < 3 or prod(shape[:-2]) == prod(weight.shape[:-2])
    for tall, wide in candidates:
        if is_stack and -(-rows // tall) == down and -(-columns // wide) == across:
            return tall, wide
    raise make_error(scale, f"the shape {list(scale.shape)} does not match the weight {list(weight.shape)}")


def add_nvfp4_weight(tensors: TensorCollection, name: str) -> None:
    """Add a weight of ModelOpt's NVFP4: 4-bit floats, an FP8 scale per 16 of them, and a global scale."""
    weight = require_dtype(tensors.take(f"{name}.weight"), ["U8"])
    scale, second = tensors.take(f"{name}.weight_scale"), load(tensors.take(f"{name}.weight_scale_2"))
    add_float4_weight(tensors, f"{name}.weight", weight, scale, float(second.reshape(-1)[0]))


def add_float4_weight(
    tensors: TensorCollection, name: str, weight: StoredTensor, scale: StoredTensor, factor: float
) -> None:
    """Add a weight of 4-bit floats (E2M1), two per byte, with scales along rows and a global factor.

    Raises ModelError for scales of a wrong shape.
    """
    *outer, half = weight.shape
    groups, columns = scale.shape[-1], 2 * half
    if [*scale.shape[:-1]] != outer or groups == 0 or columns % groups:
        raise make_error(scale, f"the shape {list(scale.shape)} does not match the weight {[*outer, columns]}")

    def read(first: int, last: int) -> np.ndarray:
        codes = unpack_nibbles(weight.read_rows(first, last))
        scales = decode(scale.read_rows(first, last), "F8_E8M0" if scale.dtype == "U8" else scale.dtype)
        return E2M1[codes] * np.repeat(scales * np.float32(factor), columns // groups, axis=1)

    tensors.put(name, weight, (*outer, columns), read)
