"""Lazy transformations of a checkpoint's tensors into those of a GGUF file.

A source is a tensor whose rows are read on demand. The functions make sources from sources; none reads more than the
requested rows, or, to transpose, one whole matrix.
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
    """A checkpoint's tensor, which several threads may read at once."""

    @property
    def dtype(self) -> str: ...  # a key of BYTES, or a block format of GGUF

    @property
    def shape(self) -> Shape: ...  # the row length last

    @property
    def rows(self) -> Rows: ...


@dataclass(frozen=True, eq=False)
class DerivedSource:
    """A source that is computed from others."""

    dtype: str
    shape: Shape
    rows: Rows


Sizes = Mapping[str, int]  # of a model, by names that shapes are made of
Build = Callable[[Sequence[TensorSource], Shape, Sizes], TensorSource]  # (stored tensors, shape, sizes) to the tensor


def pick_rows(source: TensorSource, shape: Shape, where: Callable[[np.ndarray], np.ndarray]) -> DerivedSource:
    """Reorder rows.

    where: maps the indices of new rows, int [rows], to those of the source.
    """

    def rows(first: int, last: int) -> np.ndarray:
        places = where(np.arange(first, last))
        start = int(places.min())
        result: np.ndarray = source.rows(start, int(places.max()) + 1)[places - start]
        return result

    return DerivedSource(source.dtype, shape, rows)


def to_pairs(source: TensorSource, head_dim: int, rotated_dims: int = 0) -> DerivedSource:
    """Reorder rows from rotating halves of a head to rotating pairs, as in GGUF's llama.

    A checkpoint rotates dimension i of a head with dimension i + rotated_dims / 2, GGUF's llama rotates 2 i with 2 i +
    1. rotated_dims: number of rotated dimensions of a head, 0 for all.
    """
    rotated_dims = rotated_dims or head_dim

    def where(rows: np.ndarray) -> np.ndarray:
        head, within = np.divmod(rows, head_dim)
        return head * head_dim + np.where(within < rotated_dims, within % 2 * (rotated_dims // 2) + within // 2, within)

    return pick_rows(source, source.shape, where)


def to_halves(source: TensorSource, head_dim: int, rotated_dims: int) -> DerivedSource:
    """Reorder rows from rotating pairs to rotating halves of a head's first `rotated_dims` rows.

    Undoes `to_pairs`.
    """

    def where(rows: np.ndarray) -> np.ndarray:
        head, within = np.divmod(rows, head_dim)
        half = rotated_dims // 2
        return head * head_dim + np.where(within < rotated_dims, within % half * 2 + within // half, within)

    return pick_rows(source, source.shape, where)


def take_strided(source: TensorSource, shape: Shape, period: int, start: int, step: int = 1) -> DerivedSource:
    """Take every `step`-th row from `start` on in each `period` rows, as many as `shape` has."""

    def where(rows: np.ndarray) -> np.ndarray:
        matrix, within = np.divmod(rows, shape[-2])
        result: np.ndarray = matrix * period + start + within * step
        return result

    return pick_rows(source, shape, where)


def stack(sources: Sequence[TensorSource]) -> DerivedSource:
    """Stack matrices of one shape."""
    height = sources[0].shape[-2]

    def rows(first: int, last: int) -> np.ndarray:
        return np.concatenate(
            [
                sources[number].rows(max(first - number * height, 0), min(last - number * height, height))
                for number in range(first // height, -(-last // height))
            ]
        )

    return DerivedSource(sources[0].dtype, (len(sources), *sources[0].shape), rows)


def pad_rows(source: TensorSource, height: int) -> TensorSource:
    """Pad a matrix with rows of zeros up to a height."""
    stored_rows, width = source.shape

    def rows(first: int, last: int) -> np.ndarray:
        padded = np.zeros((last - first, width * BYTES[source.dtype]), np.uint8)
        if first < stored_rows:
            padded[: stored_rows - first] = source.rows(first, min(last, stored_rows))
        return padded

    return source if stored_rows == height else DerivedSource(source.dtype, (height, width), rows)


def transpose(source: TensorSource) -> DerivedSource:
    """Transpose every matrix of a source."""
    *stack, height, width = source.shape
    item = BYTES[source.dtype]

    def rows(first: int, last: int) -> np.ndarray:
        parts = []
        for matrix in range(first // width, -(-last // width)):
            matrix_rows = source.rows(matrix * height, (matrix + 1) * height).reshape(height, width, item)
            columns = matrix_rows[:, max(first - matrix * width, 0) : min(last - matrix * width, width)]
            parts.append(columns.transpose(1, 0, 2).reshape(-1, height * item))
        return np.concatenate(parts)

    return DerivedSource(source.dtype, (*stack, width, height), rows)


def reshape(source: TensorSource, shape: Shape) -> DerivedSource:
    """View the rows as matrices of other shapes."""
    return DerivedSource(source.dtype, shape, source.rows)


def permute_columns(source: TensorSource, order: np.ndarray) -> DerivedSource:
    """Reorder columns.

    order: int [columns], the source's column for each new column.
    """
    item = BYTES[source.dtype]

    def rows(first: int, last: int) -> np.ndarray:
        all_rows = source.rows(first, last).reshape(last - first, source.shape[-1], item)
        return np.ascontiguousarray(all_rows[:, order]).reshape(last - first, -1)

    return DerivedSource(source.dtype, source.shape, rows)


def to_column(vector: TensorSource) -> DerivedSource:
    """View a vector as a matrix of one column."""
    return from_array(as_float32(vector.rows(0, 1), vector.dtype).reshape(-1, 1))


def to_vector(matrix: TensorSource) -> DerivedSource:
    """View a matrix of one column as a vector."""
    return from_array(as_float32(matrix.rows(0, matrix.shape[0]), matrix.dtype).reshape(-1))


def take_every_second(matrix: TensorSource, start: int) -> DerivedSource:
    """Take columns start, start + 2, ... of a small matrix."""
    return from_array(as_float32(matrix.rows(0, matrix.shape[0]), matrix.dtype)[:, start::2])


def map_values(source: TensorSource, function: Callable[[np.ndarray], np.ndarray]) -> DerivedSource:
    """Apply a function to every value, in float32."""

    def rows(first: int, last: int) -> np.ndarray:
        numbers = as_float32(source.rows(first, last), source.dtype)
        return np.ascontiguousarray(function(numbers), np.float32).view(np.uint8)

    return DerivedSource("F32", source.shape, rows)


def scale_rows(source: TensorSource, factors: Sequence[np.ndarray]) -> TensorSource:
    """Multiply rows by several factors in turn, each float32 [rows], or [1] for all rows."""
    if not factors:
        return source

    def rows(first: int, last: int) -> np.ndarray:
        numbers = as_float32(source.rows(first, last), source.dtype)
        for factor in factors:
            numbers = numbers * (factor if len(factor) == 1 else factor[first:last, None])
        return np.ascontiguousarray(numbers, np.float32).view(np.uint8)

    return DerivedSource("F32", source.shape, rows)


def to_float32(source: TensorSource) -> TensorSource:
    """Convert to float32."""
    return source if source.dtype == "F32" else map_values(source, lambda numbers: numbers)


def from_array(values: np.ndarray) -> DerivedSource:
    """Wrap an array in memory as a source."""
    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(prod(values.shape[:-1]), -1)
    return DerivedSource("F32", values.shape, lambda first, last: data[first:last])


def as_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """Decode bytes of this type to float32 [rows, columns]."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def to_mxfp4_blocks(blocks: TensorSource, scales: TensorSource) -> DerivedSource:
    """Rearrange MXFP4 weights into GGUF's blocks of 32.

    A block is a scale, then 16 bytes, the first weights in the low halves. blocks: uint8 [..., blocks of a row, 16],
    two neighbouring weights in a byte, the first in its low half; scales: uint8 [..., blocks of a row]. Codes and
    scales are the same in both (OCP Microscaling Formats 1.0).
    """
    *outer, count, _ = blocks.shape

    def rows(first: int, last: int) -> np.ndarray:
        pairs = blocks.rows(first * count, last * count).reshape(-1, 16)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, 32)
        scale = scales.rows(first, last).reshape(-1, 1)
        return np.concatenate([scale, codes[:, :16] | codes[:, 16:] << 4], axis=1).reshape(last - first, count * 17)

    return DerivedSource("MXFP4", (*outer, count * 32), rows)


def take_half(number: int) -> Build:
    """Return a function that takes one of two matrices that are stored one below the other.

    With experts, it takes one of each expert's.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, 2 * shape[-2], number * shape[-2])

    return build


def ungroup_heads(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Reorder rows or biases of groups of heads to all queries, all keys, all values.

    A group has several queries, a key and a value.
    """
    groups = np.arange(shape[0]).reshape(sizes["kv_heads"], -1, sizes["head_dim"])
    order = np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
    matrix = sources[0] if len(shape) > 1 else to_column(sources[0])
    sorted_rows = pick_rows(matrix, matrix.shape, lambda rows: order[rows])
    return sorted_rows if len(shape) > 1 else to_vector(sorted_rows)


def take_fused(rows: Callable[[np.ndarray, Sizes], np.ndarray], as_pairs: bool) -> Build:
    """Return a function that takes some rows of a fused matrix.

    as_pairs: reorder them from halves to pairs.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = rows(np.arange(sizes["fused_rows"]), sizes)
        taken_rows = pick_rows(sources[0], shape, lambda places: numbers[places])
        return to_pairs(taken_rows, sizes["head_dim"]) if as_pairs else taken_rows

    return build


def reshape_groups(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    return rows.reshape(sizes["kv_heads"], -1, sizes["head_dim"])


def transpose_stacked(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Transpose experts' matrices, stored one below the other, into a stack."""
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
    "grouped_q": take_fused(lambda rows, sizes: reshape_groups(rows, sizes)[:, :-2].ravel(), as_pairs=True),
    "grouped_k": take_fused(lambda rows, sizes: reshape_groups(rows, sizes)[:, -2].ravel(), as_pairs=True),
    "grouped_v": take_fused(lambda rows, sizes: reshape_groups(rows, sizes)[:, -1].ravel(), as_pairs=False),
    # A matrix that stacks all queries, then all keys, then all values.
    "stacked_q": take_fused(lambda rows, sizes: rows[: sizes["queries"]], as_pairs=True),
    "stacked_k": take_fused(lambda rows, sizes: rows[sizes["queries"] : -sizes["keys"]], as_pairs=True),
    "stacked_v": take_fused(lambda rows, sizes: rows[-sizes["keys"] :], as_pairs=False),
    "decay": lambda sources, shape, sizes: map_values(sources[0], lambda logarithms: -np.exp(logarithms)),
    "first_half": take_half(0),
    "second_half": take_half(1),
}  # fmt: skip
