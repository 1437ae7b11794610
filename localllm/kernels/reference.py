"""The NumPy reference of the kernels: dequantization, and the rounding of the KV cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.quant.formats import IQ4_VALUES, UNKNOWN_TO_GGUF


def dequantize(tensor) -> np.ndarray:
    """Dequantize a tensor to float32 in its shape. Raises ModelError for an unsupported format."""
    import gguf

    data = np.asarray(tensor.data)
    if tensor.format.name in UNKNOWN_TO_GGUF:
        return dequantize_bits(data, tensor.format.name).reshape(tensor.shape)
    try:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType(tensor.format.id))
    except (NotImplementedError, ValueError):
        raise ModelError(
            f"tensor {tensor.name}: format {tensor.format.name} is not supported: use a file of another type"
        ) from None
    return values.astype(np.float32).reshape(tensor.shape)


def dequantize_bits(data: np.ndarray, format: str) -> np.ndarray:
    """Dequantize blocks of Q1_0 or Q2_0.

    A block has a float16 d, then 16 bytes of codes, the lowest bits of a byte first. Q1_0 has 128 codes of one bit,
    weight = d * (2 * code - 1); Q2_0 has 64 codes of two bits, weight = d * (code - 1).
    """
    blocks = data.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little").astype(np.float32)
    return scales * (2 * bits - 1 if format == "Q1_0" else bits[:, 0::2] + 2 * bits[:, 1::2] - 1)


class ReferenceCache:
    """The KV cache and recurrent states of one sequence in the reference backend.

    Attention layers have keys and values, each float32 [tokens, heads, head dimension]. Recurrent layers have the
    states after `length` tokens, or none before the first run.
    """

    def __init__(
        self, kv_type: tuple[str, str], layers: dict | None = None, states: dict | None = None, length: int = 0
    ):
        """Create a cache; layers: by layer state, [keys, values]; states: by (layer, number), or None."""
        self._kv_type, self._layers = kv_type, dict(layers or {})
        self._states, self._length = None if states is None else dict(states), length
        self._rotations: dict[Any, tuple[int, int]] = {}  # by state, see localllm.arch.layer_state

    def keep(self, state, position: int, *new) -> list[np.ndarray]:
        """Store new keys and values of a layer from `position` on; return all of them."""
        old = self._layers.get(state, [x[:0] for x in new])
        missing = max(position - len(old[0]), 0)  # tokens of an encoder, which store nothing in this layer
        old = [np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in old] if missing else old
        self._rotations[state] = rotations = state.find_rotation_sizes(self._kv_type)
        rounded_new = [round_heads(x, *how) for x, *how in zip(new, self._kv_type, rotations, strict=False)]
        self._layers[state] = [np.concatenate((x[:position], y)) for x, y in zip(old, rounded_new, strict=True)]
        return self._layers[state]

    def list_kept(self, state) -> list[np.ndarray]:
        return self._layers[state]

    def get_state(self, layer: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return one of a layer's recurrent states: zeros of the given shape before the first run."""
        return (self._states or {}).get((layer, number), np.zeros(shape, np.float32))

    def put_state(self, layer: int, number: int, state: np.ndarray) -> None:
        self._states = {**(self._states or {}), (layer, number): state}

    def prepare(self, length: int, count: int) -> None:
        self._length = length + count

    def fork(self, length: int) -> "ReferenceCache":
        """Return a cache with the same content. Arrays are never changed in place, so both caches share them."""
        copy = ReferenceCache(self._kv_type, self._layers, self._states, self._length)
        copy._rotations = self._rotations
        return copy

    def truncate(self, length: int) -> int:
        """Shorten the sequence; return its new length.

        Recurrent states exist only for the current length, so a sequence with states restarts at 0 unless its length
        stays the same.
        """
        if self._states is None or length == self._length:
            self._length = length
            return length
        self._states, self._length = {}, 0
        return 0

    def shift(self, keep: int, count: int) -> int:
        """Drop `count` tokens after the first `keep` and move later ones down; return the new length."""
        self._layers = {
            layer: [np.concatenate((x[:keep], x[keep + count : self._length])) for x in sides]
            for layer, sides in self._layers.items()
        }
        self._length -= count
        return self._length

    def append_copies(self, source: "ReferenceCache", first: int, length: int, count: int, skipped: int = 0) -> bool:
        """Append tokens of another cache, from `first` on, to the first `length`; return False if there is a gap."""
        if skipped:
            return False
        self._layers = {
            layer: [
                np.concatenate((x[:length], y[first : first + count]))
                for x, y in zip(self._layers.get(layer, [y[:0] for y in sides]), sides, strict=True)
            ]
            for layer, sides in source._layers.items()
        }
        self._rotations, self._length = source._rotations, length + count
        return True

    def rotate_keys(self, state, turn, first: int, end: int, distance: int) -> None:
        """Rotate the keys at positions [first, end) back by `distance` positions (RoPE), and round them again."""
        keys, *values = self._layers[state]
        moving = np.flatnonzero(turn.frequencies)  # pairs of frequency 0 do not rotate, and some overlap other pairs
        u, v = turn.step * moving, turn.step * moving + turn.apart
        cos, sin = (f(-distance * turn.frequencies[moving]) for f in (np.cos, np.sin))
        rotated = keys.copy()
        rotated[first:end, :, u] = keys[first:end, :, u] * cos - keys[first:end, :, v] * sin
        rotated[first:end, :, v] = keys[first:end, :, u] * sin + keys[first:end, :, v] * cos
        rotated[first:end] = round_heads(rotated[first:end], self._kv_type[0], self._rotations[state][0])
        self._layers[state] = [rotated, *values]

    def close(self) -> None:
        self._layers, self._states = {}, None


def hadamard(x: np.ndarray, block: int) -> np.ndarray:
    """Multiply each `block` consecutive values by the orthonormal Hadamard matrix.

    The matrix is its own inverse.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = x.reshape(*x.shape[:-1], -1, block)
    return (blocks @ (matrix * block**-0.5).astype(np.float32)).reshape(x.shape)


def round_heads(x: np.ndarray, kind: str, rotation: int) -> np.ndarray:
    """Round heads, [..., head dimension], as a cache of type `kind` does.

    rotation: if above 1, the block size of a Hadamard rotation that is applied before rounding and undone afterwards.
    """
    if rotation > 1:
        return hadamard(round_heads(hadamard(x, rotation), kind, 1), rotation)
    with np.errstate(over="ignore"):
        return ROUNDING[kind](x).astype(np.float32)


def apply_to_blocks(make: Callable[[np.ndarray], np.ndarray], repeat: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Build a function of heads, [..., head dimension], from `make`, a function of blocks, [..., 32].

    A head that does not end with a whole block is padded with the block's first value times `repeat` (0 or 1).
    """

    def round_blocks(x: np.ndarray) -> np.ndarray:
        *outer_shape, columns = x.shape
        padding = repeat * np.repeat(x[..., columns // 32 * 32 :][..., :1], -columns % 32, axis=-1)
        blocks = np.concatenate((x, padding), axis=-1).reshape(*outer_shape, -1, 32)
        return make(blocks).reshape(*outer_shape, -1)[..., :columns]

    return round_blocks


SMALLEST = np.float32(2**-24)  # the smallest float16 above zero


def round_to_half(x: np.ndarray) -> np.ndarray:
    """Round to float16, to infinity where x is too large, and convert back to float32."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def round_to_q8_0(x: np.ndarray) -> np.ndarray:
    """Round blocks, [..., 32], to Q8_0: a float16 scale times signed bytes."""
    scales = round_to_half(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127))
    return np.clip(np.rint(x / np.maximum(scales, SMALLEST)), -127, 127) * scales


def round_symmetric(x: np.ndarray, centre: int) -> np.ndarray:
    """Round blocks, [..., 32], to a float16 scale times codes from -centre to centre - 1 (Q4_0, Q5_0).

    The value of largest magnitude gets the code -centre, so the scale has the opposite sign of that value.
    """
    size, top = np.abs(x).max(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scales = round_to_half(size / np.where(top == size, np.float32(-centre), np.float32(centre)))
    codes = np.clip(np.rint(x / np.copysign(np.maximum(np.abs(scales), SMALLEST), scales)), -centre, centre - 1)
    return codes * scales


def round_with_minimum(x: np.ndarray, most: int) -> np.ndarray:
    """Round blocks, [..., 32], to a float16 scale times codes from 0 to `most`, plus a float16 minimum.

    The formats are Q4_1 and Q5_1.
    """
    least, top = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scales, minimums = round_to_half((top - least) / np.float32(most)), round_to_half(least)
    return np.clip(np.rint((x - minimums) / np.maximum(scales, SMALLEST)), 0, most) * scales + minimums


def round_to_iq4_nl(x: np.ndarray) -> np.ndarray:
    """Round blocks, [..., 32], to IQ4_NL: a float16 scale times one of IQ4_VALUES.

    The nearest values are found for the scale that makes the value of largest magnitude -127. Then the scale is fitted
    to them by least squares, weighted by the squares of x.
    """
    size, top = np.abs(x).max(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    first = size / np.where(top == size, np.float32(-127), np.float32(127))
    y = np.divide(x, first, out=np.zeros_like(x), where=size > 0)
    values = np.array(IQ4_VALUES, np.float32)
    nearest = values[np.searchsorted((values[1:] + values[:-1]) / 2, y, side="right")]
    products, squares = (y * y * nearest * other for other in (y, nearest))
    ratio = products.sum(axis=-1, keepdims=True) / np.maximum(squares.sum(axis=-1, keepdims=True), SMALLEST)
    return nearest * round_to_half(first * ratio)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, as float32. All values must be finite."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + (bits >> 16 & 1) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32)


ROUNDING: dict[str, Callable] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": round_to_bf16,
    "q8_0": apply_to_blocks(round_to_q8_0),
    "q5_1": apply_to_blocks(partial(round_with_minimum, most=31)),
    "q5_0": apply_to_blocks(partial(round_symmetric, centre=16)),
    "q4_1": apply_to_blocks(partial(round_with_minimum, most=15)),
    "q4_0": apply_to_blocks(partial(round_symmetric, centre=8)),
    "iq4_nl": apply_to_blocks(round_to_iq4_nl, repeat=0),
}
