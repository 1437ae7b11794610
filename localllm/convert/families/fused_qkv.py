"""Checkpoints that store queries, keys and values in one matrix."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import (
    ATTENTION,
)
from localllm.convert.tensors import Shape, TensorSource, pick_rows, to_pairs

Rows = Callable[[np.ndarray, Sizes], np.ndarray]  # numbers of all fused rows to those of one part


def take_rows(name: str, rows: Rows, as_pairs: bool, *dimensions: str) -> DerivedTensor:
    """Take some rows of the fused QKV matrix; as_pairs: reorder them from halves to pairs."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = rows(np.arange(sizes["fused_rows"]), sizes)
        taken_rows = pick_rows(sources[0], shape, lambda places: numbers[places])
        return to_pairs(taken_rows, sizes["head_dim"]) if as_pairs else taken_rows

    return DerivedTensor(dimensions, {f"{name}.weight": ("fused_rows", "width")}, build)


def split_qkv(name: str, parts: Sequence[Rows]) -> Layer:
    """Declare queries, keys and values of a fused matrix."""
    shapes = (ATTENTION["attn_q"], ATTENTION["attn_k"], ATTENTION["attn_v"])
    kinds = zip("qkv", parts, shapes, strict=True)
    return {f"attn_{kind}": take_rows(name, rows, kind != "v", *shape) for kind, rows, shape in kinds}


def of_groups(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    return rows.reshape(sizes["kv_heads"], -1, sizes["head_dim"])


IN_GROUPS = split_qkv(
    "attention.wqkv",
    (
        lambda rows, sizes: of_groups(rows, sizes)[:, :-2].ravel(),
        lambda rows, sizes: of_groups(rows, sizes)[:, -2].ravel(),
        lambda rows, sizes: of_groups(rows, sizes)[:, -1].ravel(),
    ),
)


ONE_AFTER_OTHER: tuple[Rows, ...] = (
    lambda rows, sizes: rows[: sizes["queries"]],
    lambda rows, sizes: rows[sizes["queries"] : -sizes["keys"]],
    lambda rows, sizes: rows[-sizes["keys"] :],
)


def with_fused_rows(h: CheckpointFacts) -> CheckpointFacts:
    return h.updated({"fused_rows": h.sizes["queries"] + 2 * h.sizes["keys"]})
