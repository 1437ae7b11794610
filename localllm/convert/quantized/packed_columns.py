"""Dequantize AWQ and GPTQ: integers packed in 32-bit words of transposed matrices [inputs, outputs].

weight = (code - zero point) * scale, with a scale and a zero point for each group of inputs. AWQ packs 8 neighbouring
outputs in a word, in the order AWQ_ORDER; GPTQ packs inputs, and its first format stores zero points - 1. Sources:
AutoAWQ's utils/packing_utils.py and GPTQModel's qlinear/__init__.py; vLLM documents the format, too.
"""

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.quantized.unpacking import (
    TensorCollection,
    load,
    make_error,
    map_words,
    require_dtype,
    unpack_stream,
    unpack_words,
)
from localllm.convert.safetensors_files import StoredTensor

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # index in a word of outputs 0, 1, 2, ...


def open_awq(tensors: TensorCollection, config: CheckpointConfig) -> TensorCollection:
    """Dequantize AWQ's weights. Raises ModelError for a width other than 4 bits or a packing other than "gemm"."""
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm" or config.read_count("bits", 4) != 4:
        raise config.make_error(
            f"AWQ must have 4 bits and the version gemm (found {config.get('bits', 4)} bits, version {version})"
        )
    for name in tensors.list_modules(".qweight"):
        add_awq_weight(tensors, name)
    return tensors


def add_awq_weight(tensors: TensorCollection, name: str) -> None:
    """Add a weight of AWQ. Raises ModelError if its tensors do not fit together."""
    packed = require_dtype(tensors.take(f"{name}.qweight"), ["I32"])
    scale, zero = tensors.take(f"{name}.scales"), require_dtype(tensors.take(f"{name}.qzeros"), ["I32"])
    scales, (inputs, words) = load(scale), packed.shape
    groups, outputs = scales.shape
    if outputs != 8 * words or groups == 0 or inputs % groups or zero.shape != (groups, words):
        raise make_error(scale, f"the shape {list(scales.shape)} does not fit numbers of {list(packed.shape)}")
    zeros, mapped, size = unpack_awq(load(zero)), map_words(packed), inputs // groups

    def read(first: int, last: int) -> np.ndarray:
        start, end = first // 8, -(-last // 8)
        numbers = unpack_awq(np.ascontiguousarray(mapped[:, start:end]))[:, first - 8 * start : last - 8 * start]
        of_inputs = np.repeat(scales[:, first:last], size, axis=0)
        return ((numbers - np.repeat(zeros[:, first:last], size, axis=0)) * of_inputs).T

    tensors.put(f"{name}.weight", packed, (outputs, inputs), read)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unpack AWQ's words [rows, words] in the order of outputs: int32 [rows, 8 * words]."""
    return unpack_words(words, 4).reshape(len(words), -1, 8)[:, :, AWQ_ORDER].reshape(len(words), -1)


def open_gptq(tensors: TensorCollection, config: CheckpointConfig) -> TensorCollection:
    """Dequantize GPTQ's weights, also with activation order (g_idx). Raises ModelError."""
    bits = config.read_count("bits", 4)
    if bits not in (2, 3, 4, 8):
        raise config.make_error(f"GPTQ must have 2, 3, 4 or 8 bits (found {bits})")
    is_second = str(config.get("checkpoint_format") or "gptq") == "gptq_v2"
    for name in tensors.list_modules(".qweight"):
        add_gptq_weight(tensors, name, bits, 0 if is_second else 1)
    return tensors


def add_gptq_weight(tensors: TensorCollection, name: str, bits: int, added: int) -> None:
    """Add a weight of GPTQ. Raises ModelError if its tensors do not fit together.

    added: constant to add to stored zero points.
    """
    packed = require_dtype(tensors.take(f"{name}.qweight"), ["I32"])
    scale, zero = tensors.take(f"{name}.scales"), require_dtype(tensors.take(f"{name}.qzeros"), ["I32"])
    order = tensors.take_optional(f"{name}.g_idx")
    scales, inputs = load(scale), packed.shape[0] * 32 // bits
    groups, outputs = scales.shape
    if packed.shape[1] != outputs or groups == 0 or zero.shape != (groups, -(-outputs * bits // 32)):
        raise make_error(scale, f"the shape {list(scales.shape)} does not fit numbers of {list(packed.shape)}")
    zeros = unpack_stream(load(zero), bits)[:, :outputs] + added
    group, mapped = compute_groups(packed, order, inputs, groups), map_words(packed)

    def read(first: int, last: int) -> np.ndarray:
        numbers = unpack_stream(np.ascontiguousarray(mapped[:, first:last].T), bits)[:, :inputs]
        return (numbers - zeros[group, first:last].T) * scales[group, first:last].T

    tensors.put(f"{name}.weight", packed, (outputs, inputs), read)


def compute_groups(packed: StoredTensor, order: StoredTensor | None, inputs: int, groups: int) -> np.ndarray:
    """Return the group of each input, int [inputs]. Raises ModelError for a group out of range.

    order: stored groups (g_idx); None for consecutive groups of equal size.
    """
    if order is None:
        if inputs % groups:
            raise make_error(packed, f"{inputs} inputs are not divisible into {groups} groups")
        return np.arange(inputs) // (inputs // groups)
    group_numbers = load(order).reshape(-1).astype(np.int64)
    if len(group_numbers) != inputs or group_numbers.min() < 0 or group_numbers.max() >= groups:
        raise make_error(order, f"the group of each of {inputs} inputs must be from 0 to {groups - 1}")
    return group_numbers
