"""Texts, each read whole and on its own: of each one row of numbers; nothing is kept of any.

Many go in one run, one behind the other, sorted by their lengths: nothing is padded, attention sees each text alone,
and of the last layer's rows only those that are asked for are handed out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from localllm.arch import architecture
from localllm.arch.layer_state import Latent, Paged
from localllm.arch.weights import Weights
from localllm.engine.backend_selection import chosen
from localllm.engine.cpu.program import compiled
from localllm.engine.cuda.driver import has_driver
from localllm.engine.forks import lock_for
from localllm.engine.lower.steps import StepPlaces
from localllm.engine.memory.run_cache import RunCache
from localllm.engine.operations.operation import Operation, Product
from localllm.engine.operations.tokens import EmbedKinds
from localllm.engine.options import EngineOptions
from localllm.engine.run import BATCH, Header, Span, TextSpan
from localllm.engine.trace.recorder import recorded
from localllm.errors import ContextError, LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.arguments import PAGE

Ids = Sequence[int] | np.ndarray
SHORT = 32  # tokens of a text, up to which activations keep 16 bits
MOST_TEXTS = 256  # of a run; each begins a page of the cache
Read = Callable[[Sequence[TextSpan]], np.ndarray]  # texts of one run: float32 [texts, width]


class EmbeddingRunner:
    """A model that makes a row of numbers of each text. Threads that call it wait for each other.

    Attributes:
        hyperparameters: the model's.  context: the most tokens of a text.  width: numbers of a row.
        vocab_size: tokens that there are.  device: what computes, for people.
        warning: what the user should know, in one line, or None.
    """

    def __init__(self, file: GGUFFile, pooling: str, options: EngineOptions | None = None):
        """pooling: one of localllm.arch.pooling.KINDS, but "none". Raises LocalllmError."""
        options = options or EngineOptions()
        options.require_valid()
        model, h = architecture(file)
        if h.start_token is not None:
            raise UnsupportedError(f"{file.path}: {h.arch} models write answers, and make no vectors: use localllm run")
        self.hyperparameters = replace(h, pooling=pooling)
        self.context, self.vocab_size, self._path = options.context or h.context, h.vocab_size, file.path
        weights = Weights(file.tensors)
        recorder = recorded(file, model.forward, weights, self.hyperparameters, self.context)
        tables = [one.weight.shape[0] for one in recorder.operations if isinstance(one, EmbedKinds)]
        self._has_kinds = bool(tables) and min(tables) > 1
        self.width, self.lock = recorder.operations[-1].output.columns, lock_for(self)
        self._close: Callable[[], None] = lambda: None
        self.warning: str | None = None
        self.prepare_all: Callable[[], None] = lambda: None  # wait for kernels that are compiled behind the first runs
        states = self.hyperparameters.states()
        paged = [state for state in states if isinstance(state, Paged | Latent)]
        if len(paged) < len(states):
            raise ModelError(f"{file.path}: vectors of {h.arch} models are not supported: their layers are recurrent")
        self.device, (kind, _) = "CPU", chosen(options, has_driver)
        on_card = self._on_card(recorder.operations, paged, options) if kind == "card" else None
        if kind == "reference":
            forward = partial(model.forward, w=weights, h=self.hyperparameters)
            self._read = by_reference(forward, options, self.context)
        else:
            self._read = on_card or self._compiled(recorder.operations, paged, options)

    def _on_card(self, operations: list[Operation], states: Sequence[Paged | Latent], options: EngineOptions) -> Any:
        """What computes on a card; None, and a warning, if it should only where there is one that can."""
        from localllm.engine.cuda.embedding_runner import CardTexts

        try:
            card = CardTexts(operations, states, self.context, options)
        except LocalllmError as error:
            if options.backend != "auto":
                raise
            self.warning = f"the CPU computes: {error}"
            return None
        self._close, self.warning, self.device = card.close, card.warning, card.name
        return card.read

    def _compiled(self, operations: list[Operation], states: Sequence[Paged | Latent], options: EngineOptions) -> Read:
        """What computes on the CPU."""
        tokens = max(BATCH, self.context)
        pages = -(-tokens // PAGE) + MOST_TEXTS
        cache, header = RunCache(states, pages, options.kept_as, operations), Header(tokens)
        places = StepPlaces(cache, None, header)
        program = compiled(operations, places, options.thread_count, options.progress, keeps=False)
        self._close, self.prepare_all = program.close, program.prepare_all
        self.warning = self.warning or program.warning
        table = np.arange(pages)
        # Of weights in 16 bits the vectors lose most where activations are rounded: a cosine of 0.99999 with those in
        # float32, 0.9999998 with both planes, for 1.4 times the work. What quantized weights lose is more than either,
        # but in short texts, where errors of few tokens are averaged: of MiniLM in Q8_0 the empty one's cosine is
        # 0.9992 by 8 bits and 0.9996 by 16.
        weights = [one.weight for one in operations if isinstance(one, Product)]
        precise = any(weight.tensor.format.name in ("F16", "BF16") for weight in weights)
        return lambda texts: program.read(texts, table, precise or max(len(text.ids) for text in texts) <= SHORT)

    def read(
        self,
        texts: Sequence[Ids],
        seconds: Sequence[int] | None = None,
        progress: Callable[[int], Any] | None = None,
    ) -> np.ndarray:
        """A row of each text's token ids: float32 [texts, width].

        seconds: of pairs of texts, where the second one begins, whose tokens are of another kind; progress: told after
        each run how many are done. Raises ContextError for a text that is too long, UsageError for ids that are none,
        ModelError for rows that are not numbers.
        """
        ids = [self._checked(text) for text in texts]
        lengths = [len(text) for text in ids]
        ends = seconds if seconds and self._has_kinds else lengths
        rows, done = np.empty((len(ids), self.width), np.float32), 0
        with self.lock:
            for numbers in runs(lengths):
                some = [TextSpan(ids[number], ends[number]) for number in numbers.tolist()]
                try:
                    rows[numbers] = self._read(some)
                except ModelError as error:
                    raise ModelError(f"{self._path}: {error}") from None
                done += len(numbers)
                if progress:
                    progress(done)
        return rows

    def _checked(self, text: Ids) -> np.ndarray:
        ids = np.asarray(text, np.int64)
        if not len(ids) or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise UsageError(f"token ids should be a list of numbers from 0 to {self.vocab_size - 1}")
        if len(ids) > self.context:
            raise ContextError(f"a text of {len(ids)} tokens; the model reads {self.context}")
        return ids

    def close(self) -> None:
        """End the threads; a second time does nothing."""
        with self.lock:
            self._close()


def by_reference(forward: Callable[..., np.ndarray], options: EngineOptions, context: int) -> Read:
    """What computes in plain NumPy."""
    from localllm.engine.reference import ReferenceBackend  # seldom needed

    backend = ReferenceBackend(forward, options.kept_as, context, None)

    def span(text: TextSpan) -> Span:
        return Span(backend.store(), 0, text.ids, 1, (np.arange(len(text.ids)) >= text.second).astype(np.int64))

    return lambda texts: backend.run([span(text) for text in texts], True)


def runs(lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """Which texts are read together, by their numbers: alike in length, BATCH tokens at most or one longer text; SHORT
    ones by themselves."""
    order, first, tokens = np.argsort(lengths, kind="stable"), 0, 0
    for place, number in enumerate(order):
        length = lengths[number]
        ends_short = length > SHORT >= lengths[order[first]]
        if place > first and (tokens + length > BATCH or place - first == MOST_TEXTS or ends_short):
            yield order[first:place]
            first, tokens = place, 0
        tokens += length
    if len(order):
        yield order[first:]
