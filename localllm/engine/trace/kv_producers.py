"""Find the activations that keys and values are computed from."""

from collections.abc import Sequence

from localllm.engine.operations.activation import Activation
from localllm.engine.operations.attention import Attend, WriteKV
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.operation import Operation, Product


def kv_producers(operations: Sequence[Operation]) -> set[Activation]:
    """Find activations from which a cache is filled: keys, values, and what they are made of between products."""
    stored: set[Activation] = set()
    for operation in reversed(operations):
        if isinstance(operation, Attend | SelectKeys):
            stored |= set(operation.inputs[1:])
        elif isinstance(operation, WriteKV) or (operation.output in stored and not isinstance(operation, Product)):
            stored |= set(operation.inputs)
    return stored
