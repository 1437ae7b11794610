"""A builder of verbs that computes many texts at once, layer by layer, and says what each matrix meets beforehand.

It runs an architecture's verbs as NumPy has them (localllm.kernels.reference), each for all texts before the next: so a
matrix can become another one between what it meets and what it makes of that, and memory holds one layer's activations.
Any architecture will do.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from localllm.arch.kv_cache_types import KVType
from localllm.arch.weights import Weight
from localllm.engine.operations.linear import with_bias
from localllm.engine.operations.reference import Reference
from localllm.engine.run import Span
from localllm.kernels.reference_cache import Remembered
from localllm.quantizing.liveness import LastReads

KEPT_AS = KVType.of("f16")  # keys and values
AT_ONCE = 3 << 17  # weights that are made float32 and multiplied together: 1.5 MB
SHARES = 4  # of a small matrix
TOGETHER = 512  # tokens of short texts


class BatchedActivations(list[Any]):
    """An activation, or what else is one per text; Nones when nobody reads it any more."""


SKIPPED = BatchedActivations([None])  # what nobody reads


class StopCalibrationError(Exception):
    """The last matrix has met its inputs: nobody wants the logits."""


class Matrices(Protocol):
    """What the texts meet."""

    def rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        """Rows of an embedding matrix, float32 [ids, columns]."""

    def met(self, weight: Weight, inputs: "Inputs") -> "MatrixRows":
        """The matrix, or the stack of them; inputs: what it meets. Raises FinishedError."""


class MatrixRows(NamedTuple):
    """A matrix, or a stack of them, of which some rows at a time are made float32.

    Attributes:
        shape: [rows, columns], or with the number of matrices before.
        of: rows of matrix n from one to another, float32 [rows, columns], good until this thread's next ones.
    """

    shape: tuple[int, ...]
    of: Callable[[int, int, int], np.ndarray]

    def places(self) -> Iterator[tuple[int, int, int]]:
        """All of them, so many at a time that a core's cache holds them while they meet texts, and several at least."""
        stack, rows = (1, *self.shape)[-3:-1]
        step = max(min(AT_ONCE // self.shape[-1], -(-rows // SHARES)), 1)
        return ((n, first, min(first + step, rows)) for n in range(stack) for first in range(0, rows, step))

    def whole(self, pool: ThreadPoolExecutor) -> np.ndarray:
        """All in an array."""
        out = np.empty(self.shape, np.float32)
        by_matrix = out.reshape((-1, *self.shape[-2:]))

        def put(place: tuple[int, int, int]) -> None:
            n, first, end = place
            by_matrix[n, first:end] = self.of(n, first, end)

        list(pool.map(put, self.places()))
        return out


class Inputs:
    """What a matrix meets, or each of a stack.

    of(n): float32 [rows, columns], for matrix n, in pieces, one per text.
    """

    def __init__(self, of: Callable[[int], Iterator[np.ndarray]], shared: BatchedActivations | None = None):
        """shared: the activation, if all of it meets all matrices that it is given to."""
        self.of, self.shared = of, shared


@dataclass
class RecordedActivations:
    """What verbs have made of texts, for those who read them again with other matrices in some places.

    Attributes:
        wanted: numbers of the verbs whose results are kept.  made: those.
        first: number of the first verb that is computed; what ones before it have made is taken from `made`.
    """

    wanted: Container[int] = ()
    made: dict[int, BatchedActivations] = field(default_factory=dict)
    first: int = 0


def pasts(
    last: LastReads, shared: Container[Any], groups: Sequence[Collection[str]]
) -> tuple[RecordedActivations, list[RecordedActivations]]:
    """One that a reading fills, and one for each group of matrices that change, by names, with what that has left.

    Where verbs read keys and values that others have kept, all of them are computed again.
    """
    is_alone = not shared and "keep" not in last.verbs
    starts = [last.first_with(names) if is_alone else 0 for names in groups]
    filled = RecordedActivations(set[int]().union(*map(last.read_from, starts)))
    return filled, [RecordedActivations((), filled.made, start) for start in starts]


class StreamingKvStore(Remembered):
    """Keeps of a sequence what a layer needs while it is computed, and keys and values that other layers share."""

    def __init__(self, shared: Container[Any]):
        """shared: the states of those."""
        super().__init__(KEPT_AS)
        self._shared = shared

    def keep(self, state: Any, position: int, *new: np.ndarray) -> list[np.ndarray]:
        self._layers = {other: kept for other, kept in self._layers.items() if other in self._shared}
        return super().keep(state, position, *new)

    def put_state(self, layer: int, number: int, state: np.ndarray) -> None:
        """Nobody reads on."""


class Sequential:
    """The builder."""

    reveals = False

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        shared: Container[Any],
        matrices: Matrices,
        threads: int,
        last: LastReads | None = None,
        past: RecordedActivations | None = None,
    ):
        """texts: token ids, int [tokens]; shared: states whose keys and values several layers read.

        last: of the same verbs; what nobody reads after them is given up. None: everything is kept. past: of the same
        texts.
        """
        context = max(map(len, texts))
        self._matrices, self._known = matrices, dict[tuple[str, int], np.ndarray]()
        self._last, self._places = last, last.places() if last else []
        self._past, self._number = past or RecordedActivations(), 0
        self._pool = ThreadPoolExecutor(threads)
        spans = [Span(StreamingKvStore(shared), 0, ids.astype(np.int64), len(ids)) for ids in texts]
        self._references = [Reference([span], self._known, context) for span in spans]
        self.ids, self.positions, self.kinds, self.wanted = (
            BatchedActivations(getattr(each, name) for each in self._references)
            for name in ("ids", "positions", "kinds", "wanted")
        )

    def __getattr__(self, verb: str) -> Callable[..., BatchedActivations]:
        return partial(self._say, verb)

    def _say(self, verb: str, *given: Any, **named: Any) -> BatchedActivations:
        """A verb for every text, if it need not be what it was."""
        number = self._number
        self._number += 1
        if number < self._past.first:
            return BatchedActivations(self._past.made.get(number, SKIPPED))
        ended = self._read_last(number, verb, given, named)
        special = getattr(type(self), f"_{verb}", None)
        made = special(self, ended, *given, **named) if special else self._each(ended, verb, *given, **named)
        if number in self._past.wanted:
            self._past.made[number] = BatchedActivations(made)
        return made

    def _each(self, ended: Sequence[BatchedActivations], verb: str, *given: Any, **named: Any) -> BatchedActivations:
        """A verb for one text after the other; ended: what nobody reads after it."""

        def one(n: int) -> Any:
            mine = [part_of(x, n) for x in given]
            made = getattr(self._references[n], verb)(*mine, **{name: part_of(x, n) for name, x in named.items()})
            for parts in ended:
                parts[n] = None
            return made

        return BatchedActivations(self._pool.map(one, range(len(self._references))))

    def _read_last(
        self, number: int, verb: str, given: Sequence[Any], named: Mapping[str, Any]
    ) -> list[BatchedActivations]:
        """What is given to a verb and nobody reads after it."""
        if self._last is None:
            return []
        said, places = self._last.verbs[number], self._places[number]
        assert said == verb, f"{verb} where {said} was recorded"
        return [x for place, x in (*enumerate(given), *named.items()) if place in places]

    def begin(self, embedded: Callable[[], BatchedActivations], parts: int = 1) -> BatchedActivations:
        """Texts have no images."""
        return embedded()

    def deepen(self, x: BatchedActivations, part: int) -> BatchedActivations:
        return x

    def enter(self, x: BatchedActivations, layer: int) -> BatchedActivations:
        return x

    def ignore(self, *weights: Weight | None) -> None:
        """These stand in the file, but nothing needs them."""

    def by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        return self._references[0].by_context(short, long, original)

    def _embed(
        self, ended: Sequence[BatchedActivations], weight: Weight, ids: BatchedActivations
    ) -> BatchedActivations:
        return BatchedActivations(self._matrices.rows(weight, each) for each in ids)

    def _linear(self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight) -> BatchedActivations:
        """Some rows of the matrix meet all texts before the next ones."""
        met = self._matrices.met(weight, Inputs(lambda n: iter(x), x))
        lengths = [len(part) for part in x]
        parts = [np.concatenate(x)] if max(lengths) < TOGETHER else x
        made = [np.empty((len(part), weight.shape[-2]), np.float32) for part in parts]

        def multiply(place: tuple[int, int, int]) -> None:
            n, first, end = place
            rows = met.of(n, first, end)
            for part, y in zip(parts, made, strict=True):
                y[:, first:end] = part @ rows.T

        list(self._pool.map(multiply, met.places()))
        for each in ended:
            each[:] = [None] * len(lengths)
        whole = [with_bias(y, weight) for y in made]
        return BatchedActivations(np.split(whole[0], np.cumsum(lengths)[:-1]) if len(whole) < len(lengths) else whole)

    def _head_linear(
        self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight
    ) -> BatchedActivations:
        columns = weight.shape[-1]
        inputs = Inputs(lambda n: (part[:, n * columns : (n + 1) * columns] for part in x))
        return self._product(ended, "head_linear", weight, inputs, x, weight)

    def _expert_linear(
        self, ended: Sequence[BatchedActivations], x: BatchedActivations, weight: Weight, choice: BatchedActivations
    ) -> BatchedActivations:
        def of(n: int) -> Iterator[np.ndarray]:
            for part, chosen in zip(x, choice, strict=True):
                yield part[chosen.experts.reshape(-1) == n]

        return self._product(ended, "expert_linear", weight, Inputs(of), x, weight, choice)

    def _product(
        self, ended: Sequence[BatchedActivations], verb: str, weight: Weight, inputs: Inputs, *given: Any
    ) -> BatchedActivations:
        key = weight.name, weight.first_row
        self._known[key] = self._matrices.met(weight, inputs).whole(self._pool)
        try:
            return self._each(ended, verb, *given)
        finally:
            del self._known[key]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def part_of(x: Any, n: int) -> Any:
    """What text n has of something."""
    if isinstance(x, BatchedActivations):
        return x[n]
    chosen = getattr(x, "chosen", None)  # of Scores
    return replace(x, chosen=chosen[n]) if isinstance(chosen, BatchedActivations) else x
