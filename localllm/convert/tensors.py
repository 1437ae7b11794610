"""A checkpoint's tensors as a GGUF file has them: formats, and the order of rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localllm.convert.families import Family
from localllm.convert.hyperparameters import Hyperparameters
from localllm.convert.weights import Stored
from quant.formats import BY_NAME, Format

Rows = Callable[[int, int], np.ndarray]  # rows first to last - 1, as bytes


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """One tensor, as a GGUF file would have it; its rows are read when they are asked for, from any thread."""

    name: str
    format: Format  # F32, F16 or BF16
    shape: tuple[int, ...]  # the length of a row last
    read: Rows

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows first to last - 1 (a vector is one row): uint8 [last - first, bytes of a row]. Raises ModelError."""
        return self.read(first, last)

    def forget(self, first: int, last: int) -> None:
        """Nothing is kept."""


def gguf_tensor(name: str, tensor: Stored, family: Family, sizes: Hyperparameters) -> CheckpointTensor:
    """A tensor with the order of rows, and the format, that GGUF's readers expect: vectors are F32."""
    read: Rows = tensor.rows
    if len(tensor.shape) == 1:
        vector = as_float32(tensor.rows(0, 1), tensor.dtype).reshape(-1)
        if name.split(".")[-2] in family.rotated:
            vector = vector[pairs_from_halves(np.arange(len(vector)), sizes.head_dim)]
        return made_tensor(name, vector)
    if name.split(".")[-2] in family.rotated:
        read = in_pairs(read, sizes.head_dim)
    if tensor.dtype == "F64":
        return CheckpointTensor(name, BY_NAME["F32"], tensor.shape, in_float32(read))
    return CheckpointTensor(name, BY_NAME[tensor.dtype], tensor.shape, read)


def made_tensor(name: str, values: np.ndarray) -> CheckpointTensor:
    """A small tensor that is kept in memory: float32 [n]."""
    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(1, -1)
    return CheckpointTensor(name, BY_NAME["F32"], values.shape, lambda first, last: data[first:last])


def pairs_from_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where rows of a GGUF file are in a checkpoint: int [rows].

    A checkpoint rotates number i of a head with number i + head_dim / 2, GGUF's llama number 2 i with number 2 i + 1.
    """
    head, within = np.divmod(rows, head_dim)
    return head * head_dim + within % 2 * (head_dim // 2) + within // 2


def in_pairs(read: Rows, head_dim: int) -> Rows:
    """A matrix's rows in GGUF's order, by reading whole heads."""

    def rows(first: int, last: int) -> np.ndarray:
        start, stop = first // head_dim * head_dim, -(-last // head_dim) * head_dim
        return read(start, stop)[pairs_from_halves(np.arange(first, last), head_dim) - start]

    return rows


def in_float32(read: Rows) -> Rows:
    """The rows of a float64 matrix as float32."""
    return lambda first, last: np.ascontiguousarray(as_float32(read(first, last), "F64")).view(np.uint8)


def as_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in bytes of this type: float32 [rows, columns]."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
