"""Dequantize compressed-tensors (llm-compressor): packed and plain integers, FP8, NVFP4 and MXFP4.

weight = (code - zero point) * scale. Packed codes have half their range added and are stored 32 / bits to a 32-bit
word, the first in the lowest bits; zero points are packed likewise along the other dimension. Source: the package's
compressors (quantized_compressors/pack_quantized.py and its neighbours).
"""

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.quantized.fp8 import ACTIVATIONS, EIGHT_BITS, add_float4_weight, add_scaled_weight
from localllm.convert.quantized.unpacking import TensorCollection, decode, load, make_error, require_dtype, unpack_words
from localllm.convert.safetensors_files import StoredTensor

IGNORED = (*ACTIVATIONS, ".input_zero_point", ".input_global_scale", ".output_zero_point", ".k_zero_point",
           ".v_zero_point", ".input_g_idx")  # fmt: skip


def open_compressed_tensors(tensors: TensorCollection, config: CheckpointConfig) -> TensorCollection:
    """Dequantize packed and scaled weights. Raises ModelError."""
    if config.get_section("sparsity_config").get("format") not in (None, "dense"):
        raise config.make_error("sparse weights of compressed-tensors are not supported: save the model uncompressed")
    tensors.drop(*IGNORED)
    blocks = read_block_size(config)
    for name in tensors.list_modules(".weight_packed"):
        packed = tensors.take(f"{name}.weight_packed")
        if packed.dtype == "U8":
            add_float_weight(tensors, name, packed)
        else:
            add_packed_weight(tensors, name, require_dtype(packed, ["I32"]))
    for name in tensors.list_modules(".weight_scale"):
        weight = tensors.take(f"{name}.weight")
        if weight.dtype in EIGHT_BITS:
            tensors.take_optional(f"{name}.weight_zero_point")
            add_scaled_weight(tensors, weight, tensors.take(f"{name}.weight_scale"), f"{name}.weight", blocks)
        else:
            add_integer_weight(tensors, name, require_dtype(weight, ["I8"]))
    return tensors


def read_block_size(config: CheckpointConfig) -> list[int] | None:
    """Return how many rows and columns share a scale; None if scales are not per block."""
    groups = config.get_section("config_groups")
    for name in groups.content:
        weights = groups.get_section(name).get_section("weights")
        if isinstance(block := weights.get("block_structure"), list):
            return [int(size) for size in block]
    return None


def add_float_weight(tensors: TensorCollection, name: str, packed: StoredTensor) -> None:
    """Add a weight of 4-bit floats: NVFP4, whose block scales are divided by a global one, or MXFP4."""
    scale, global_scale = tensors.take(f"{name}.weight_scale"), tensors.take_optional(f"{name}.weight_global_scale")
    factor = 1.0 if global_scale is None else 1.0 / float(load(global_scale).reshape(-1)[0])
    add_float4_weight(tensors, f"{name}.weight", packed, scale, factor)


def add_packed_weight(tensors: TensorCollection, name: str, packed: StoredTensor) -> None:
    """Add a weight of packed integers. Raises ModelError if its tensors are inconsistent."""
    shape = tensors.take(f"{name}.weight_shape")
    rows, columns = (int(size) for size in load(shape).reshape(-1))
    bits = detect_bits(packed, rows, columns)
    scales, middle = load(tensors.take(f"{name}.weight_scale")), 1 << bits - 1
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
    zeros = np.zeros_like(scales)
    if (zero := tensors.take_optional(f"{name}.weight_zero_point")) is not None:
        zeros = load(zero)
        if zero.dtype == "I32":  # packed along rows
            zeros = unpack_words(np.ascontiguousarray(zeros.T), bits).T[: len(scales)] - middle
        zeros = zeros.astype(np.float32).reshape(scales.shape)
    order = tensors.take_optional(f"{name}.weight_g_idx")
    group = compute_groups(packed, order, columns, scales.shape[1])
    if len(scales) not in (1, rows):
        raise make_error(packed, f"the weight has {rows} rows, but its scales have {len(scales)}")

    def read(first: int, last: int) -> np.ndarray:
        numbers = unpack_words(packed.read_rows(first, last).view("<i4"), bits)[:, :columns] - middle
        places = slice(first, last) if len(scales) > 1 else slice(None)
        return (numbers - zeros[places][:, group]) * scales[places][:, group]

    tensors.put(f"{name}.weight", packed, (rows, columns), read)


def detect_bits(packed: StoredTensor, rows: int, columns: int) -> int:
    """Return the bits per value, inferred from the packed shape. Raises ModelError if no width fits."""
    words = packed.shape[-1]
    for bits in (4, 8, 2, 3, 5, 6, 7, 1):
        if packed.shape == (rows, words) and -(-columns // (32 // bits)) == words:
            return bits
    raise make_error(packed, f"the shape {list(packed.shape)} does not match the weight {[rows, columns]}")


def compute_groups(packed: StoredTensor, order: StoredTensor | None, columns: int, groups: int) -> np.ndarray:
    """Return the group of each column, int [columns]. Raises ModelError for a group out of range.

    order: stored groups (g_idx); None for consecutive groups of equal size.
    """
    if order is None:
        if columns % groups:
            raise make_error(packed, f"{columns} columns are not divisible into {groups} groups")
        return np.arange(columns) // (columns // groups)
    group_numbers = load(order).reshape(-1).astype(np.int64)
    if (group_numbers < 0).all():  # the value for columns in order
        return np.arange(columns) // (columns // groups)
    if len(group_numbers) != columns or group_numbers.min() < 0 or group_numbers.max() >= groups:
        raise make_error(order, f"the group of each of {columns} columns must be from 0 to {groups - 1}")
    return group_numbers


def add_integer_weight(tensors: TensorCollection, name: str, weight: StoredTensor) -> None:
    """Add a weight of 8-bit integers with a scale per row, per group of columns, or for all. Raises ModelError."""
    rows, columns = weight.shape
    scale = tensors.take(f"{name}.weight_scale")
    scales = load(scale)
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
    zero = tensors.take_optional(f"{name}.weight_zero_point")
    zeros = np.zeros_like(scales) if zero is None else load(zero).astype(np.float32).reshape(scales.shape)
    if len(scales) not in (1, rows):
        raise make_error(scale, f"the shape {list(scale.shape)} does not match the weight {list(weight.shape)}")
    group = compute_groups(weight, None, columns, scales.shape[1])

    def read(first: int, last: int) -> np.ndarray:
        numbers = decode(weight.read_rows(first, last), "I8").astype(np.float32)
        places = slice(first, last) if len(scales) > 1 else slice(None)
        return (numbers - zeros[places][:, group]) * scales[places][:, group]

    tensors.put(f"{name}.weight", weight, (rows, columns), read)
