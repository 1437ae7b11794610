"""Activations: what operations read and make, and which tokens of a run they have a row for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from localllm.arch.routing import Routing


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens of a run that an activation has a row for."""

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
    """The experts that tokens go to: a column for each."""

    routed: Routed


class Node(Protocol):
    """An operation as a node of the graph: its inputs and outputs."""

    @property
    def inputs(self) -> tuple[Activation, ...]: ...

    @property
    def output(self) -> Activation: ...


AnyNode = TypeVar("AnyNode", bound=Node)


def last_uses(operations: Iterable[AnyNode]) -> dict[Activation, AnyNode]:
    """Find the operation after which each activation is not needed any more."""
    return {x: operation for operation in operations for x in operation.inputs}
