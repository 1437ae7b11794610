"""Define the base of all operations: a frozen record of a verb's arguments, and its lowering to steps.

An operation also implements its verb twice: `record` checks shapes and records the operation, `reference` computes it
in NumPy. Each family has a file in this folder; localllm.engine.operations.registry lists all operations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import ClassVar, TypeVar, dataclass_transform

import numpy as np

from localllm.arch.layer_state import State
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.steps import StepBuilder, StepMemory, Target, build_output_arguments, pad_vector
from localllm.frozen import frozen
from localllm.kernels.table import KERNELS, describe_missing

T = TypeVar("T")
HEADER_FIELDS = {
    "ids": "ids",
    "positions": "positions",
    "sequences": "sequences",
    "rows": "wanted",
}  # the header's attribute of each kernel argument
Crossing = Mapping[Activation, np.ndarray]  # activations that cross between targets, float32 [BATCH, row length]
Forms = Mapping[str, bool]  # for each converting verb, whether the form must be exact


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def operation(kind: type[T]) -> type[T]:
    """Make a class frozen, with instances that equal only themselves: a graph may contain an operation twice."""
    kind.__eq__, kind.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]
    return frozen(kind)


@operation
class Operation:
    """A verb with its arguments.

    Attributes:
        inputs: activations that it reads; then converted forms of the first one, which a target's pass has added.
        output: the activation that it computes.
    """

    VERB: ClassVar[str] = ""

    inputs: tuple[Activation, ...]
    output: Activation

    @property
    def verb(self) -> str:
        return self.VERB

    def lower(self, steps: StepBuilder, target: Target) -> None:
        """Append the steps, for targets that do not lower this verb themselves (`Target.verbs`).

        By default this is one step of the kernel that has the verb's name; its arguments are the inputs, attributes of
        this operation and fields of the header. Raises NotImplementedError, which names the file that lacks the verb.
        """
        kernel = KERNELS.get(self.verb)
        if kernel is None or kernel.inputs is None:
            raise NotImplementedError(describe_missing(self.verb))
        inputs = [steps.buffers[x] for x in self.inputs]
        named = dict(zip(kernel.inputs, inputs, strict=True))
        y = steps.allocate_or_reuse(self) if kernel.in_place else steps.allocate(self.output)
        values = (
            named
            | {f"{name}_stride": buffer.stride for name, buffer in named.items()}
            | build_output_arguments(self.output, y)
        )
        values |= {name: getattr(steps.header, place) for name, place in HEADER_FIELDS.items()}
        names = [name for name in kernel.arguments._fields if name != "count"]
        arguments = {name: values[name] if name in values else self.get_argument(name) for name in names}
        steps.append_row_step(self.verb, self.output.rows, arguments, inputs, [y])

    def get_argument(self, name: str) -> object:
        """Return the kernel argument of that name: an attribute, of which arrays are padded as kernels require."""
        value = getattr(self, "vector" if name == "weight" else name)
        return pad_vector(value) if isinstance(value, np.ndarray) else value


@operation
class MatrixOperation(Operation):
    """An operation with a matrix of the file."""

    weight: Weight


@operation
class StateOperation(Operation):
    """An operation that reads or changes a layer's state of a sequence."""

    state: State


@operation
class MatrixProduct(MatrixOperation):
    """A product with a matrix, or with the matrices of experts.

    Attributes:
        bias: float32, added to each row of the product; None: no bias.
        is_stored: keys or values are computed from its output, which needs more precision.
    """

    bias: np.ndarray | None
    is_stored: bool = False


@operation
class ActivationForm(Operation):
    """The conversion of its input to another form for matrix products, such as integers.

    A target's pass inserts it.

    Attributes:
        form: the target's verb that converts.
        exact: a product needs both planes of panels.
    """

    form: str
    exact: bool = False

    @property
    def verb(self) -> str:
        return self.form


def lower_operations(
    operations: Sequence[Operation], target: Target, places: StepMemory, imported: Crossing | None = None,
    exported: Crossing | None = None,
) -> StepBuilder:  # fmt: skip
    """Lower operations in order. Raises UnsupportedError.

    imported: activations that another target computes, and their memory. exported: activations for another target, and
    the memory to write them to; without any, the last operation's output is the logits.
    """
    steps = StepBuilder(target, places, find_last_uses(operations))
    for x, rows in (imported or {}).items():
        steps.import_activation(x, rows)
    for operation in operations:
        lower(steps, operation, target)
    for x, rows in (exported or {}).items():
        steps.export_activation(x, rows)
    if not exported:
        steps.emit_logits(operations[-1].output)
    return steps


def find_last_uses(operations: Iterable[Operation]) -> dict[Activation, Operation]:
    """Return for each activation the last operation that reads it."""
    return {x: operation for operation in operations for x in operation.inputs}


def lower(steps: StepBuilder, operation: Operation, target: Target) -> None:
    """Append the steps of an operation.

    Raises NotImplementedError, which names the file that lacks the verb.
    """
    if lowering := target.verbs.get(operation.verb):
        lowering(steps, operation, target)
    else:
        operation.lower(steps, target)


def insert_activation_forms(operations: Iterable[Operation], forms_of: Callable[[Operation], Forms]) -> list[Operation]:
    """Insert conversions of first inputs, once per activation and form.

    forms_of: returns the forms that an operation needs, which become further inputs of it, in this order.
    """
    done_forms, result = dict[tuple[str, Activation], Activation](), list[Operation]()
    for operation in operations:
        forms = []
        for verb, exact in forms_of(operation).items():
            x = operation.inputs[0]
            if (verb, x) not in done_forms:
                done_forms[verb, x] = Activation(x.rows, x.columns)
                result.append(ActivationForm((x,), done_forms[verb, x], verb, exact))
            forms.append(done_forms[verb, x])
        result.append(replace(operation, inputs=(*operation.inputs, *forms)) if forms else operation)
    return result
