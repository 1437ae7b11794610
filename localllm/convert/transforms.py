"""Transform a checkpoint's tensors into those of a GGUF file, lazily.

A source is a tensor whose rows are read on demand. Every function returns a source that reads no more than the
requested rows need; only `transpose` reads one whole matrix at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]
Rows = Callable[[int, int], np.ndarray]  # reads rows first to last - 1 of all matrices: uint8 [rows, bytes of a row]

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1,
         "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1}  # of a number  # fmt: skip


class TensorSource(Protocol):
    """A tensor whose rows are read on demand, by several threads at once."""

    @property
    def dtype(self) -> str: ...  # a key of BYTES, or a block format of GGUF

    @property
    def shape(self) -> Shape: ...  # the row length last

    @property
    def read_rows(self) -> Rows: ...


@dataclass(frozen=True, eq=False)
class DerivedSource:
    """A source whose rows are computed from those of others."""

    dtype: str
    shape: Shape
    read_rows: Rows


Sizes = Mapping[str, int]  # of a model, by names that shapes are made of
Build = Callable[[Sequence[TensorSource], Shape, Sizes], TensorSource]  # (stored tensors, shape, sizes) to the tensor


def pick_rows(source: TensorSource, shape: Shape, where: Callable[[np.ndarray], np.ndarray]) -> DerivedSource:
    """Select or reorder rows.

    where: maps new row indices, int [rows], to row indices of the source.
    """

    def read_rows(first: int, last: int) -> np.ndarray:
        places = where(np.arange(first, last))
        start = int(places.min())
        result: np.ndarray = source.read_rows(start, int(places.max()) + 1)[places - start]
        return result

    return DerivedSource(source.dtype, shape, read_rows)


def interleave_rope_rows(source: TensorSource, head_dim: int, rotated_dims: int = 0) -> DerivedSource:
    """Reorder the rows of each head from RoPE that rotates halves to RoPE that rotates adjacent pairs.

    A checkpoint rotates dimension i together with i + rotated_dims / 2; GGUF's llama rotates 2 i with 2 i + 1.
    rotated_dims: per head, 0 for all.
    """
    rotated_dims = rotated_dims or head_dim

    def where(rows: np.ndarray) -> np.ndarray:
        head, within = np.divmod(rows, head_dim)
        return head * head_dim + np.where(within < rotated_dims, within % 2 * (rotated_dims // 2) + within // 2, within)

    return pick_rows(source, source.shape, where)


def deinterleave_rope_rows(source: TensorSource, head_dim: int, rotated_dims: int) -> DerivedSource:
    """Reorder the rows of each head from RoPE that rotates adjacent pairs to RoPE that rotates halves.

    Inverts `interleave_rope_rows` for the first `rotated_dims` rows of a head.
    """

    def where(rows: np.ndarray) -> np.ndarray:
        head, within = np.divmod(rows, head_dim)
        half = rotated_dims // 2
        return head * head_dim + np.where(within < rotated_dims, within % half * 2 + within // half, within)

    return pick_rows(source, source.shape, where)


def take_strided(source: TensorSource, shape: Shape, period: int, start: int, step: int = 1) -> DerivedSource:
    """Take rows start, start + step, ... of each `period` rows, as many as a matrix of `shape` has."""

    def where(rows: np.ndarray) -> np.ndarray:
        matrix, within = np.divmod(rows, shape[-2])
        result: np.ndarray = matrix * period + start + within * step
        return result

    return pick_rows(source, shape, where)


def stack(sources: Sequence[TensorSource]) -> DerivedSource:
    """Stack matrices of the same shape."""
    height = sources[0].shape[-2]

    def read_rows(first: int, last: int) -> np.ndarray:
        return np.concatenate(
            [
                sources[number].read_rows(max(first - number * height, 0), min(last - number * height, height))
                for number in range(first // height, -(-last // height))
            ]
        )

    return DerivedSource(sources[0].dtype, (len(sources), *sources[0].shape), read_rows)


def pad_rows(source: TensorSource, height: int) -> TensorSource:
    """Append rows of zeros until a matrix has `height` rows."""
    stored_rows, width = source.shape

    def read_rows(first: int, last: int) -> np.ndarray:
        padded = np.zeros((last - first, width * BYTES[source.dtype]), np.uint8)
        if first < stored_rows:
            padded[: stored_rows - first] = source.read_rows(first, min(last, stored_rows))
        return padded

    return source if stored_rows == height else DerivedSource(source.dtype, (height, width), read_rows)


def transpose(source: TensorSource) -> DerivedSource:
    """Transpose each matrix of a source."""
    *stack, height, width = source.shape
    item = BYTES[source.dtype]

    def read_rows(first: int, last: int) -> np.ndarray:
        parts = []
        for matrix in range(first // width, -(-last // width)):
            matrix_rows = source.read_rows(matrix * height, (matrix + 1) * height).reshape(height, width, item)
            columns = matrix_rows[:, max(first - matrix * width, 0) : min(last - matrix * width, width)]
            parts.append(columns.transpose(1, 0, 2).reshape(-1, height * item))
        return np.concatenate(parts)

    return DerivedSource(source.dtype, (*stack, width, height), read_rows)


def reshape(source: TensorSource, shape: Shape) -> DerivedSource:
    """Give the same rows another shape."""
    return DerivedSource(source.dtype, shape, source.read_rows)


def permute_columns(source: TensorSource, order: np.ndarray) -> DerivedSource:
    """Reorder columns.

    order: int [columns], the source's column for each new column.
    """
    item = BYTES[source.dtype]

    def read_rows(first: int, last: int) -> np.ndarray:
        all_rows = source.read_rows(first, last).reshape(last - first, source.shape[-1], item)
        return np.ascontiguousarray(all_rows[:, order]).reshape(last - first, -1)

    return DerivedSource(source.dtype, source.shape, read_rows)


def to_column(vector: TensorSource) -> DerivedSource:
    """Load a vector as a matrix of one column."""
    return from_array(as_float32(vector.read_rows(0, 1), vector.dtype).reshape(-1, 1))


def to_vector(matrix: TensorSource) -> DerivedSource:
    """Load a matrix of one column as a vector."""
    return from_array(as_float32(matrix.read_rows(0, matrix.shape[0]), matrix.dtype).reshape(-1))


def take_every_second(matrix: TensorSource, start: int) -> DerivedSource:
    """Load columns start, start + 2, ... of a small matrix."""
    return from_array(as_float32(matrix.read_rows(0, matrix.shape[0]), matrix.dtype)[:, start::2])


def map_values(source: TensorSource, function: Callable[[np.ndarray], np.ndarray]) -> DerivedSource:
    """Apply a function to every value, in float32."""

    def read_rows(first: int, last: int) -> np.ndarray:
        numbers = as_float32(source.read_rows(first, last), source.dtype)
        return np.ascontiguousarray(function(numbers), np.float32).view(np.uint8)

    return DerivedSource("F32", source.shape, read_rows)


def scale_rows(source: TensorSource, factors: Sequence[np.ndarray]) -> TensorSource:
    """Multiply rows by each of several factors, float32 [rows], or [1] for all rows."""
    if not factors:
        return source

    def read_rows(first: int, last: int) -> np.ndarray:
        numbers = as_float32(source.read_rows(first, last), source.dtype)
        for factor in factors:
            numbers = numbers * (factor if len(factor) == 1 else factor[first:last, None])
        return np.ascontiguousarray(numbers, np.float32).view(np.uint8)

    return DerivedSource("F32", source.shape, read_rows)


def to_float32(source: TensorSource) -> TensorSource:
    """Convert values to float32."""
    return source if source.dtype == "F32" else map_values(source, lambda numbers: numbers)


def from_array(values: np.ndarray) -> DerivedSource:
    """Wrap an array in memory as an F32 source."""
    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(prod(values.shape[:-1]), -1)
    return DerivedSource("F32", values.shape, lambda first, last: data[first:last])


def as_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """Decode the bytes of rows to float32 [rows, columns].

    dtype: F64, F32, F16 or BF16.
    """
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def to_mxfp4_blocks(blocks: TensorSource, scales: TensorSource) -> DerivedSource:
    """Rearrange MXFP4 weights into GGUF's blocks of 32.

    blocks: uint8 [..., blocks per row, 16], two neighbouring weights per byte, the first in the low half. scales: uint8
    [..., blocks per row]. A GGUF block is its scale and 16 bytes, whose low halves are the first 16 weights. Codes and
    scales are the same in both (OCP Microscaling Formats 1.0).
    """
    *outer, count, _ = blocks.shape

    def read_rows(first: int, last: int) -> np.ndarray:
        pairs = blocks.read_rows(first * count, last * count).reshape(-1, 16)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 32)
        scale = scales.read_rows(first, last).reshape(-1, 1)
        return np.concatenate([scale, codes[:, :16] | codes[:, 16:] << 4], axis=1).reshape(last - first, count * 17)

    return DerivedSource("MXFP4", (*outer, count * 32), read_rows)


def make_half_taker(number: int) -> Build:
    """Return a function that takes the first (0) or second (1) of two matrices stored below each other.

    With experts, it takes one of each expert's two.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, 2 * shape[-2], number * shape[-2])

    return build


def ungroup_heads(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Reorder rows or biases from groups of heads to all queries, then all keys, then all values.

    A group has several query heads, a key head and a value head.
    """
    groups = np.arange(shape[0]).reshape(sizes["kv_heads"], -1, sizes["head_dim"])
    order = np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
    matrix = sources[0] if len(shape) > 1 else to_column(sources[0])
    sorted_rows = pick_rows(matrix, matrix.shape, lambda rows: order[rows])
    return sorted_rows if len(shape) > 1 else to_vector(sorted_rows)


def make_fused_taker(rows: Callable[[np.ndarray, Sizes], np.ndarray], as_pairs: bool) -> Build:
    """Return a function that takes some rows of a fused matrix.

    rows: selects from the indices of all rows. as_pairs: reorder the rows for RoPE that rotates pairs.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = rows(np.arange(sizes["fused_rows"]), sizes)
        taken_rows = pick_rows(sources[0], shape, lambda places: numbers[places])
        return interleave_rope_rows(taken_rows, sizes["head_dim"]) if as_pairs else taken_rows

    return build


def reshape_groups(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    return rows.reshape(sizes["kv_heads"], -1, sizes["head_dim"])


def transpose_stacked(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Split matrices of experts, stored one below the other, into a stack, and transpose each."""
    return transpose(reshape(sources[0], (shape[0], shape[2], shape[1])))


FUNCTIONS: dict[str, Build] = {
    "same": lambda sources, shape, sizes: sources[0],
    "reshape": lambda sources, shape, sizes: reshape(sources[0], shape),
    "transpose": lambda sources, shape, sizes: transpose(sources[0]),
    "column": lambda sources, shape, sizes: to_column(sources[0]),
    "full": lambda sources, shape, sizes: to_float32(sources[0]),  # a matrix that is always F32
    "offset": lambda sources, shape, sizes: map_values(sources[0], lambda numbers: numbers + 1),  # of a norm
    "ones": lambda sources, shape, sizes: from_array(np.ones(shape, np.float32)),
    "turned": transpose_stacked,
    "grouped": ungroup_heads,
    # Parts of it, queries and keys with pairs side by side.
    "grouped_q": make_fused_taker(lambda rows, sizes: reshape_groups(rows, sizes)[:, :-2].ravel(), as_pairs=True),
    "grouped_k": make_fused_taker(lambda rows, sizes: reshape_groups(rows, sizes)[:, -2].ravel(), as_pairs=True),
    "grouped_v": make_fused_taker(lambda rows, sizes: reshape_groups(rows, sizes)[:, -1].ravel(), as_pairs=False),
    # A matrix that stacks all queries, then all keys, then all values.
    "stacked_q": make_fused_taker(lambda rows, sizes: rows[: sizes["queries"]], as_pairs=True),
    "stacked_k": make_fused_taker(lambda rows, sizes: rows[sizes["queries"] : -sizes["keys"]], as_pairs=True),
    "stacked_v": make_fused_taker(lambda rows, sizes: rows[-sizes["keys"] :], as_pairs=False),
    "decay": lambda sources, shape, sizes: map_values(sources[0], lambda logarithms: -np.exp(logarithms)),
    "first_half": make_half_taker(0),
    "second_half": make_half_taker(1),
}  # fmt: skip
