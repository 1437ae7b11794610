"""Split a model's operations in two, so that the first layers can run on another device than the rest."""

import re
from typing import NamedTuple

from localllm.engine.operations.activation import ALL, Activation, RoutedActivation
from localllm.engine.operations.operation import MatrixOperation, Operation, StateOperation
from localllm.errors import UnsupportedError

LAYER = re.compile(r"blk\.(\d+)\.")


class Halves(NamedTuple):
    """Operations before the cut and after it, and the activations that cross it."""

    before: list[Operation]
    behind: list[Operation]
    crossing: list[Activation]


def split_at_layer(operations: list[Operation], layer: int) -> Halves:
    """Cut before a layer, where the fewest columns cross. Raises UnsupportedError if the layers cannot be separated."""
    layers = [layer_of(operation) for operation in operations]
    first = next((i for i, number in enumerate(layers) if number is not None and number >= layer), len(operations))
    last = max((i for i, number in enumerate(layers) if number is not None and number < layer), default=-1)
    cuts = [(crossing, at) for at in range(last + 1, first + 1) if can_cross(crossing := live(operations, at))]
    if not cuts:
        raise UnsupportedError(f"the model cannot be split before layer {layer}")
    crossing, at = min(cuts, key=lambda candidate: (sum(x.columns for x in candidate[0]), candidate[1]))
    return Halves(operations[:at], operations[at:], crossing)


def layer_of(operation: Operation) -> int | None:
    """Return the layer of an operation's weight or state; None if it has neither."""
    if isinstance(operation, StateOperation):
        return operation.state.layer
    match = LAYER.match(operation.weight.name) if isinstance(operation, MatrixOperation) else None
    return int(match[1]) if match else None


def live(operations: list[Operation], at: int) -> list[Activation]:
    """List the activations that operations before number `at` make and later ones read."""
    outputs = dict.fromkeys(operation.output for operation in operations[:at])
    inputs = {x for operation in operations[at:] for x in operation.inputs}
    return [x for x in outputs if x in inputs]


def can_cross(activations: list[Activation]) -> bool:
    return all(x.rows is ALL and not isinstance(x, RoutedActivation) for x in activations)
