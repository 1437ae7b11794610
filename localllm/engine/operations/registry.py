"""A registry of all operations, by verb: one row for each family of them."""

from types import ModuleType

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
