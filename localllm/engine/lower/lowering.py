"""Operations become steps: each knows its own, but for those that a target does in its own way."""

from collections.abc import Mapping, Sequence

import numpy as np

from localllm.engine.lower.steps import StepPlaces, Steps, Target
from localllm.engine.operations.activation import Activation, last_uses
from localllm.engine.operations.operation import Operation

Crossing = Mapping[Activation, np.ndarray]  # what goes from one target to another, float32 [BATCH, numbers of a row]


def lower_operations(
    operations: Sequence[Operation], target: Target, places: StepPlaces, imported: Crossing | None = None,
    exported: Crossing | None = None,
) -> Steps:  # fmt: skip
    """Make the steps of some operations, one after the other.

    imported: activations that another target has made, and where they lie; exported: those that another one goes on
    with, and where it wants them; without, the last operation makes the logits, which are handed out.
    Raises UnsupportedError.
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
