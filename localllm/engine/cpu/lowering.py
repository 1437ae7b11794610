"""The CPU target: its graph pass, and the table of the verbs that it lowers in its own way."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.engine.cpu.attention import attend, select_keys
from localllm.engine.cpu.matmul import (
    expert_linear,
    halves,
    halves_of,
    has_integers,
    linear,
    needs_both_planes,
    pack,
    quantize,
)
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.operations.activation import Activation
from localllm.engine.operations.attention import Attend, WriteKV
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import Operation, Product, insert_activation_forms
from localllm.engine.run import BATCH
from localllm.kernels.cpu import HALVES
from localllm.kernels.machine import has_tiles

VERBS: dict[str, Callable[..., None]] = {
    "linear": linear, "expert_linear": expert_linear, "attend": attend,
    "select_keys": select_keys, "select_key_blocks": select_keys,
    "quantize": quantize, "pack": pack,
    **dict.fromkeys((kind.kernel for kind in HALVES.values()), halves),
}  # fmt: skip


def target_for_this_cpu(threads: int, tokens: int = BATCH, keeps: bool = True) -> CpuTarget:
    """Create the target, with BF16 tiles if the CPU has AMX; tokens: the most of a run; keeps: see CpuTarget."""
    return CpuTarget(threads, has_tiles(), VERBS, tokens=tokens, keeps=keeps)


def optimize_graph(operations: Sequence[Operation], target: CpuTarget) -> list[Operation]:
    """Insert operations that convert activations for matrix products, once per activation and form.

    Forms are integers, halves (16 bits) and panels (BF16 tiles). Also set `is_stored` of the products whose outputs
    become keys and values.
    """
    producers = kv_producers(operations)
    marked = [mark_kv_producers(each, isinstance(each, Linear) and each.output in producers) for each in operations]
    exact = {
        operation.inputs[0]
        for operation in marked
        if isinstance(operation, Product)
        and needs_both_planes(operation.weight.tensor.format.name, operation.is_stored)
    }

    def forms_of(operation: Operation) -> dict[str, bool]:
        if not isinstance(operation, Product):
            return {}
        weight = operation.weight
        verb = "quantize" if has_integers(weight) else None if target.in_tiles else halves_of(weight)
        forms = {verb: False} if verb else {}
        return forms | ({"pack": operation.inputs[0] in exact} if target.in_tiles else {})

    return insert_activation_forms(marked, forms_of)


def kv_producers(operations: Sequence[Operation]) -> set[Activation]:
    """Find the activations that become keys and values, back to the last matrix product before them."""
    stored: set[Activation] = set()
    for operation in reversed(operations):
        if isinstance(operation, Attend | SelectKeys):
            stored |= set(operation.inputs[1:])
        elif isinstance(operation, WriteKV) or (operation.output in stored and not isinstance(operation, Product)):
            stored |= set(operation.inputs)
    return stored


def mark_kv_producers(operation: Operation, is_stored: bool) -> Operation:
    """Return the operation with `is_stored` set if it is a matrix product."""
    if not isinstance(operation, Product):
        return operation
    return replace(operation, is_stored=is_stored)
