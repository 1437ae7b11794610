"""Test the steps that a GPU runs in one launch."""

from typing import Any

import numpy as np

from localllm.engine.cuda.lowering import fuse_norms
from localllm.engine.lower.tape import Buffer, KernelStep
from localllm.kernels.table import KERNELS

COUNT, FEW = np.zeros(1, np.int64), np.zeros(1, np.int64)


def add(x: Buffer, z: Buffer, y: Buffer, **changed: Any) -> KernelStep:
    arguments = {"count": COUNT, "x": x, "z": z, "z_stride": 64, "y": y, "stride": 64, "columns": 16} | changed
    return KernelStep("add", arguments, 1, None, [x, z], [y])


def norm(x: Buffer, y: Buffer, group: int = 16, **changed: Any) -> KernelStep:
    arguments = {"count": COUNT, "x": x, "weight": np.ones(16), "y": y, "stride": 64, "columns": 16, "group": group}
    return KernelStep("rms_norm", arguments | {"epsilon": 1e-5} | changed, 1, None, [x], [y])


def rope(x: Buffer, y: Buffer, table: Buffer, head_dim: int = 8) -> KernelStep:
    arguments = {"count": COUNT, "x": x, "y": y, "stride": 64, "heads": 2, "head_dim": head_dim, "table": table}
    return KernelStep("rope", arguments | {"pairs": 4, "step": 1, "apart": 4}, 1, None, [x, table], [y])


def names(*steps: KernelStep) -> list[str]:
    fused = fuse_norms(list(steps))
    for step in fused:
        assert step.arguments.keys() == set(KERNELS[step.kernel].arguments._fields)
    return [step.kernel for step in fused]


def buffers(count: int) -> list[Buffer]:
    return [Buffer(1, 64) for _ in range(count)]


def test_a_sum_and_its_norm_are_fused_unless_other_rows_or_steps_are_between():
    x, z, y, normed = buffers(4)
    (step,) = fuse_norms([add(x, z, x), norm(x, normed)])
    assert step.kernel == "add_rms_norm" and step.reads == [x, z] and step.writes == [x, normed]
    assert step.arguments["total"] is x and step.arguments["y"] is normed
    assert names(add(x, z, y), norm(y, y), add(z, y, z)) == ["add_rms_norm", "add"]
    apart = ["add", "rms_norm"]
    assert names(add(x, z, y, z_stride=0), norm(y, normed)) == apart, "a bias"
    assert names(add(x, z, y), norm(y, normed, group=8)) == apart, "heads"
    assert names(add(x, z, y), norm(y, normed, count=FEW)) == apart, "other rows"
    assert names(add(x, z, y), norm(x, normed)) == apart, "of something else"
    assert names(add(x, z, y), add(z, z, z), norm(y, normed)) == ["add", "add", "rms_norm"], "later"


def test_norms_of_heads_and_their_rotation_are_fused_if_nothing_reads_between():
    x, q, k, other, table = buffers(5)
    fused = fuse_norms([norm(x, q, 8), norm(k, k, 8), rope(q, q, table), rope(k, k, table)])
    assert [step.kernel for step in fused] == ["rms_norm_rope"] * 2
    assert fused[0].reads == [x, table] and fused[0].writes == [q]
    assert fused[0].arguments["x"] is x and fused[0].arguments["y"] is q
    apart = ["rms_norm", "rope"]
    assert names(norm(x, q, 16), rope(q, q, table)) == apart, "the norm of all heads together"
    assert names(norm(x, q, 8), rope(q, k, table)) == apart, "somebody may want what is not rotated"
    assert names(norm(x, q, 8), add(k, k, x), rope(q, q, table)) == ["rms_norm", "add", "rope"], "x has changed"
    assert names(norm(x, q, 8), add(q, k, other), rope(q, q, table)) == ["rms_norm", "add", "rope"], "q is read before"
