"""Fuse low-rank adapters into the CPU's matrix products.

For each matrix an adapter has x A^T, a product with few rows, and adds its product with B to the matrix's product. The
narrow products of an activation run together, before the first matrix that multiplies it. The update runs in the same
step as its matrix (localllm.kernels.cpu.matmul.low_rank).
"""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from localllm.engine.lower.activation import Activation, RoutedRows
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.low_rank import AddLowRank
from localllm.engine.operations.operation import Operation, operation
from localllm.kernels.cpu import FLOAT_FORMATS


@operation
class NarrowLinear(Linear):
    """x A^T for a float matrix with few rows, where threads share the tokens if there are many."""

    VERB: ClassVar[str] = "narrow_linear"


@operation
class AdaptedLinear(Linear):
    """x W^T plus a low-rank update, whose x A^T is the second input."""

    VERB: ClassVar[str] = "adapted_linear"

    update: AddLowRank | None = None


def fuse_updates(operations: Sequence[Operation]) -> list[Operation]:
    """Fuse updates into their products, and move narrow products before these."""
    if not any(isinstance(each, AddLowRank) for each in operations):
        return list(operations)
    producers = {each.output: each for each in operations}
    uses = Counter(x for each in operations for x in each.inputs)
    fused = dict[Operation, Operation]()  # by the product and by the update
    narrow = dict[Activation, list[Operation]]()  # by the activation that is multiplied
    for update in operations:
        if not isinstance(update, AddLowRank):
            continue
        product, projection = (producers.get(x) for x in update.inputs[:2])
        if isinstance(projection, Linear) and not isinstance(projection.output.rows, RoutedRows):
            of_input = narrow.setdefault(projection.inputs[0], [])
            of_input += [projection] if projection not in of_input else []
        if type(product) is Linear and uses[product.output] == 1 and not isinstance(product.output.rows, RoutedRows):
            inputs = product.inputs[0], update.inputs[1]
            joined = AdaptedLinear(inputs, update.output, product.weight, product.bias, product.is_stored, update)
            fused |= {product: joined, update: joined}
    return order_operations(operations, fused, narrow)


def order_operations(
    operations: Sequence[Operation], fused: dict[Operation, Operation], narrow: dict[Activation, list[Operation]]
) -> list[Operation]:
    """Return the operations with fused ones in place of updates, and the narrow ones of an activation together."""
    moved, result = {each for some in narrow.values() for each in some}, list[Operation]()
    for each in operations:
        if each in moved:
            result += [convert_to_narrow(other) for other in narrow.pop(each.inputs[0], [])]
        elif isinstance(each, AddLowRank) or each not in fused:
            result.append(fused.get(each, each))
    return result


def convert_to_narrow(product: Operation) -> Operation:
    """Return a product with a float matrix as a NarrowLinear, any other unchanged."""
    assert isinstance(product, Linear)
    if product.weight.tensor.format.name not in FLOAT_FORMATS:
        return product
    return NarrowLinear(product.inputs, product.output, product.weight, product.bias, product.is_stored)
