"""Operations on activations: what an architecture has said of a model, the same for all targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.arch.routing import Routing

PRODUCTS = ("linear", "expert_linear")
CHOICES = ("choose", "choose_blocks")


@dataclass(frozen=True, eq=False)
class Rows:
    """Which tokens of a run an activation has a row for."""

    name: str


ALL, WANTED = Rows("all"), Rows("wanted")


@dataclass(frozen=True, eq=False)
class Routed(Rows):
    """A row for every expert that a token goes to, in the order of the experts; their number is known in the run."""

    routing: Routing
    of: Rows  # the tokens


@dataclass(frozen=True, eq=False)
class Activation:
    """Float32 [rows, columns], somewhere."""

    rows: Rows
    columns: int


@dataclass(frozen=True, eq=False)
class RoutedActivation(Activation):
    """Which experts tokens go to: a column for each."""

    routed: Routed


@dataclass(frozen=True, eq=False)
class Operation:
    """One verb, with everything that it was given."""

    verb: str
    inputs: tuple[Activation, ...]
    output: Activation
    given: Mapping[str, Any] = field(default_factory=dict)


def stored(operations: Sequence[Operation]) -> set[Activation]:
    """Activations from which a cache is filled: keys, values, and what they are made of between matrix products."""
    found: set[Activation] = set()
    for operation in reversed(operations):
        if operation.verb in ("attend", *CHOICES):
            found |= set(operation.inputs[1:])
        elif operation.verb == "keep" or (operation.output in found and operation.verb not in PRODUCTS):
            found |= set(operation.inputs)
    return found


def last_uses(operations: Sequence[Operation]) -> dict[Activation, Operation]:
    """The operation after which an activation is not needed any more."""
    return {x: operation for operation in operations for x in operation.inputs}
