"""Define activations, the inputs and outputs of operations, and the tokens of a run that they have rows for."""

from dataclasses import dataclass
from typing import Protocol

from localllm.arch.verbs import Routing


@dataclass(frozen=True, eq=False)
class RowSet:
    """The tokens of a run for which an activation has rows: all, or those with requested logits."""

    name: str


ALL, WANTED = RowSet("all"), RowSet("wanted")


@dataclass(frozen=True, eq=False)
class RoutedRows(RowSet):
    """A row for each pair of token and expert, sorted by expert; their count is known only during a run."""

    routing: Routing
    of: RowSet  # the tokens


@dataclass(frozen=True, eq=False)
class Activation:
    """A value of the graph, float32 [rows, columns], whose memory lowering allocates."""

    rows: RowSet
    columns: int


@dataclass(frozen=True, eq=False)
class RoutedActivation(Activation):
    """The experts that tokens are routed to: a column for each of a token's experts."""

    routed: RoutedRows


class GraphNode(Protocol):
    """An operation as a node of the graph."""

    @property
    def inputs(self) -> tuple[Activation, ...]: ...

    @property
    def output(self) -> Activation: ...
