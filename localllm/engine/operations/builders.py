"""Share code among builders: the bases of the recorder, which checks tensors, and of the NumPy reference."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.operation import Operation
from localllm.errors import ModelError
from localllm.kernels.reference import dequantize

NON_MATRIX_FORMATS = ("I8", "I16", "I32", "I64", "F64")
MISFIT = "the model's tensors do not fit together"


class RecorderBase:
    """The base of the recording builder, whose verbs are the operations' `record` methods.

    Attributes:
        operations: in the order in which they were recorded.
    """

    ids = positions = kinds = ALL
    wanted = WANTED

    def __init__(self, vocab_size: int, width: int, context: int):
        """Start recording.

        width: of the model's embeddings. context: maximum number of tokens in a sequence.
        """
        self.operations = list[Operation]()
        self._vocab_size, self._width, self._context = vocab_size, width, context
        self._used: set[str] = set()

    if TYPE_CHECKING:

        def __getattr__(self, verb: str) -> Any: ...  # the verbs, see localllm.engine.operations.registry

    @property
    def _words(self) -> int:
        """The number of 32-bit words that have a bit for each position of the context."""
        return -(-self._context // 32)

    def _add(self, operation: Operation) -> Activation:
        self.operations.append(operation)
        return operation.output

    def ignore(self, *weights: Weight | None) -> None:
        self._used |= {weight.name for weight in weights if weight}

    def _matrix(self, weight: Weight) -> tuple[int, int]:
        """Return rows and columns of a matrix, and mark it as used. Raises ModelError for another shape."""
        self._used.add(weight.name)
        if len(weight.shape) != 2:
            raise ModelError(f"tensor {weight.name} must be a matrix (found the shape {list(weight.shape)})")
        require_format(weight)
        return weight.shape[0], weight.shape[1]

    def _load_vector(self, weight: Weight, columns: int) -> np.ndarray:
        """Return the values of a norm or bias, float32 [columns], and mark it as used. Raises ModelError."""
        self._used.add(weight.name)
        vector = weight.read_vector()
        if len(vector) != columns:
            raise ModelError(f"tensor {weight.name} must have {columns} weights (found {len(vector)})")
        return vector

    def _use_vectors(self, weight: Weight, experts: int, columns: int) -> np.ndarray:
        """Return a bias for each expert, float32 [experts, columns], and mark it as used. Raises ModelError."""
        if weight.shape != (experts, columns):
            raise ModelError(f"tensor {weight.name} must have the shape {[experts, columns]}")
        return self._load_vector(weight.flatten(), experts * columns).reshape(experts, columns)

    def _load_array(self, weight: Weight, shape: tuple[int, ...]) -> np.ndarray:
        """Return a small tensor as float32 of a shape, and mark it as used; dimensions of 1 are ignored.

        Raises ModelError for another shape.
        """
        self._used.add(weight.name)
        if prod(weight.shape) != prod(shape) or [n for n in weight.shape if n > 1] != [n for n in shape if n > 1]:
            raise ModelError(f"tensor {weight.name} must have the shape {list(shape)} (found {list(weight.shape)})")
        return weight.flatten().read_vector().reshape(shape)

    def _dequantize(self, weight: Weight, shape: tuple[int, ...]) -> np.ndarray:
        """Return a matrix of any format as float32, and mark it as used. Raises ModelError."""
        if weight.tensor.format.block == 1:
            return self._load_array(weight, shape)
        from localllm.kernels.reference import dequantize  # seldom needed

        self._used.add(weight.name)
        numbers = dequantize(weight.tensor)
        if weight.shape != shape or not np.isfinite(numbers).all():
            raise ModelError(f"tensor {weight.name} must have values of the shape {list(shape)}")
        return numbers


def require_format(weight: Weight) -> None:
    """Raise ModelError for a matrix in a format that only vectors may have."""
    if weight.tensor.format.name in NON_MATRIX_FORMATS:
        raise ModelError(f"tensor {weight.name}: format {weight.tensor.format.name} is not supported for matrices")


def require_columns(name: str, x: Activation, columns: int) -> None:
    """Raise ModelError for an input of another width."""
    if x.columns != columns:
        raise ModelError(f"{MISFIT}: {name} must have {columns} columns (found {x.columns})")


def require_same_columns(x: Activation, y: Activation) -> int:
    """Return the width of both activations. Raises ModelError if they differ."""
    if x.columns != y.columns:
        raise ModelError(f"{MISFIT}: two inputs must have the same columns (found {x.columns} and {y.columns})")
    return x.columns


Array = np.ndarray


class Observer(Protocol):
    """Receives the inputs of matrices."""

    def add(self, name: str, x: np.ndarray) -> None: ...

    def add_experts(self, name: str, x: np.ndarray, experts: np.ndarray, count: int) -> None: ...


class ReferenceBase:
    """The base of the NumPy builder, one for each run; its verbs are the operations' `reference` methods.

    Activations are float32 [tokens, columns].

    Attributes:
        windows: the index of each row's attention window, in a run over an image.
        adapter_scales: float32 [tokens, MAX_ADAPTERS].
    """

    windows: np.ndarray | None = None

    def __init__(
        self, spans: Sequence[SequenceSpan], matrices: dict[tuple[str, int], np.ndarray], context: int,
        observer: Observer | None = None,
    ):  # fmt: skip
        """Prepare a run of spans (see Backend.run), each with a ReferenceCache as its store.

        matrices: a cache of dequantized ones, by name and first row. context: maximum number of tokens in a sequence.
        observer: receives the inputs of each matrix.
        """
        self.ids = np.concatenate([span.ids for span in spans])
        self.positions = np.concatenate([span.position + np.arange(len(span.ids)) for span in spans])
        self.kinds = np.concatenate([np.resize(span.kinds, len(span.ids)) for span in spans])
        self._ends = np.cumsum([len(span.ids) for span in spans])
        places = [np.arange(end - span.wanted, end) for span, end in zip(spans, self._ends, strict=True)]
        self.wanted = np.concatenate(places)
        self.adapter_scales = np.concatenate([span.expand_scales() for span in spans])
        self._spans, self._matrices, self._context, self._observer = spans, matrices, context, observer

    if TYPE_CHECKING:

        def __getattr__(self, verb: str) -> Any: ...  # the verbs, see localllm.engine.operations.registry

    def matrix(self, weight: Weight) -> np.ndarray:
        """Return a weight of any format in float32, dequantized once."""
        key = weight.name, weight.first_row
        if key not in self._matrices:
            self._matrices[key] = dequantize(weight.tensor)
        return self._matrices[key]

    def ignore(self, *weights: Weight | None) -> None:
        """Do nothing, because only the recorder checks which tensors are used."""

    def _iterate_rows(self) -> Iterator[tuple[SequenceSpan, slice]]:
        for span, end in zip(self._spans, self._ends, strict=True):
            yield span, slice(end - len(span.ids), end)

    def _scan_sequences(
        self, state: RecurrentLayerState, number: int, run_sequence: Callable[..., tuple[Array, Array]], *inputs: Array
    ) -> Array:
        """Call run_sequence(state, *inputs) -> (new state, outputs) for each sequence, and return all outputs."""
        results = []
        for span, rows in self._iterate_rows():
            old = span.store.get_state(state.layer, number, state.shapes[number])
            new, outputs = run_sequence(old, *(x[rows] for x in inputs))
            span.store.put_state(state.layer, number, new.astype(np.float32))
            results.append(outputs)
        return np.concatenate(results).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of each row, float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def find_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest values of each row, int64 [rows, count]; the first of equals wins."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]
