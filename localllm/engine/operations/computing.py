"""Shared helpers of the NumPy reference: the spans of a run, and matrices in float32."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from localllm.arch.layer_state import Recurrent
from localllm.arch.weights import Weight
from localllm.engine.lower.header import Span
from localllm.kernels.reference import dequantize

Array = np.ndarray


class Observer(Protocol):
    """Receives the inputs of matrices."""

    def add(self, name: str, x: np.ndarray) -> None: ...

    def add_experts(self, name: str, x: np.ndarray, experts: np.ndarray, count: int) -> None: ...


class Computing:
    """The base of the NumPy builder, one for each run; operations have its verbs, as `reference`.

    Activations are float32 [tokens, columns].

    Attributes:
        windows: the number of each row's attention window, in a run that is an image.
    """

    windows: np.ndarray | None = None

    def __init__(
        self, spans: Sequence[Span], matrices: dict[tuple[str, int], np.ndarray], context: int,
        observer: Observer | None = None,
    ):  # fmt: skip
        """Prepare a run of spans, see Program.run; their stores are ReferenceCaches.

        context: the most tokens of a sequence.  matrices: a cache of dequantized ones, by name and first row.
        observer: receives the inputs of each matrix.
        """
        self.ids = np.concatenate([span.ids for span in spans])
        self.positions = np.concatenate([span.position + np.arange(len(span.ids)) for span in spans])
        self.kinds = np.concatenate([np.resize(span.kinds, len(span.ids)) for span in spans])
        self._ends = np.cumsum([len(span.ids) for span in spans])
        places = [np.arange(end - span.wanted, end) for span, end in zip(spans, self._ends, strict=True)]
        self.wanted = np.concatenate(places)
        self._spans, self._matrices, self._context, self._observer = spans, matrices, context, observer

    if TYPE_CHECKING:

        def __getattr__(self, verb: str) -> Any: ...  # the verbs, see localllm.engine.operations.registry

    def matrix(self, weight: Weight) -> np.ndarray:
        """Return a weight in float32, whatever its format."""
        key = weight.name, weight.first_row
        if key not in self._matrices:
            self._matrices[key] = dequantize(weight.tensor)
        return self._matrices[key]

    def ignore(self, *weights: Weight | None) -> None:
        """Do nothing: only the recorder checks which tensors are used."""

    def _rows(self) -> Iterator[tuple[Span, slice]]:
        for span, end in zip(self._spans, self._ends, strict=True):
            yield span, slice(end - len(span.ids), end)

    def _by_sequence(
        self, state: Recurrent, number: int, run_sequence: Callable[..., tuple[Array, Array]], *inputs: Array
    ) -> Array:
        """Call run_sequence(state, *inputs) -> (new state, outputs) for each sequence's rows; return all outputs."""
        results = []
        for span, rows in self._rows():
            old = span.store.state(state.layer, number, state.shapes[number])
            new, outputs = run_sequence(old, *(x[rows] for x in inputs))
            span.store.put_state(state.layer, number, new.astype(np.float32))
            results.append(outputs)
        return np.concatenate(results).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax of each row, float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Find the indices of the largest values of each row, int64 [rows, count]; ties go to the first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]
