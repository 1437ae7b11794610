"""Activations: the inputs and outputs of operations, and the tokens of a run that they have rows for."""

from dataclasses import dataclass
from typing import Protocol

from localllm.arch.verbs import Routing


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens of a run that an activation has a row for."""

    name: str


ALL, WANTED = Rows("all"), Rows("wanted")


@dataclass(frozen=True, eq=False)
class RoutedRows(Rows):
    """A row for each pair of token and expert, sorted by expert; their count is known only during a run."""

    routing: Routing
    of: Rows  # the tokens


@dataclass(frozen=True, eq=False)
class Activation:
    """A value of the graph, float32 [rows, columns]. Lowering allocates its memory."""

    rows: Rows
    columns: int


@dataclass(frozen=True, eq=False)
class RoutedActivation(Activation):
    """The experts that tokens are routed to: a column for each of a token's experts."""

    routed: RoutedRows


class Node(Protocol):
    """An operation as a node of the graph."""

    @property
    def inputs(self) -> tuple[Activation, ...]: ...

    @property
    def output(self) -> Activation: ...
