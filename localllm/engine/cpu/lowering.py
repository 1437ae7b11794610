"""The target CPU: the pass that its operations go through, and the table of the verbs that it does in its own way."""

from collections.abc import Sequence
from typing import Any

from localllm.engine.cpu.attention import attend, choose
from localllm.engine.cpu.matmul import expert_linear, halves, halves_of, has_integers, linear, quantize
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.cpu.tiles import needs_both_planes, pack
from localllm.engine.run import BATCH
from localllm.engine.trace.activation_forms import with_forms
from localllm.engine.trace.operations import PRODUCTS, Operation, stored
from localllm.kernels.cpu import HALVES
from localllm.kernels.machine import has_tiles

VERBS = {
    "linear": linear, "expert_linear": expert_linear, "attend": attend, "choose": choose, "choose_blocks": choose,
    "quantize": quantize, "pack": pack,
    **dict.fromkeys((kind.kernel for kind in HALVES.values()), halves),
}  # fmt: skip


def target_for_this_cpu(threads: int, tokens: int = BATCH, keeps: bool = True) -> CpuTarget:
    """With tiles, where there are any; tokens: the most of a run; keeps: as of CpuTarget."""
    return CpuTarget(threads, has_tiles(), VERBS, tokens=tokens, keeps=keeps)


def prepared(operations: Sequence[Operation], target: CpuTarget) -> list[Operation]:
    """The operations with what makes integers, halves and panels of what matrices meet, once for all that meet it.

    Products know then whether keys and values are made of what they make (`is_stored`).
    """
    kept = stored(operations)
    marked = [with_storage(one, one.verb == "linear" and one.output in kept) for one in operations]
    exact = {
        operation.inputs[0]
        for operation in marked
        if operation.verb in PRODUCTS
        and needs_both_planes(operation.given["weight"].tensor.format.name, operation.given["is_stored"])
    }

    def forms_of(operation: Operation) -> dict[str, dict[str, Any]]:
        if operation.verb not in PRODUCTS:
            return {}
        weight = operation.given["weight"]
        verb = "quantize" if has_integers(weight) else None if target.in_tiles else halves_of(weight)
        forms: dict[str, dict[str, Any]] = {verb: {}} if verb else {}
        return forms | ({"pack": {"exact": operation.inputs[0] in exact}} if target.in_tiles else {})

    return with_forms(marked, forms_of)


def with_storage(operation: Operation, is_stored: bool) -> Operation:
    """A product that knows it; others as they are."""
    if operation.verb not in PRODUCTS:
        return operation
    given = {**operation.given, "is_stored": is_stored}
    return Operation(operation.verb, operation.inputs, operation.output, given)
