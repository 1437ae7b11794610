"""Dequantize bitsandbytes: 4-bit weights with a scale per block (NF4, FP4), 8-bit ones with a scale per row (LLM.int8).

4 bits: weight = map[code] * absmax of its block in the flattened matrix; the first code is in a byte's high half.
absmax may itself be quantized to 8 bits, with a map, a scale per block and an offset. JSON in a tensor of its own
(X.weight.quant_state.bitsandbytes__nf4) describes X.weight. 8 bits: weight = code * SCB / 127. Source: the package's
functional.py (QuantState.as_dict).
"""

import json
from typing import NamedTuple

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.quantized.unpacking import TensorCollection, load, make_error, require_dtype, unpack_nibbles
from localllm.convert.safetensors_files import StoredTensor

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")


def open_bitsandbytes(tensors: TensorCollection, config: CheckpointConfig) -> TensorCollection:
    """Dequantize 4-bit and 8-bit weights. Raises ModelError."""
    for kind in KINDS:
        for name in tensors.list_modules(STATE + kind):
            add_4bit_weight(tensors, name, tensors.take(name + STATE + kind))
    for name in tensors.list_modules(".SCB"):
        add_8bit_weight(tensors, name)
    tensors.drop(".weight_format")
    return tensors


def add_4bit_weight(tensors: TensorCollection, name: str, state: StoredTensor) -> None:
    """Add a weight of 4-bit codes. Raises ModelError if its tensors are inconsistent."""
    described = read_state(state)
    packed = require_dtype(tensors.take(name), ["U8"])
    shape, size = described.shape, described.block_size
    count, values = int(np.prod(shape)), load(tensors.take(f"{name}.quant_map")).astype(np.float32)
    scales = read_scales(tensors, name, described)
    if int(np.prod(packed.shape)) != -(-count // 2) or len(scales) != -(-count // size) or len(values) != 16:
        raise make_error(packed, f"the shape {list(packed.shape)} does not match the weight {list(shape)}")
    columns, flat = shape[-1], StoredTensor(packed.name, packed.path, "U8", (-(-count // 2), 1), packed.start)

    def read(first: int, last: int) -> np.ndarray:
        begin, end = first * columns, last * columns
        codes = unpack_nibbles(flat.read_rows(begin // 2, -(-end // 2)).reshape(-1), high_first=True)
        codes = codes[begin % 2 : begin % 2 + end - begin]
        return (values[codes] * scales[np.arange(begin, end) // size]).reshape(last - first, columns)

    tensors.put(name, packed, shape, read)


class QuantState(NamedTuple):
    """The description of a 4-bit weight: its shape, its block sizes, and the offset of its quantized scales."""

    shape: tuple[int, ...]
    block_size: int
    nested_block_size: int
    nested_offset: float


def read_state(state: StoredTensor) -> QuantState:
    """Parse the JSON of a quant_state. Raises ModelError."""
    try:
        fields = json.loads(load(state).tobytes())
        if fields["quant_type"] in KINDS and int(fields["blocksize"]) > 0 and len(fields["shape"]) >= 1:
            return QuantState(
                tuple(int(n) for n in fields["shape"]),
                int(fields["blocksize"]),
                int(fields.get("nested_blocksize", 256)),
                float(fields.get("nested_offset", 0)),
            )
    except (ValueError, KeyError, TypeError):
        pass
    raise make_error(state, "must be the quant_state of a nf4 or fp4 weight, with its shape and blocksize")


def read_scales(tensors: TensorCollection, name: str, described: QuantState) -> np.ndarray:
    """Return the scales of all blocks, float32, dequantized if they are quantized. Raises ModelError."""
    stored = tensors.take(f"{name}.absmax")
    scales = load(stored).reshape(-1)
    if stored.dtype != "U8":
        return scales.astype(np.float32)
    nested, values = load(tensors.take(f"{name}.nested_absmax")), load(tensors.take(f"{name}.nested_quant_map"))
    size, offset = described.nested_block_size, np.float32(described.nested_offset)
    if len(values) != 256 or nested.size != -(-len(scales) // size):
        raise make_error(stored, f"{nested.size} nested scales do not match {len(scales)} scales")
    return values[scales] * np.repeat(nested.reshape(-1), size)[: len(scales)] + offset


def add_8bit_weight(tensors: TensorCollection, name: str) -> None:
    """Add a weight of 8-bit integers with a scale per row. Raises ModelError."""
    weight, scale = require_dtype(tensors.take(f"{name}.weight"), ["I8"]), tensors.take(f"{name}.SCB")
    scales = load(scale).reshape(-1).astype(np.float32)
    rows, columns = weight.shape
    if len(scales) != rows:
        raise make_error(scale, f"the weight has {rows} rows, but there are {len(scales)} scales")

    def read(first: int, last: int) -> np.ndarray:
        return weight.read_rows(first, last).view(np.int8) * (scales[first:last, None] / np.float32(127))

    tensors.put(f"{name}.weight", weight, (rows, columns), read)
