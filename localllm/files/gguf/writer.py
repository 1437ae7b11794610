"""Write GGUF files with only one chunk of one tensor in memory at a time.

The header needs only the shapes of tensors, so it is written before any weight is computed. Source: the GGUF
specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian).
"""

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

import numpy as np

from localllm.files.gguf.header import ALIGNMENT, ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING
from localllm.files.safe_file import SafeFile
from localllm.frozen import frozen
from localllm.quant.formats import BY_NAME, Format

VERSION = 3
UINT32, INT32, FLOAT32, UINT64, INT64 = 4, 5, 6, 10, 11
TYPE_IDS = {np.dtype(scalar.format): kind for kind, scalar in SCALARS.items()}  # NumPy dtype -> GGUF value type
LENGTH = struct.Struct("<Q")


class PackedValue(bytes):
    """A metadata value as stored in a file: its type id, then its bytes (see GGUFFile.packed)."""


@frozen
class OutputTensor:
    """A tensor to be written, whose bytes are computed on demand."""

    name: str
    format: Format
    shape: tuple[int, ...]  # in weights, the length of a row last
    # Chunks of its bytes in order, computed on demand.
    pieces: Iterable[bytes | memoryview | np.ndarray] = field(default=(), compare=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])

    @classmethod
    def from_array(cls, name: str, weights: np.ndarray) -> "OutputTensor":
        """Wrap an array of one of GGUF's plain types: float32, float16, int32, ..."""
        kind = {"f": "F", "i": "I"}[weights.dtype.kind] + str(8 * weights.itemsize)
        return cls(name, BY_NAME[kind], weights.shape, (np.ascontiguousarray(weights),))


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, object], tensors: Sequence[OutputTensor]) -> None:
    """Write a GGUF file, atomically.

    metadata: values that `pack_value` accepts; `general.alignment` sets the alignment of tensors. Raises LocalllmError
    if the disk is full or a write fails, ValueError if a tensor's chunks do not have the size of its shape.
    """
    with SafeFile(path) as file:
        write_body(file, metadata, tensors)


def write_body(file: SafeFile, metadata: Mapping[str, object], tensors: Sequence[OutputTensor]) -> None:
    """Write the header and all tensors into an open file."""
    alignment = get_alignment(metadata)
    file.write(build_header(metadata, tensors, alignment))
    for tensor in tensors:
        start = file.position
        for piece in tensor.pieces:
            file.write(piece)
        if file.position - start != tensor.nbytes:
            raise ValueError(f"tensor {tensor.name}: expected {tensor.nbytes} bytes, found {file.position - start}")
        file.write(bytes(-file.position % alignment))


def get_alignment(metadata: Mapping[str, object]) -> int:
    """Return general.alignment, which tensors are aligned to in the file, in bytes."""
    value = metadata.get(ALIGNMENT)
    return DEFAULT_ALIGNMENT if value is None else int.from_bytes(pack_value(value)[4:8], "little")


def build_header(
    metadata: Mapping[str, object], tensors: Sequence[OutputTensor], alignment: int = DEFAULT_ALIGNMENT
) -> bytes:
    """Return the bytes before the weights, padded to the alignment."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [pack_string(key), pack_value(value)]
    for tensor, start in zip(tensors, compute_offsets(tensors, alignment), strict=True):
        dimensions = tensor.shape[::-1]
        parts += [pack_string(tensor.name), struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)]
        parts.append(struct.pack("<IQ", tensor.format.id, start))
    parts.append(bytes(-sum(map(len, parts)) % alignment))
    return b"".join(parts)  # at once: a stranger's metadata may be large


def compute_offsets(tensors: Sequence[OutputTensor], alignment: int) -> Iterator[int]:
    """Yield the offset of each tensor, relative to the end of the header."""
    position = 0
    for tensor in tensors:
        yield position
        position += -(-tensor.nbytes // alignment) * alignment


def pack_string(value: str | bytes) -> bytes:
    """Encode a string after its length."""
    data = value.encode() if isinstance(value, str) else value
    return LENGTH.pack(len(data)) + data


def pack_value(value: object) -> PackedValue:
    """Encode a metadata value after its type id. Raises TypeError for types that GGUF lacks.

    bool and str keep their types, bytes become a string, a float becomes float32, and an int the first of uint32,
    int32, uint64 and int64 that holds it. A NumPy scalar or array keeps its dtype. A list or tuple becomes an array of
    strings, bool, float32 or int32.
    """
    if isinstance(value, PackedValue):
        return value
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        return PackedValue(struct.pack("<IIQ", ARRAY, TYPE_IDS[dtype], value.size) + value.astype(dtype).tobytes())
    if isinstance(value, list | tuple):
        return pack_array(value)
    kind, data = pack_scalar(value)
    return PackedValue(struct.pack("<I", kind) + data)


def pack_array(values: Sequence[object]) -> PackedValue:
    """Encode a sequence of strings or of numbers; an empty one becomes an array of strings."""
    strings = [value for value in values if isinstance(value, str | bytes)]
    if len(strings) == len(values):
        return PackedValue(struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(pack_string, strings)))
    dtype = np.bool_ if isinstance(values[0], bool) else np.float32 if isinstance(values[0], float) else np.int32
    if not all(isinstance(value, bool | int | float) for value in values):
        raise TypeError("an array of a GGUF file must consist of strings, or of numbers")
    return pack_value(np.array(values, dtype))


def pack_scalar(value: object) -> tuple[int, bytes]:
    """Return the type id and the bytes of a value."""
    if isinstance(value, np.generic):
        return TYPE_IDS[value.dtype.newbyteorder("<")], value.tobytes()
    if isinstance(value, bool):
        return BOOL, bytes([value])
    if isinstance(value, str | bytes):
        return STRING, pack_string(value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, int):
        limits = [(UINT32, 0, 32), (INT32, -(1 << 31), 31), (UINT64, 0, 64), (INT64, -(1 << 63), 63)]
        kind = next((kind for kind, least, bits in limits if least <= value < 1 << bits), None)
        if kind is None:
            raise OverflowError(f"a GGUF file cannot hold {value}")
        return kind, SCALARS[kind].pack(value)
    raise TypeError(f"a GGUF file cannot hold a {type(value).__name__}")
