"""The CUDA target: operations become GPU work.

A program is lowered for a maximum number of tokens, a power of two: grids are fixed, so that the whole program can be
recorded as one graph and replayed without Python between its kernels. For up to FEW_TOKENS, kernels multiply packed
weights, because memory bandwidth bounds decode; for more, weights are unpacked to float16 for tensor cores.
"""

from collections.abc import Callable, Sequence
from typing import SupportsInt

import numpy as np

from localllm.engine.cuda import matmul as products
from localllm.engine.cuda.attention import attend, select_keys
from localllm.engine.cuda.card import Launch, LibraryProduct, Work
from localllm.engine.cuda.fusion import fuse, with_integers
from localllm.engine.cuda.matmul import BufferSlice
from localllm.engine.cuda.target import CudaTarget
from localllm.engine.cuda.weights import CardWeights
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.lower.tape import Buffer, Step
from localllm.engine.operations.activation import WANTED
from localllm.engine.operations.operation import Crossing, Operation, Product, insert_activation_forms, lower_operations
from localllm.kernels.cuda import grid, parameters

VERBS: dict[str, Callable[..., None]] = {
    "linear": products.linear, "expert_linear": products.expert_linear, "route": products.route, "attend": attend,
    "select_keys": select_keys,
    "select_key_blocks": select_keys,
    "quantize_planes": products.quantize_planes, "halve": products.halve, "split_bf16": products.split_bf16,
}  # fmt: skip


def card_steps(
    operations: Sequence[Operation], places: StepPlaces, weights: CardWeights, size: tuple[int, int], crossing: Crossing
) -> list[Step]:
    """Lower operations to the steps of a program.

    size: the most tokens and the most requested logits; crossing: see `imported` of `lower_operations`.
    """
    target = CudaTarget(*size, weights, VERBS)

    def forms_of(operation: Operation) -> dict[str, bool]:
        if not isinstance(operation, Product):
            return {}
        form = products.form_of(operation, size[1] if operation.inputs[0].rows is WANTED else size[0])
        return {form: False} if form else {}

    steps = lower_operations(insert_activation_forms(operations, forms_of), target, places, crossing)
    return fuse(with_integers(steps.all))


def kernels_of(steps: Sequence[Step]) -> set[str]:
    """List the names of all kernels."""
    return {step.kernel for step in steps if step.kernel != "product"}


def work_of(step: Step, place: Callable[[np.ndarray], int], memory: int) -> Work:
    """Convert a step to GPU work; place(array): its GPU address; memory: address of the buffers."""
    values = {name: encode_argument(value, place, memory) for name, value in step.arguments.items()}
    if step.kernel == "product":
        del values["kind"], values["adds"]
        return LibraryProduct(kind=str(step.arguments["kind"]), adds=bool(step.arguments["adds"]), **values)
    names = parameters(step.kernel)
    if missing := values.keys() ^ set(names):
        raise TypeError(f"{step.kernel}: {', '.join(sorted(missing))}")
    launch_grid = grid(step.kernel, step.arguments, step.parts)
    return Launch(step.kernel, launch_grid, tuple(values[name] for name in names))


def encode_argument(value: object, place: Callable[[np.ndarray], int], memory: int) -> int:
    """Encode an argument as an int64: a number, the bits of a float32, or an address."""
    if isinstance(value, BufferSlice):
        return encode_argument(value.buffer, place, memory) + value.offset
    if isinstance(value, Buffer):
        return memory + value.address if value.rows else 0
    if isinstance(value, np.ndarray):
        return place(value)
    if isinstance(value, str):
        return 0
    assert isinstance(value, SupportsInt)
    return int(np.float32(value).view(np.int32)) if isinstance(value, float) else int(value)
