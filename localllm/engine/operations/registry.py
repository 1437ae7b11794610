"""A registry of all operations, by verb: one row for each family of them."""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from localllm.engine.operations import (
    attention,
    columns,
    convolution,
    elementwise,
    experts,
    hidden_states,
    key_selection,
    linear,
    positions,
    recurrent,
    tokens,
)
from localllm.engine.operations.operation import Operation

T = TypeVar("T")
FAMILIES: tuple[ModuleType, ...] = (
    elementwise, linear, attention, key_selection, experts, convolution, recurrent, tokens, positions, columns,
    hidden_states,
)  # fmt: skip
OPERATIONS: dict[str, type[Operation]] = {
    kind.VERB: kind
    for family in FAMILIES
    for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Operation) and kind.VERB
}


def with_verbs(method: str) -> Callable[[type[T]], type[T]]:
    """Give a builder the verbs of all operations; method: the operations' function, "record" or "reference"."""

    def decorate(builder: type[T]) -> type[T]:
        for verb, kind in OPERATIONS.items():
            if method in vars(kind):
                setattr(builder, verb, getattr(kind, method))
        return builder

    return decorate
