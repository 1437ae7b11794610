"""The base of all operations: a frozen record of one verb's arguments, with the code that lowers it to steps.

A family of operations has a file here: the records, the verbs that write them down (their shape rules), what they mean
in NumPy, and their lowering. localllm.engine.operations.registry lists them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import ClassVar, TypeVar, dataclass_transform

import numpy as np

from localllm.arch.layer_state import State
from localllm.arch.weights import Weight
from localllm.engine.lower.steps import StepPlaces, Steps, Target
from localllm.engine.operations.activation import Activation, last_uses
from localllm.frozen import frozen
from localllm.kernels.verbs import where

T = TypeVar("T")
Crossing = Mapping[Activation, np.ndarray]  # activations that cross between targets, float32 [BATCH, row length]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def operation(kind: type[T]) -> type[T]:
    """Make a frozen class whose instances are equal only to themselves: a program may do the same twice."""
    kind.__eq__, kind.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]
    return frozen(kind)


@operation
class Operation:
    """One verb, with everything that it was given.

    Attributes:
        inputs: activations that it reads, and forms of the first one that its target has put there.
        output: the activation that it makes.
    """

    VERB: ClassVar[str] = ""

    inputs: tuple[Activation, ...]
    output: Activation

    @property
    def verb(self) -> str:
        return self.VERB

    def lower(self, steps: Steps, target: Target) -> None:
        """Append the steps. Targets do some verbs in their own way instead (`Target.verbs`).

        Raises NotImplementedError, which says what is missing where.
        """
        raise NotImplementedError(where(self.verb))


@operation
class MatrixOperation(Operation):
    """An operation with a matrix of the file."""

    weight: Weight


@operation
class StateOperation(Operation):
    """An operation that reads or changes a layer's state of a sequence."""

    state: State


@operation
class Product(MatrixOperation):
    """A product with a matrix, or with those of experts.

    Attributes:
        bias: float32, of each row that the product makes; None for none.
        is_stored: whether keys or values are computed from its output, which takes more precision.
    """

    bias: np.ndarray | None
    is_stored: bool = False


@operation
class ActivationForm(Operation):
    """Its input in another form for products, as integers say; a target puts it in front of those that need it.

    Attributes:
        form: the verb of the target that makes it.
        exact: whether some product needs both planes of panels.
    """

    form: str
    exact: bool = False

    @property
    def verb(self) -> str:
        return self.form


def lower_operations(
    operations: Sequence[Operation], target: Target, places: StepPlaces, imported: Crossing | None = None,
    exported: Crossing | None = None,
) -> Steps:  # fmt: skip
    """Lower operations in order.

    imported: activations that another target computes, and where they are; exported: activations for another target,
    and the addresses to write them to. Without them the last operation makes the logits, which are returned. Raises
    UnsupportedError.
    """
    steps = Steps(target, places, last_uses(operations))
    for x, rows in (imported or {}).items():
        steps.import_activation(x, rows)
    for operation in operations:
        lower(steps, operation, target)
    for x, rows in (exported or {}).items():
        steps.export_activation(x, rows)
    if not exported:
        steps.emit_logits(operations[-1].output)
    return steps


def lower(steps: Steps, operation: Operation, target: Target) -> None:
    """Append the steps of an operation. Raises NotImplementedError, which says what is missing where."""
    if own := target.verbs.get(operation.verb):
        own(steps, operation, target)
    else:
        operation.lower(steps, target)
