"""Collect the sums of squared inputs of matrices, for importance matrices."""

import numpy as np

from localllm.engine.lower.activation import Activation
from localllm.engine.operations.experts import AddExpertSquares, ExpertLinear
from localllm.engine.operations.linear import AddSquares, Linear
from localllm.engine.operations.operation import Operation


class ImatrixCollector:
    """The sums of the squared inputs of every matrix by column, for stacks of experts by expert and column.

    For the output matrix, only tokens whose logits are requested count.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}  # by the matrix's name; some share memory
        self._counts: dict[str, np.ndarray] = {}  # number of input rows of each expert of a stack, int64 [experts]

    def insert_sums(self, operations: list[Operation]) -> list[Operation]:
        """Insert operations that add the inputs of matrix products to the sums, once per activation."""
        watched: list[Operation] = []
        by_input: dict[Activation, AddSquares | AddExpertSquares] = {}
        for operation in operations:
            if isinstance(operation, Linear | ExpertLinear):
                x = operation.inputs[0]
                if x not in by_input:
                    by_input[x] = (
                        create_expert_sum(operation) if isinstance(operation, ExpertLinear) else create_sum(operation)
                    )
                    watched.append(by_input[x])
                self._keep(operation.weight.name, by_input[x], x.columns)
            watched.append(operation)
        return watched

    def _keep(self, name: str, collected: AddSquares | AddExpertSquares, columns: int) -> None:
        self._sums[name] = collected.sums[..., :columns]
        if isinstance(collected, AddExpertSquares):
            self._counts[name] = collected.counts

    def add(self, name: str, x: np.ndarray) -> None:
        """Add the squared input of a matrix, float32 [rows, columns]."""
        self._sums[name] = self._sums.get(name, np.zeros(x.shape[1])) + (x.astype(np.float64) ** 2).sum(axis=0)

    def add_experts(self, name: str, x: np.ndarray, experts: np.ndarray, count: int) -> None:
        """Add the squared input rows of `count` experts, float32 [rows, columns].

        experts: the expert of each row, int [rows].
        """
        sums = self._sums.setdefault(name, np.zeros((count, x.shape[1])))
        counts = self._counts.setdefault(name, np.zeros(count, np.int64))
        np.add.at(sums, experts, x.astype(np.float64) ** 2)
        counts += np.bincount(experts, minlength=count)

    def pop_sums(self) -> dict[str, np.ndarray]:
        """Return the sums and reset them, by the matrix's name: float32 [columns] or [experts, columns]."""
        sums_taken = {name: sums.astype(np.float32) for name, sums in self._sums.items()}
        for sums in self._sums.values():
            sums[:] = 0
        return sums_taken

    def pop_counts(self) -> dict[str, np.ndarray]:
        """Return the number of rows of each expert and reset it, by the stack's name: int64 [experts]."""
        counts_taken = {name: counts.copy() for name, counts in self._counts.items()}
        for counts in self._counts.values():
            counts[:] = 0
        return counts_taken


def pad_count(columns: int) -> int:
    """Round up to the 16 columns that kernels process at once."""
    return -(-columns // 16) * 16


def create_sum(operation: Linear) -> AddSquares:
    """Create the operation that sums the squared input of a matrix product."""
    (x,) = operation.inputs
    return AddSquares((x,), Activation(x.rows, 0), np.zeros(pad_count(x.columns), np.float32))


def create_expert_sum(operation: ExpertLinear) -> AddExpertSquares:
    x, count = operation.inputs[0], operation.choice.routed.routing.matrices
    sums = np.zeros((count, pad_count(x.columns)), np.float32)
    return AddExpertSquares(operation.inputs, Activation(x.rows, 0), sums, np.zeros(count, np.int64))
