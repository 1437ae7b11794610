"""A model on a card as something that runs: programs for some numbers of tokens, made when they are needed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from localllm.arch.kv_cache_types import KVType
from localllm.arch.layer_state import Recurrent, State
from localllm.arch.weights import Weight
from localllm.engine.cuda.card import CHUNK, Card, Launch
from localllm.engine.cuda.lowering import card_steps, kernels_of, work_of
from localllm.engine.cuda.weights import CardWeights
from localllm.engine.lower.lowering import Crossing
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.lower.tape import assign_stages, offsets
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.operation import MatrixOperation, Operation
from localllm.engine.options import EngineOptions
from localllm.engine.run import BATCH, Header, Span, TextSpan, int64_zeros
from localllm.errors import NOT_NUMBERS, ModelError
from localllm.kernels.arguments import FETCH, PAGE
from localllm.kernels.build.library import Progress
from localllm.kernels.cuda import grid

MOST_SEQUENCES = 64  # of a run: so many have room for their tables of pages


class PinnedHeader(Header):
    """A header in memory of the host that is copied to the card's in one piece, with the sequences' tables of pages.

    Attributes:
        words: int64, all of it.
    """

    def __init__(self, card: Card, tokens: int, table_words: int):
        """table_words: of a sequence's table at most."""
        sequences = min(tokens, MOST_SEQUENCES)
        size = words_of_header(tokens) + sequences * table_words
        self.words, self._used = card.pinned(8 * size).view(np.int64), 0
        self.words[:] = 0
        super().__init__(tokens, self._zeros)
        self._tables = self._zeros((sequences, table_words))
        self.base = 0

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        self._used += size
        return self.words[self._used - size : self._used].reshape(shape)

    def offset(self, array: np.ndarray) -> int | None:
        """Bytes from the beginning to an array that is a part of it; None for others."""
        offset = array.ctypes.data - self.words.ctypes.data
        return offset if 0 <= offset < self.words.nbytes else None

    def fill(self, spans: Sequence[Span], precise: bool, logits: np.ndarray) -> None:
        super().fill(spans, precise, logits)
        for number, span in enumerate(spans):
            table = span.store.table
            self._tables[number, : len(table)] = table
            self.sequences[number, 3] = self.base + self._tables[number].ctypes.data - self.words.ctypes.data

    def fill_texts(self, texts: Sequence[TextSpan], pages: np.ndarray, rows: np.ndarray, precise: bool) -> None:
        super().fill_texts(texts, pages, rows, precise)
        first = 0
        for number, text in enumerate(texts):
            count = -(-len(text.ids) // PAGE)
            self._tables[number, :count] = pages[first : first + count]
            self.sequences[number, 3] = self.base + self._tables[number].ctypes.data - self.words.ctypes.data
            first += count


def words_of_header(tokens: int) -> int:
    """What a header asks for."""
    asked = list[np.ndarray]()

    def noted(shape: tuple[int, ...]) -> np.ndarray:
        asked.append(int64_zeros(shape))
        return asked[-1]

    Header(tokens, noted)
    return sum(array.size for array in asked)


class Arena:
    """A card's memory for what lives during a run; programs never run together, so they share it."""

    def __init__(self, card: Card):
        self._card, self._address, self._size = card, 0, -1

    def address(self, size: int) -> int:
        """Of so many bytes; earlier addresses stay good. Raises MemoryLimitError."""
        if size > self._size:
            self._address, self._size = self._card.allocate(max(size, 1)), size
        return self._address


class OnCard(NamedTuple):
    """What programs of all sizes have in common; arena: memory for what lives during a run."""

    card: Card
    operations: list[Operation]
    cache: KVCache
    layout: StateLayout | None
    weights: CardWeights
    context: int
    taken: Crossing
    arena: Arena


class SizedProgram:
    """A model for up to so many tokens."""

    def __init__(self, model: OnCard, size: tuple[int, int], progress: Progress | None):
        """size: of tokens, and of those whose logits are wanted, the most."""
        card = self._card = model.card
        self.header = PinnedHeader(card, size[0], -(-model.context // PAGE))
        self._constants: dict[int, tuple[int, np.ndarray]] = {}
        places = StepPlaces(model.cache, model.layout, self.header)
        steps = card_steps(model.operations, places, model.weights, size, model.taken)
        assign_stages(steps)
        self._keep, memory = steps, model.arena.address(offsets(steps))
        self.header.base = card.allocate(self.header.words.nbytes)
        self._flaws = card.pinned(8).view(np.int64)
        card.prepare(kernels_of(steps) | {"fetch"}, progress)
        fetch = {"source": self.header.words.ctypes.data, "target": self.header.base, "words": len(self.header.words)}
        first = Launch("fetch", grid("fetch", fetch, 0), tuple(fetch[name] for name in FETCH._fields))
        works = [work_of(step, self._place, memory) for step in steps]
        self._replay: Callable[[], None] = card.record([first, *works])

    def _place(self, array: np.ndarray) -> int:
        """Where an array is for the card."""
        if array is self.header.flaws:
            return int(self._flaws.ctypes.data)
        offset = self.header.offset(array)
        if offset is not None:
            return self.header.base + offset
        if id(array) not in self._constants:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            address = self._card.allocate(max(len(data), 1))
            self._card.upload(address, data)
            self._constants[id(array)] = address, array
        return self._constants[id(array)][0]

    def run(self, fill: Callable[[PinnedHeader], None]) -> None:
        """What `fill` tells the header to do. Raises ModelError if some logits are not numbers."""
        self._flaws[0] = 0
        fill(self.header)
        self._replay()
        self._card.synchronize()
        if self._flaws[0]:
            raise ModelError(NOT_NUMBERS)


class CudaProgram:
    """A model for a card."""

    def __init__(
        self, card: Card, operations: list[Operation], cache: KVCache, layout: StateLayout | None, context: int,
        options: EngineOptions, taken: Crossing,
    ):  # fmt: skip
        """Matrices go to the card now. taken: see `lower_operations`."""
        matrices = [operation.weight for operation in operations if isinstance(operation, MatrixOperation)]
        weights = CardWeights(card, matrices, options.uploading)
        for weight in matrices:
            weights.address(weight)
        self._model = OnCard(card, operations, cache, layout, weights, context, taken, Arena(card))
        self._card, self._vocab_size = card, operations[-1].output.columns
        self._programs: dict[tuple[int, int], SizedProgram] = {}
        self._logits = np.zeros((0, self._vocab_size), np.float32)
        for size in ((BATCH, 1), (1, 1)):  # the largest first, whose memory is enough for the others
            self._programs[size] = SizedProgram(self._model, size, options.progress)

    def run(self, spans: Sequence[Span], precise: bool) -> np.ndarray:
        """As Program.run; MOST_SEQUENCES spans at most."""
        tokens, wanted = sum(len(span.ids) for span in spans), sum(span.wanted for span in spans)
        return self._run(tokens, wanted, lambda header, logits: header.fill(spans, precise, logits))

    def read(self, texts: Sequence[TextSpan], pages: np.ndarray) -> np.ndarray:
        """As Program.read; MOST_SEQUENCES texts at most."""
        tokens = sum(len(text.ids) for text in texts)
        return self._run(tokens, len(texts), lambda header, rows: header.fill_texts(texts, pages, rows, False))

    def _run(self, tokens: int, wanted: int, fill: Callable[[PinnedHeader, np.ndarray], None]) -> np.ndarray:
        """float32 [wanted, vocab]; fill(header, where they go)."""
        self._card.use()
        if wanted > len(self._logits):
            size = 4 * fitting(wanted) * self._vocab_size
            self._logits = self._card.pinned(size).view(np.float32).reshape(-1, self._vocab_size)
        logits = self._logits[:wanted]
        self._program(fitting(tokens), fitting(max(wanted, 1))).run(lambda header: fill(header, logits))
        return logits.copy()

    def _program(self, tokens: int, wanted: int) -> SizedProgram:
        """The one for so many tokens; who shows progress does not look any more."""
        size = tokens, wanted
        if size not in self._programs:
            self._programs[size] = SizedProgram(self._model, size, None)
        return self._programs[size]


def buffer_bytes(operations: list[Operation], states: Sequence[State], kv_type: KVType) -> int:
    """What a card needs besides weights and cache: buffers for BATCH tokens, and for uploads."""
    kept = [state for state in states if not isinstance(state, Recurrent)]
    recurrent = [state for state in states if isinstance(state, Recurrent)]
    cache, layout = KVCache(kept, PAGE, kv_type, (1,)), StateLayout(recurrent) if recurrent else None
    steps = card_steps(operations, StepPlaces(cache, layout, Header()), Nowhere(), (BATCH, 1), {})
    assign_stages(steps)
    return offsets(steps) + 3 * CHUNK


class Nowhere(CardWeights):
    """Stands for matrices on a card that is not chosen yet."""

    capability = 8, 0

    def __init__(self) -> None:
        """Nothing is uploaded."""

    def address(self, weight: Weight) -> int:
        return 0


def fitting(tokens: int) -> int:
    """The size of the program for so many tokens: a power of two. Only texts have more than BATCH."""
    return 1 << (tokens - 1).bit_length()
