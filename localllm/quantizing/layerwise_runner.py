"""Run documents through a model layer by layer, exposing the inputs of each matrix before it is applied.

The runner is a builder of verbs (localllm.arch.verbs) that runs each verb for all documents before the next one, in
NumPy (localllm.kernels.reference). A matrix can be replaced after its inputs are known and before its outputs are
computed, and memory holds the activations of one layer only. It works for every architecture.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.linear import add_scale_and_bias
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.kernels.reference import ReferenceCache

KV_TYPE = KVType.parse("f16")  # storage type of keys and values
RANGE_WEIGHTS = 3 << 17  # weights that are dequantized and multiplied together: 1.5 MB
MATRIX_RANGES = 4  # row ranges into which a small matrix is divided
MAX_CONCATENATED_TOKENS = 512  # texts of fewer tokens are concatenated for a product
# Verbs that return no new activation.
VERBS_WITHOUT_RESULT = ("embed_inputs", "add_deepstack", "tap_layer_input", "ignore", "select_by_context")
PRODUCTS = ("linear", "head_linear", "expert_linear")


class BatchedActivations(list[Any]):
    """An activation, or another value, of each document; None once it has been read for the last time."""


SKIPPED = BatchedActivations([None])  # a result that is never read


class StopCalibrationError(Exception):
    """The inputs of the last matrix are known and the logits are not needed, so the run ends."""


class MatrixReader(Protocol):
    """Gives the runner the matrices that it applies, and learns their inputs."""

    def read_rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        """Return rows of an embedding matrix, float32 [ids, columns]."""

    def resolve(self, weight: Weight, inputs: "MatrixInputs") -> "MatrixRows":
        """Return the matrix or stack that multiplies `inputs`. Raises StopCalibrationError to end the run."""


class MatrixRows(NamedTuple):
    """A matrix, or a stack of matrices, that is dequantized some rows at a time.

    Attributes:
        shape: [rows, columns], or [matrices, rows, columns].
        read_range: returns rows first to end - 1 of matrix n, given (n, first, end); float32 [rows, columns], valid
            until this thread's next call.
    """

    shape: tuple[int, ...]
    read_range: Callable[[int, int, int], np.ndarray]

    def list_row_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield ranges (n, first, end) of rows, several per matrix, each small enough for a core's cache."""
        stack, rows = (1, *self.shape)[-3:-1]
        step = max(min(RANGE_WEIGHTS // self.shape[-1], -(-rows // MATRIX_RANGES)), 1)
        return ((n, first, min(first + step, rows)) for n in range(stack) for first in range(0, rows, step))

    def load(self, pool: ThreadPoolExecutor) -> np.ndarray:
        out = np.empty(self.shape, np.float32)
        by_matrix = out.reshape((-1, *self.shape[-2:]))

        def put(place: tuple[int, int, int]) -> None:
            n, first, end = place
            by_matrix[n, first:end] = self.read_range(n, first, end)

        list(pool.map(put, self.list_row_ranges()))
        return out


class MatrixInputs:
    """The inputs of a matrix, or of each matrix of a stack.

    Attributes:
        iterate: takes the index of a matrix; yields its inputs in each document, float32 [rows, columns].
        shared: see __init__.
    """

    def __init__(self, iterate: Callable[[int], Iterator[np.ndarray]], shared: BatchedActivations | None = None):
        """Wrap the inputs.

        shared: the activation, if every matrix that reads it reads all of it, otherwise None.
        """
        self.iterate, self.shared = iterate, shared


class LastUseRecorder:
    """A builder that counts verbs while it forwards them to a recorder, to find when activations can be freed.

    Attributes:
        verbs: names of the verbs that return an activation, in order.
        multiplied: names of the weights that multiply activations.
    """

    def __init__(self) -> None:
        self.verbs, self.multiplied = list[str](), set[str]()
        self._last = dict[Activation, tuple[int, object]]()  # index of the last verb that reads it, and the argument
        self._producers = dict[Activation, list[int]]()  # indices of the verbs that return it
        self._met = dict[str, int]()  # index of the first verb per weight

    def record(self, forward: Callable[..., Activation]) -> Callable[..., Activation]:
        """Return an architecture's `forward` wrapped so that its verbs are counted."""

        def record_forward(recorder: object, *arguments: object) -> Activation:
            self._recorder = recorder
            return forward(self, *arguments)

        return record_forward

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._recorder, name)
        return (
            partial(self._record_verb, name, attribute)
            if callable(attribute) and name not in VERBS_WITHOUT_RESULT
            else attribute
        )

    def _record_verb(self, name: str, verb: Callable[..., object], *arguments: object, **named: object) -> object:
        for place, x in (*enumerate(arguments), *named.items()):
            for read in (x, getattr(x, "chosen", None)):  # the selected keys of Scores
                if isinstance(read, Activation):
                    self._last[read] = len(self.verbs), place if read is x else None
            if isinstance(x, Weight):
                self._met.setdefault(x.name, len(self.verbs))
                self.multiplied.update([x.name] if name in PRODUCTS else [])
        self.verbs.append(name)
        result = verb(*arguments, **named)
        if isinstance(result, Activation):
            self._producers.setdefault(result, []).append(len(self.verbs) - 1)  # some verbs return their argument
        return result

    def list_last_arguments(self) -> list[set[object]]:
        """Return for each verb the arguments (positions or names) that no later verb reads."""
        arguments_read: list[set[object]] = [set() for _ in self.verbs]
        for number, place in self._last.values():
            arguments_read[number].add(place)
        return arguments_read

    def find_first_verb(self, names: Iterable[str]) -> int:
        return min(self._met[name] for name in names)

    def find_needed_verbs(self, number: int) -> set[int]:
        """Return the verbs before index `number` whose results that verb or a later one reads."""
        read = [activation for activation, (last, _) in self._last.items() if last >= number]
        return {verb for activation in read for verb in self._producers.get(activation, ()) if verb < number}


@dataclass
class RecordedActivations:
    """Results of verbs, recorded for later runs over the same documents with some matrices replaced.

    Attributes:
        wanted: indices of the verbs whose results are recorded.  made: the results, by index.
        first: index of the first verb that is computed; results of earlier ones are taken from `made`.
    """

    wanted: Container[int] = ()
    made: dict[int, BatchedActivations] = field(default_factory=dict)
    first: int = 0


def plan_reuse(
    last: LastUseRecorder, shared: Container[object], groups: Sequence[Collection[str]]
) -> tuple[RecordedActivations, list[RecordedActivations]]:
    """Prepare a run that records results, and for each group of replaced matrices a run that reuses them.

    groups: names of matrices. Everything is computed again if verbs read keys and values that earlier verbs have
    stored.
    """
    is_alone = not shared and "write_kv" not in last.verbs
    starts = [last.find_first_verb(names) if is_alone else 0 for names in groups]
    filled = RecordedActivations(set[int]().union(*map(last.find_needed_verbs, starts)))
    return filled, [RecordedActivations((), filled.made, start) for start in starts]


class StreamingKvStore(ReferenceCache):
    """The keys and values of the current layer, and those that several layers share."""

    def __init__(self, shared: Container[object]):
        """Keep the keys and values of the states in `shared` until the end."""
        super().__init__(KV_TYPE)
        self._shared = shared

    def keep(self, state: object, position: int, *new: np.ndarray) -> list[np.ndarray]:
        self._layers = {number: activations for number, activations in self._layers.items() if number in self._shared}
        return super().keep(state, position, *new)

    def put_state(self, layer: int, number: int, state: np.ndarray) -> None:
        """Discard the state, because no document is continued."""


class LayerwiseRunner:
    """A builder of verbs that runs each verb at once, for all documents."""

    reveals = False

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        shared: Container[object],
        matrices: MatrixReader,
        threads: int,
        last: LastUseRecorder | None = None,
        past: RecordedActivations | None = None,
    ):
        """Prepare documents, int [tokens] each.

        shared: states whose keys and values several layers read. last: recorded from the same architecture, to free
        activations; None frees none. past: results of an earlier run over the same documents to reuse, or the object
        that records this run's.
        """
        context = max(map(len, texts))
        self._matrices, self._loaded = matrices, dict[tuple[str, int], np.ndarray]()
        self._last, self._places = last, last.list_last_arguments() if last else []
        self._recorded, self._number = past or RecordedActivations(), 0
        self._pool = ThreadPoolExecutor(threads)
        spans = [SequenceSpan(StreamingKvStore(shared), 0, ids.astype(np.int64), len(ids)) for ids in texts]
        self._references = [ReferenceBuilder([span], self._loaded, context) for span in spans]
        self.ids, self.positions, self.kinds, self.wanted = (
            BatchedActivations(getattr(each, name) for each in self._references)
            for name in ("ids", "positions", "kinds", "wanted")
        )

    def __getattr__(self, verb: str) -> Callable[..., BatchedActivations]:
        return partial(self._run_verb, verb)

    def _run_verb(self, verb: str, *arguments: object, **named: object) -> BatchedActivations:
        """Run a verb for every document, unless its result is reused or not needed."""
        number = self._number
        self._number += 1
        if number < self._recorded.first:
            return BatchedActivations(self._recorded.made.get(number, SKIPPED))
        ended = self._find_ended(number, verb, arguments, named)
        special = getattr(type(self), f"_{verb}", None)
        result = (
            special(self, ended, *arguments, **named) if special else self._run_each(ended, verb, *arguments, **named)
        )
        if number in self._recorded.wanted:
            self._recorded.made[number] = BatchedActivations(result)
        return result

    def _run_each(
        self, ended: Sequence[BatchedActivations], verb: str, *arguments: object, **named: object
    ) -> BatchedActivations:
        """Run a verb document by document.

        ended: arguments to free afterwards.
        """

        def run_document(n: int) -> object:
            own_parts = [select_document(x, n) for x in arguments]
            result = getattr(self._references[n], verb)(
                *own_parts, **{name: select_document(x, n) for name, x in named.items()}
            )
            for parts in ended:
                parts[n] = None
            return result

        return BatchedActivations(self._pool.map(run_document, range(len(self._references))))

    def _find_ended(
        self, number: int, verb: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> list[BatchedActivations]:
        """Return the arguments that no later verb reads."""
        if self._last is None:
            return []
        recorded, places = self._last.verbs[number], self._places[number]
        assert recorded == verb, f"{verb} where {recorded} was recorded"
        return [
            x
            for place, x in (*enumerate(arguments), *named.items())
            if place in places and isinstance(x, BatchedActivations)
        ]

    def embed_inputs(self, embedded: Callable[[], BatchedActivations], parts: int = 1) -> BatchedActivations:
        """Return the embeddings of the tokens; documents have no images."""
        return embedded()

    def add_deepstack(self, x: BatchedActivations, part: int) -> BatchedActivations:
        return x

    def tap_layer_input(self, x: BatchedActivations, layer: int) -> BatchedActivations:
        return x

    def ignore(self, *weights: Weight | None) -> None:
        """Accept weights that are in the file but have no effect."""

    def select_by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        return self._references[0].select_by_context(short, long, original)

    def _embed(
        self, ended: Sequence[BatchedActivations], weight: Weight, ids: BatchedActivations
    ) -> BatchedActivations:
        return BatchedActivations(self._matrices.read_rows(weight, each) for each in ids)

    def _linear(self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight) -> BatchedActivations:
        """Multiply the activations of all documents by a matrix, one range of its rows after another.

        Each range is dequantized once. ended: arguments to free afterwards.
        """
        met = self._matrices.resolve(weight, MatrixInputs(lambda n: iter(x), x))
        lengths = [len(part) for part in x]
        parts = [np.concatenate(x)] if max(lengths) < MAX_CONCATENATED_TOKENS else x
        outputs = [np.empty((len(part), weight.shape[-2]), np.float32) for part in parts]

        def multiply(place: tuple[int, int, int]) -> None:
            n, first, end = place
            rows = met.read_range(n, first, end)
            for part, y in zip(parts, outputs, strict=True):
                y[:, first:end] = part @ rows.T

        list(self._pool.map(multiply, met.list_row_ranges()))
        for each in ended:
            each[:] = [None] * len(lengths)
        with_biases = [add_scale_and_bias(y, weight) for y in outputs]
        return BatchedActivations(
            np.split(with_biases[0], np.cumsum(lengths)[:-1]) if len(with_biases) < len(lengths) else with_biases
        )

    def _head_linear(
        self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight
    ) -> BatchedActivations:
        columns = weight.shape[-1]
        inputs = MatrixInputs(lambda n: (part[:, n * columns : (n + 1) * columns] for part in x))
        return self._run_product(ended, "head_linear", weight, inputs, x, weight)

    def _expert_linear(
        self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight, choice: BatchedActivations
    ) -> BatchedActivations:
        def of(n: int) -> Iterator[np.ndarray]:
            for part, chosen_experts in zip(x, choice, strict=True):
                yield part[chosen_experts.experts.reshape(-1) == n]

        return self._run_product(ended, "expert_linear", weight, MatrixInputs(of), x, weight, choice)

    def _run_product(
        self, ended: Sequence[BatchedActivations], verb: str, weight: Weight, inputs: MatrixInputs, *arguments: object
    ) -> BatchedActivations:
        key = weight.name, weight.first_row
        self._loaded[key] = self._matrices.resolve(weight, inputs).load(self._pool)
        try:
            return self._run_each(ended, verb, *arguments)
        finally:
            del self._loaded[key]

    def close(self) -> None:
        self._pool.shutdown()


def select_document(x: Any, n: int) -> Any:
    if isinstance(x, BatchedActivations):
        return x[n]
    selected = getattr(x, "chosen", None)  # the selected keys of Scores
    return replace(x, chosen=selected[n]) if isinstance(selected, BatchedActivations) else x
