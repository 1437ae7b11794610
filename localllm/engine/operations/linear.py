"""Multiply by a matrix; each target has its own steps (localllm.engine.cpu.lowering, localllm.engine.cuda.lowering)."""

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import StepBuilder, Target
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase
from localllm.engine.operations.operation import MatrixProduct, Operation, operation
from localllm.errors import ModelError, UnsupportedError


class Linear(MatrixProduct):
    """x W^T + bias."""

    VERB = "linear"

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, weight: Weight) -> Activation:
        rows, columns = recorder._matrix(weight)
        if columns != x.columns:
            raise ModelError(f"tensor {weight.name} must have {x.columns} columns (found {columns})")
        bias = recorder._load_vector(weight.bias, rows) if weight.bias else None
        if weight.scale and weight.bias:
            raise UnsupportedError(f"tensor {weight.name}: a scale and a bias together are not supported")
        y = recorder._add(Linear((x,), Activation(x.rows, rows), weight, bias))
        return recorder.scale(y, weight.scale) if weight.scale else y

    @staticmethod
    def reference(run: ReferenceBase, x: Array, weight: Weight) -> Array:
        if run._observer and not weight.first_row:  # the input is observed once for all slices of a matrix
            run._observer.add(weight.name, x)
        return add_scale_and_bias(x @ run.matrix(weight).T, weight)


@operation
class AddSquares(Operation):
    """The squares of a matrix's input, added to `sums`, float32 [columns padded to 16]."""

    VERB = "add_squares"

    sums: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (x,) = self.inputs
        parts = min(-(-x.columns // 64), 4 * target.threads)
        steps.append_split_step("add_squares", x, {"sums": self.sums}, parts)


def add_scale_and_bias(y: np.ndarray, weight: Weight) -> np.ndarray:
    """Apply a matrix's scale and bias, if it has them, to the rows of a product."""
    y = y * np.float32(weight.scale.read_number()) if weight.scale else y
    return y + weight.bias.read_vector() if weight.bias else y
