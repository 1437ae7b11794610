"""Functions that records of checkpoints name: how a GGUF tensor is made of stored ones."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.convert.family import Build, Sizes
from localllm.convert.tensors import (
    Shape,
    TensorSource,
    column,
    flat,
    from_array,
    map_values,
    pick_rows,
    reshape,
    take_strided,
    to_float32,
    to_pairs,
    transpose,
)


def half(number: int) -> Build:
    """Return a function that takes one of two matrices, of each expert if there are any, one stored below the other."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, 2 * shape[-2], number * shape[-2])

    return build


def grouped(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Reorder rows or biases of groups of heads (queries, a key, a value) to all queries, all keys, all values."""
    groups = np.arange(shape[0]).reshape(sizes["kv_heads"], -1, sizes["head_dim"])
    order = np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
    matrix = sources[0] if len(shape) > 1 else column(sources[0])
    sorted_rows = pick_rows(matrix, matrix.shape, lambda rows: order[rows])
    return sorted_rows if len(shape) > 1 else flat(sorted_rows)


def fused(rows: Callable[[np.ndarray, Sizes], np.ndarray], as_pairs: bool) -> Build:
    """Return a function that takes some rows of a fused matrix; as_pairs: reorder them from halves to pairs."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = rows(np.arange(sizes["fused_rows"]), sizes)
        taken_rows = pick_rows(sources[0], shape, lambda places: numbers[places])
        return to_pairs(taken_rows, sizes["head_dim"]) if as_pairs else taken_rows

    return build


def of_groups(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    return rows.reshape(sizes["kv_heads"], -1, sizes["head_dim"])


def turned(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Transpose experts' matrices, stored one below the other, into a stack."""
    return transpose(reshape(sources[0], (shape[0], shape[2], shape[1])))


FUNCTIONS: dict[str, Build] = {
    "same": lambda sources, shape, sizes: sources[0],
    "reshape": lambda sources, shape, sizes: reshape(sources[0], shape),
    "transpose": lambda sources, shape, sizes: transpose(sources[0]),
    "column": lambda sources, shape, sizes: column(sources[0]),
    "full": lambda sources, shape, sizes: to_float32(sources[0]),  # a matrix that is always F32
    "offset": lambda sources, shape, sizes: map_values(sources[0], lambda numbers: numbers + 1),  # of a norm
    "ones": lambda sources, shape, sizes: from_array(np.ones(shape, np.float32)),
    "turned": turned,
    "grouped": grouped,
    # Parts of it, queries and keys with pairs side by side.
    "grouped_q": fused(lambda rows, sizes: of_groups(rows, sizes)[:, :-2].ravel(), as_pairs=True),
    "grouped_k": fused(lambda rows, sizes: of_groups(rows, sizes)[:, -2].ravel(), as_pairs=True),
    "grouped_v": fused(lambda rows, sizes: of_groups(rows, sizes)[:, -1].ravel(), as_pairs=False),
    # The same of a matrix with all queries, all keys, all values.
    "stacked_q": fused(lambda rows, sizes: rows[: sizes["queries"]], as_pairs=True),
    "stacked_k": fused(lambda rows, sizes: rows[sizes["queries"] : -sizes["keys"]], as_pairs=True),
    "stacked_v": fused(lambda rows, sizes: rows[-sizes["keys"] :], as_pairs=False),
    "decay": lambda sources, shape, sizes: map_values(sources[0], lambda logarithms: -np.exp(logarithms)),
    "first_half": half(0),
    "second_half": half(1),
}  # fmt: skip
