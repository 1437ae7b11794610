"""Lower operations to steps: each knows its own, unless the target overrides it."""

from collections.abc import Mapping, Sequence

import numpy as np

from localllm.engine.lower.steps import StepPlaces, Steps, Target
from localllm.engine.operations.activation import Activation, last_uses
from localllm.engine.operations.operation import Operation

Crossing = Mapping[Activation, np.ndarray]  # activations that cross between targets, float32 [BATCH, row length]


def lower_operations(
    operations: Sequence[Operation], target: Target, places: StepPlaces, imported: Crossing | None = None,
    exported: Crossing | None = None,
) -> Steps:  # fmt: skip
    """Lower operations in order.

    imported: activations that another target computes, and where they are; exported: activations for another target,
    and where it wants them. Without them the last operation makes the logits, which are returned. Raises
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
