"""List all operations by verb, and define the builder whose verbs compute in NumPy."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

import numpy as np

from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations import (
    attention,
    columns,
    elementwise,
    experts,
    key_selection,
    linear,
    low_rank,
    positions,
    recurrent,
    tokens,
)
from localllm.engine.operations.builders import Observer
from localllm.engine.operations.elementwise import ElementwiseReference
from localllm.engine.operations.experts import ExpertReference
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.positions import PositionReference
from localllm.engine.operations.recurrent import ConvolutionReference
from localllm.engine.operations.tokens import HiddenStateReference

T = TypeVar("T")
FAMILIES: tuple[ModuleType, ...] = (
    elementwise, linear, low_rank, attention, key_selection, experts, recurrent, tokens, positions, columns,
)  # fmt: skip
OPERATIONS: dict[str, type[Operation]] = {
    kind.VERB: kind
    for family in FAMILIES
    for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Operation) and kind.VERB
}


def add_verbs(method: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the verbs of all operations to a builder.

    method: the operations' function, "record" or "reference".
    """

    def decorate(builder: type[T]) -> type[T]:
        for verb, kind in OPERATIONS.items():
            if method in vars(kind):
                setattr(builder, verb, getattr(kind, method))
        return builder

    return decorate


@add_verbs("reference")
class ReferenceBuilder(
    ElementwiseReference, ExpertReference, ConvolutionReference, PositionReference, HiddenStateReference
):
    """A builder (localllm.arch.verbs) whose verbs compute in plain NumPy, one for each run.

    It is the oracle that the fast kernels are tested against. Activations are float32 [tokens, columns].
    """

    def __init__(
        self, spans: Sequence[SequenceSpan], matrices: dict[tuple[str, int], np.ndarray], context: int,
        observer: Observer | None = None,
    ):  # fmt: skip
        super().__init__(spans, matrices, context, observer)
        self.layer_inputs = {}
