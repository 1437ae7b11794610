"""Compute row by row, with as many columns as before.

Most of these operations are a formula in localllm.arch.rowwise_verbs, and one in localllm.kernels.formulas for their
kernels; they need no class. The classes below are for operations with tensors of the file or with sizes to check.
"""

from collections.abc import Callable, Mapping

import numpy as np

from localllm.arch.rowwise_verbs import RowwiseVerbs, propagate_nan
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import StepBuilder, Target, build_output_arguments, pad_vector
from localllm.engine.operations.builders import (
    MISFIT,
    Array,
    RecorderBase,
    ReferenceBase,
    require_same_columns,
    softmax,
)
from localllm.engine.operations.operation import Operation, operation
from localllm.errors import ModelError


@operation
class Elementwise(Operation):
    """An element-wise verb that a formula defines.

    numbers: its scalar arguments by name.
    """

    function: str
    numbers: Mapping[str, float]

    @property
    def verb(self) -> str:
        return self.function

    def get_argument(self, name: str) -> float:
        return self.numbers[name]


@operation
class Norm(Operation):
    """A norm over each group of `group` columns.

    Attributes:
        vector: float32 [columns], multiplies the result.  weight: its tensor; None if it is all ones.
    """

    vector: np.ndarray
    group: int
    epsilon: float
    weight: Weight | None


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + epsilon) * vector."""

    VERB = "rms_norm"

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Activation:
        factors = load_norm_weights(recorder, weight, x.columns, group)
        return recorder._add(RMSNorm((x,), create_like(x), factors, group or x.columns, epsilon, weight))

    @staticmethod
    def reference(
        run: ReferenceBase, x: Array, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Array:
        groups = split_groups(x, group)
        y = multiply_by_weights(divide_by_rms(groups, (groups**2).mean(axis=2, keepdims=True) + epsilon), weight)
        return y.astype(np.float32).reshape(x.shape)


@operation
class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * vector + bias."""

    VERB = "layer_norm"

    bias: np.ndarray

    @staticmethod
    def record(
        recorder: RecorderBase, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Activation:
        factors = load_norm_weights(recorder, weight, x.columns, group)
        bias = (
            recorder._load_vector(weight.bias, x.columns) if weight and weight.bias else np.zeros(x.columns, np.float32)
        )
        return recorder._add(LayerNorm((x,), create_like(x), factors, group or x.columns, epsilon, weight, bias))

    @staticmethod
    def reference(
        run: ReferenceBase, x: Array, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Array:
        groups = split_groups(x, group)
        groups = groups - groups.mean(axis=2, keepdims=True)
        y = multiply_by_weights(divide_by_rms(groups, (groups**2).mean(axis=2, keepdims=True) + epsilon), weight)
        y = y.reshape(x.shape) + (weight.bias.read_vector() if weight and weight.bias else 0)
        return y.astype(np.float32)


class SigmoidGate(Operation):
    """x * sigmoid(gate), with one gate per row."""

    VERB = "sigmoid_gate"

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, gate: Activation) -> Activation:
        if gate.columns != 1:
            raise ModelError(f"{MISFIT}: a gate of {gate.columns} columns")
        return recorder._add(SigmoidGate((x, gate), create_like(x)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, gate: Array) -> Array:
        return x * run.sigmoid(gate)


@operation
class Scale(Operation):
    """x * factor."""

    VERB = "scale"

    factor: float

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, factor: float | Weight) -> Activation:
        if isinstance(factor, Weight):
            recorder._used.add(factor.name)
            factor = factor.read_number()
        return recorder._add(Scale((x,), create_like(x), float(factor)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, factor: float | Weight) -> Array:
        return x * np.float32(factor if isinstance(factor, float | int) else factor.read_number())


@operation
class ScaleColumns(Operation):
    """x * vector, float32 [columns]."""

    VERB = "scale_columns"

    vector: np.ndarray

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, weight: Weight) -> Activation:
        return recorder._add(ScaleColumns((x,), create_like(x), recorder._load_vector(weight.flatten(), x.columns)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, weight: Weight) -> Array:
        return x * weight.flatten().read_vector()


@operation
class Lerp(Operation):
    """x + (z - x) * vector, float32 [columns]."""

    VERB = "lerp"

    vector: np.ndarray

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, z: Activation, weight: Weight) -> Activation:
        return recorder._add(
            Lerp((x, z), create_like(x), recorder._load_vector(weight.flatten(), require_same_columns(x, z)))
        )

    @staticmethod
    def reference(run: ReferenceBase, x: Array, z: Array, weight: Weight) -> Array:
        return x + (z - x) * weight.flatten().read_vector()


@operation
class MultiplyHeads(Operation):
    """x multiplied by one gate per head."""

    VERB = "multiply_heads"

    heads: int

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, gates: Activation) -> Activation:
        if x.columns % gates.columns:
            raise ModelError(f"{MISFIT}: {gates.columns} gates of {x.columns} columns")
        return recorder._add(MultiplyHeads((x, gates), create_like(x), gates.columns))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, gates: Array) -> Array:
        return (x.reshape(*gates.shape, x.shape[1] // gates.shape[1]) * gates[:, :, None]).reshape(x.shape)


class Softmax(Operation):
    """The softmax of each row."""

    VERB = "softmax"

    @staticmethod
    def record(recorder: RecorderBase, x: Activation) -> Activation:
        return recorder._add(Softmax((x,), create_like(x)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return softmax(x + (x - x)).astype(np.float32)


@operation
class Sinkhorn(Operation):
    """A matrix of `size` rows, normalized so that its rows and columns add up to about 1."""

    VERB = "sinkhorn"

    size: int
    iterations: int
    epsilon: float

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, size: int, iterations: int, epsilon: float) -> Activation:
        if x.columns != size * size:
            raise ModelError(f"{MISFIT}: {x.columns} columns, {size} streams")
        return recorder._add(Sinkhorn((x,), create_like(x), size, iterations, epsilon))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, size: int, iterations: int, epsilon: float) -> Array:
        with np.errstate(invalid="ignore"):
            y = softmax((x + (x - x).sum(axis=1, keepdims=True)).reshape(len(x) * size, size)) + epsilon
        y = y.reshape(len(x), size, size)
        y = y / (y.sum(axis=1, keepdims=True) + epsilon)
        for _ in range(iterations - 1):
            y = y / (y.sum(axis=2, keepdims=True) + epsilon)
            y = y / (y.sum(axis=1, keepdims=True) + epsilon)
        return y.swapaxes(1, 2).reshape(x.shape).astype(np.float32)


@operation
class Softplus(Operation):
    """log(1 + e^(x + bias)), bias float32 [columns]."""

    VERB = "softplus"

    bias: np.ndarray

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, bias: Weight | None = None) -> Activation:
        numbers = recorder._load_vector(bias, x.columns) if bias else np.zeros(x.columns, np.float32)
        return recorder._add(Softplus((x,), create_like(x), numbers))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, bias: Weight | None = None) -> Array:
        x = x + (bias.read_vector() if bias else 0)
        with np.errstate(invalid="ignore"):
            return propagate_nan(np.logaddexp(0, x).astype(np.float32), x)


@operation
class AddVector(Operation):
    """x + vector, float32 [columns]. Its kernel is the one that adds activations, with row stride 0."""

    VERB = "add_vector"

    vector: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (x,) = self.inputs
        source, y = steps.buffers[x], steps.allocate_or_reuse(self)
        arguments = {"x": source, "z": pad_vector(self.vector), "z_stride": 0} | build_output_arguments(x, y)
        steps.append_row_step("add", x.rows, arguments, [source], [y])

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, vector: Weight | np.ndarray) -> Activation:
        numbers = recorder._load_vector(vector, x.columns) if isinstance(vector, Weight) else vector.astype(np.float32)
        if numbers.shape != (x.columns,):
            raise ModelError(f"{MISFIT}: the vector must have {x.columns} numbers (found {numbers.size})")
        return recorder._add(AddVector((x,), create_like(x), numbers))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, vector: Weight | np.ndarray) -> Array:
        return x + (vector if isinstance(vector, np.ndarray) else vector.read_vector())


class ElementwiseVerbs(RecorderBase, RowwiseVerbs):
    """The recorder's element-wise verbs."""

    def rowwise(self, verb: str, formula: Callable[..., Array], *inputs: Activation, **numbers: float) -> Activation:
        for x in inputs[1:]:
            require_same_columns(inputs[0], x)
        rounded = {name: float(number) for name, number in numbers.items()}  # kernels get the bits of a float
        return self._add(Elementwise(inputs, Activation(inputs[-1].rows, inputs[0].columns), verb, rounded))


def create_like(x: Activation) -> Activation:
    """Create an activation of the same shape."""
    return Activation(x.rows, x.columns)


class ElementwiseReference(ReferenceBase, RowwiseVerbs):
    """The element-wise verbs in NumPy."""

    def rowwise(self, verb: str, formula: Callable[..., Array], *inputs: Array, **numbers: float) -> Array:
        return formula(*inputs, **numbers)


def split_groups(x: np.ndarray, group: int | None) -> np.ndarray:
    """Split rows into groups, float64 [tokens, groups, columns of a group].

    group: columns of a group; None for one group.
    """
    columns = group or x.shape[1]
    return x.reshape(len(x), x.shape[1] // columns, columns).astype(np.float64)


def divide_by_rms(groups: np.ndarray, squares: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return groups / np.sqrt(squares)


def multiply_by_weights(groups: np.ndarray, weight: Weight | None) -> np.ndarray:
    """Multiply groups [tokens, groups, columns] by weights of a row or of a group, if there are any."""
    if weight is None:
        return groups
    vector = weight.read_vector()
    return groups * vector.reshape(-1 if len(vector) > groups.shape[2] else 1, groups.shape[2])


def load_norm_weights(recorder: RecorderBase, weight: Weight | None, columns: int, group: int | None) -> np.ndarray:
    """Return a norm's weights for a whole row, float32 [columns], also if the tensor has those of one group."""
    if columns % (group or columns):
        raise ModelError(f"{columns} columns cannot be divided into groups of {group}")
    if weight is None:
        return np.ones(columns, np.float32)
    width = columns if group is None or weight.shape == (columns,) else group
    return np.tile(recorder._load_vector(weight, width), columns // width)
