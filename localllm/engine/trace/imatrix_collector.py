"""Collect the sums of squares of matrices' inputs, for importance matrices."""

import numpy as np

from localllm.engine.operations.activation import Activation
from localllm.engine.operations.experts import ExpertLinear
from localllm.engine.operations.linear import AddSquares, Linear
from localllm.engine.operations.operation import Operation
from localllm.errors import ModelError


class ImatrixCollector:
    """Sums of the squares of every matrix's input, per column.

    The output matrix gets only tokens whose logits are requested.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}  # by the matrix's name; some share memory

    @staticmethod
    def require_watchable(operations: list[Operation], path: str) -> None:
        """Raise ModelError, which names the file, for mixtures of experts, whose inputs differ by expert."""
        if any(isinstance(operation, ExpertLinear) for operation in operations):
            raise ModelError(f"{path}: an importance matrix of a model with experts is not supported yet")

    def watch(self, operations: list[Operation]) -> list[Operation]:
        """Insert an operation before each matrix product that adds to the sums, once per activation."""
        watched: list[Operation] = []
        sums: dict[Activation, np.ndarray] = {}
        for operation in operations:
            if isinstance(operation, Linear):
                (x,) = operation.inputs
                if x not in sums:
                    sums[x] = np.zeros(-(-x.columns // 16) * 16, np.float32)
                    watched.append(AddSquares((x,), Activation(x.rows, 0), sums[x]))
                self._sums[operation.weight.name] = sums[x][: x.columns]
            watched.append(operation)
        return watched

    def add(self, name: str, x: np.ndarray) -> None:
        """Add the squares of the input of matrix `name`, float32 [rows, columns]."""
        self._sums[name] = self._sums.get(name, np.zeros(x.shape[1])) + (x.astype(np.float64) ** 2).sum(axis=0)

    def take(self) -> dict[str, np.ndarray]:
        """Return the sums since the last call, by the matrix's name: float32 [columns]."""
        taken = {name: sums.astype(np.float32) for name, sums in self._sums.items()}
        for sums in self._sums.values():
            sums[:] = 0
        return taken
