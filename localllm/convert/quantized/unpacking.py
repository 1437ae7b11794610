"""Unpack the tensors of quantized checkpoints: 8-bit floats, and integers packed in bytes or words."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.safetensors_files import StoredTensor
from localllm.convert.transforms import BYTES, as_float32
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.frozen import frozen

ReadRows = Callable[[int, int], np.ndarray]  # rows first to last - 1 of all matrices, float32 [rows, columns]
WORDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
         "BOOL": "?"}  # fmt: skip


@frozen
class DequantizedTensor:
    """A float32 tensor in place of quantized ones, whose rows are dequantized when they are read."""

    name: str
    path: Path
    shape: tuple[int, ...]
    read: ReadRows
    dtype: str = "F32"

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1 as bytes: uint8 [last - first, bytes per row]. Raises ModelError."""
        return np.ascontiguousarray(self.read(first, last), np.float32).view(np.uint8)


class TensorCollection:
    """The tensors of a checkpoint, in which a quantization method replaces its own by dequantized ones."""

    def __init__(self, stored: Mapping[str, StoredTensor]):
        self.remaining = dict[str, Any](stored)

    def list_modules(self, suffix: str) -> list[str]:
        """List the modules that have a tensor with this suffix."""
        return [name.removesuffix(suffix) for name in self.remaining if name.endswith(suffix)]

    def take(self, name: str) -> StoredTensor:
        """Remove a tensor and return it. Raises ModelError if it is missing."""
        if name not in self.remaining:
            path = next(iter(self.remaining.values())).path if self.remaining else "the checkpoint"
            raise ModelError(f"{path}: the tensor {printable(name)} is missing")
        return self.remaining.pop(name)

    def take_optional(self, *names: str) -> StoredTensor | None:
        """Remove the first tensor that exists among these names and return it; None if none exists."""
        return next((self.remaining.pop(name) for name in names if name in self.remaining), None)

    def drop(self, *suffixes: str) -> None:
        """Remove all tensors with these suffixes, on which no weight depends."""
        for name in [name for name in self.remaining if name.endswith(suffixes)]:
            del self.remaining[name]

    def put(self, name: str, like: StoredTensor, shape: Sequence[int], read: ReadRows) -> None:
        """Add a tensor whose rows `read` computes.

        like: a tensor that it is computed from, for its file.
        """
        self.remaining[name] = DequantizedTensor(name, like.path, tuple(shape), read)


def make_error(tensor: StoredTensor, problem: str) -> ModelError:
    return ModelError(f"{tensor.path}: tensor {printable(tensor.name)}: {problem}")


def load(tensor: StoredTensor) -> np.ndarray:
    """Read a whole small tensor, floats as float32, integers unchanged. Raises ModelError."""
    count = int(np.prod(tensor.shape[:-1]))
    if tensor.dtype not in BYTES:
        raise make_error(tensor, f"the type must be one of {', '.join(BYTES)} (found {printable(tensor.dtype)})")
    if not tensor.shape:
        data = StoredTensor(tensor.name, tensor.path, tensor.dtype, (1,), tensor.start).read_rows(0, 1)
        return decode(data, tensor.dtype).reshape(())
    return decode(tensor.read_rows(0, count), tensor.dtype).reshape(tensor.shape)


def decode(data: np.ndarray, dtype: str) -> np.ndarray:
    """Decode bytes: floats to float32, integers unchanged."""
    if dtype in FLOATS_OF_8_BITS:
        return FLOATS_OF_8_BITS[dtype][data]
    if dtype in ("BF16", "F64", "F32", "F16"):
        return as_float32(data, dtype)
    return data.view(WORDS[dtype])


def map_words(tensor: StoredTensor) -> np.ndarray:
    """Map a tensor of integers into memory, [rows, columns], so that columns can be read."""
    return np.memmap(tensor.path, WORDS[tensor.dtype], "r", tensor.start, tensor.shape)


def require_dtype(tensor: StoredTensor, dtypes: Sequence[str]) -> StoredTensor:
    """Return the tensor. Raises ModelError unless its type is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise make_error(tensor, f"expected the type {' or '.join(dtypes)}, found {printable(tensor.dtype)}")
    return tensor


def tabulate_float8(exponent: int, mantissa: int, bias: int, is_ieee: bool) -> np.ndarray:
    """Tabulate all 8-bit floats with this format, float32 [256].

    exponent, mantissa: their bits. is_ieee: the highest exponent is infinity and NaN; otherwise only all ones are NaN
    (OCP 8-bit Floating Point 1.0).
    """
    code = np.arange(256)
    sign, power, fraction = code >> 7, code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1
    size = np.where(
        power == 0,
        np.ldexp(fraction.astype(np.float64), 1 - bias - mantissa),
        np.ldexp(fraction + 2.0**mantissa, power - bias - mantissa),
    )
    if is_ieee:
        size = np.where(power == (1 << exponent) - 1, np.where(fraction == 0, np.inf, np.nan), size)
    else:
        size = np.where((code & 0x7F) == 0x7F, np.nan, size)
    return np.where(sign == 1, -size, size).astype(np.float32)


def tabulate_exponents() -> np.ndarray:
    """Tabulate the powers of two of the format E8M0, float32 [256]."""
    powers = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)
    powers[255] = np.nan
    return powers


FLOATS_OF_8_BITS = {
    "F8_E4M3": tabulate_float8(4, 3, 7, False),
    "F8_E5M2": tabulate_float8(5, 2, 15, True),
    "F8_E8M0": tabulate_exponents(),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # 4-bit floats


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Split 32-bit words into codes of `bits` bits, the lowest first: int32 [..., words * (32 // bits)]."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    parts = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return parts.reshape(*words.shape[:-1], -1).astype(np.int32)


def unpack_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Split rows of 32-bit words, read as a stream of bits, into codes: int32 [rows, n].

    A code may span two words, as with 3 bits.
    """
    bytes_ = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    bit_rows = np.unpackbits(bytes_, axis=1, bitorder="little")
    bit_rows = bit_rows[:, : bit_rows.shape[1] // bits * bits].reshape(len(words), -1, bits)
    return (bit_rows.astype(np.int32) << np.arange(bits)).sum(axis=2, dtype=np.int32)


def unpack_nibbles(data: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Split bytes into 4-bit codes: uint8 [..., 2 * bytes]."""
    low, high = data & 15, data >> 4
    return np.stack([high, low] if high_first else [low, high], axis=-1).reshape(*data.shape[:-1], -1)
