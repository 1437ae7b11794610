"""Find where scales can be folded into a model without changing its results (AWQ, SmoothQuant).

Folding divides the columns of an activation by scales, and multiplies the columns of all matrices that read it. The
activation comes from a norm, whose weight and bias are divided, or from a matrix, whose rows and bias are divided. It
may reach these matrices only through operations that commute with scaling: a multiplication (the up side of a gated
feed-forward network), max(x, 0), the values of attention (which a group of query heads shares), a selection of rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.operations.attention import Attend, WriteKV
from localllm.engine.operations.elementwise import Norm
from localllm.engine.operations.experts import ExpertLinear
from localllm.engine.operations.operation import MatrixOperation, MatrixProduct, Operation
from localllm.files.gguf.file import Tensor

# By verb, the indices of the inputs that it is linear in: factors, but not a gate with an activation function.
LINEAR_INPUTS = {
    "swiglu": (1,), "geglu": (1,), "reglu": (1,), "multiply": (0, 1), "relu": (0,), "sigmoid_gate": (0,),
    "multiply_heads": (0,), "scale": (0,), "select": (0,), "gather": (0,),
}  # fmt: skip


class ScaleFold(NamedTuple):
    """The tensors that a vector of scales can be folded into.

    Attributes:
        width: number of scales.
        divided: names of tensors that are divided, and the row (or element) of each that the first scale divides.
        multiplied: names of the matrices whose columns are multiplied.
        heads, times: the scales consist of `heads` equal segments, each repeated `times` times in the columns.
    """

    width: int
    divided: tuple[tuple[str, int], ...]
    multiplied: tuple[str, ...]
    heads: int = 1
    times: int = 1

    def expand(self, numbers: np.ndarray) -> np.ndarray:
        """Expand scales, [width], to the columns of the matrices."""
        return np.repeat(numbers.reshape(self.heads, -1), self.times, axis=0).reshape(-1)

    def average(self, columns: np.ndarray) -> np.ndarray:
        """Average a value per column of the matrices over the columns that share a scale: [width]."""
        return columns.reshape(self.heads, self.times, -1).mean(axis=1).reshape(-1)


class ReachedMatrix(NamedTuple):
    """A matrix that an activation reaches.

    heads, times: see ScaleFold.
    """

    weight: Weight
    operation: Operation
    heads: int
    times: int


def find_folds(
    operations: Sequence[Operation], tensors: Mapping[str, Tensor], excluded: Sequence[str] = ()
) -> list[ScaleFold]:
    """Return all folds, in the order of the operations.

    excluded: names of tensors that must not change. At most one fold multiplies a tensor's columns, and at most one
    divides each of its rows.
    """
    finder = FoldFinder(operations, tensors)
    return [
        fold
        for operation in operations
        if (fold := finder.find_fold(operation))
        and not {*fold.multiplied, *(name for name, _ in fold.divided)} & {*excluded}
    ]


class FoldFinder:
    """Finds folds with an index of the operations that read each activation and use each tensor."""

    def __init__(self, operations: Sequence[Operation], tensors: Mapping[str, Tensor]):
        self._tensors, self._readers = tensors, dict[Activation, list[Operation]]()
        self._uses = dict[str, list[Operation]]()
        for operation in operations:
            for x in dict.fromkeys(operation.inputs):
                self._readers.setdefault(x, []).append(operation)
            for weight in list_weights(operation):
                self._uses.setdefault(weight.name, []).append(operation)
        self._states = Counter(operation.state for operation in operations if isinstance(operation, Attend | WriteKV))

    def find_fold(self, operation: Operation) -> ScaleFold | None:
        """Return the fold of an operation's output; None if it cannot be scaled."""
        divided = self._find_divided_tensors(operation)
        reads = self._find_readers(operation.output) if divided else None
        if not divided or not reads:
            return None
        users = [read.operation for read in reads]
        names = tuple(dict.fromkeys(read.weight.name for read in reads))
        shapes = {(read.heads, read.times) for read in reads}
        if len(shapes) > 1 or any(use not in users for name in names for use in self._uses[name]):
            return None
        if not all(self._is_whole(read) for read in reads):
            return None
        return ScaleFold(operation.output.columns, divided, names, *shapes.pop())

    def _find_divided_tensors(self, operation: Operation) -> tuple[tuple[str, int], ...] | None:
        """Return the tensors to divide so that an operation's output is divided; None if that is impossible."""
        if not isinstance(operation, Norm | MatrixProduct) or not list_weights(operation):
            return None
        weight, columns = list_weights(operation)[0], operation.output.columns
        parts = [part for part in (weight, weight.bias) if part]
        is_norm, is_stack = isinstance(operation, Norm), isinstance(operation, ExpertLinear)
        for part in parts:
            tensor = self._tensors.get(part.name)
            has_shape = (columns,) == part.shape if part is not weight or is_norm else part.shape[-2] == columns
            if tensor is None or len(tensor.shape) != len(part.shape) or not has_shape:
                return None
            if any(self._overlaps(part, columns, use) for use in self._uses[part.name] if use is not operation):
                return None
        if weight.scale or (is_stack and weight.bias):
            return None
        return tuple((part.name, part.first_row) for part in parts)

    def _overlaps(self, part: Weight, columns: int, use: Operation) -> bool:
        return any(
            each.name == part.name
            and each.first_row < part.first_row + columns
            and part.first_row < each.first_row + (each.shape[-2] if len(each.shape) > 1 else each.shape[0])
            for each in list_weights(use)
        )

    def _is_whole(self, read: ReachedMatrix) -> bool:
        tensor = self._tensors.get(read.weight.name)
        return tensor is not None and tensor.shape[-1] == read.weight.shape[-1]

    def _find_readers(self, x: Activation, heads: int = 1, times: int = 1) -> list[ReachedMatrix] | None:
        """Return the matrices that an activation reaches; None if it reaches anything else, or no matrix."""
        reached: list[ReachedMatrix] = []
        for operation in self._readers.get(x, []):
            if isinstance(operation, MatrixProduct) and operation.inputs[0] is x:
                reached.append(ReachedMatrix(operation.weight, operation, heads, times))
                continue
            shape = self._propagate(x, operation, heads, times)
            further = self._find_readers(operation.output, *shape) if shape else None
            if not further:
                return None
            reached += further
        return reached or None

    def _propagate(self, x: Activation, operation: Operation, heads: int, times: int) -> tuple[int, int] | None:
        """Return heads and times of an operation's output if it is linear in x, otherwise None."""
        verb, inputs = operation.verb, operation.inputs
        places = [place for place, each in enumerate(inputs) if each is x]
        if isinstance(operation, Attend):
            return self._follow_attention(operation) if places == [2] and times == 1 else None
        return (heads, times) if places in [[place] for place in LINEAR_INPUTS.get(verb, ())] else None

    def _follow_attention(self, operation: Attend) -> tuple[int, int] | None:
        """Return heads and times of attention's output for its values; None if other layers read them, too."""
        state, heads = operation.state, operation.heads
        has_values = len(operation.inputs) - bool(operation.choices) == 3
        if not has_values or self._states[state] > 1 or heads % state.kv_heads:
            return None
        return state.kv_heads, heads // state.kv_heads


def list_weights(operation: Operation) -> list[Weight]:
    weight = operation.weight if isinstance(operation, Norm | MatrixOperation) else None
    return [part for part in (weight, weight.bias) if part] if weight else []
