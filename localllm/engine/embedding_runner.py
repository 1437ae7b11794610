"""Run embedding models, which return one vector per input and keep no state.

A run processes many inputs of similar length, concatenated without padding; each input attends only to itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.weights import Weights
from localllm.engine.backend import choose_backend
from localllm.engine.cpu.program import RunCache, compile_program
from localllm.engine.forks import create_lock
from localllm.engine.lower.header import MIN_TEXT_KERNEL_TOKENS, RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.steps import StepMemory
from localllm.engine.operations.operation import MatrixProduct, Operation
from localllm.engine.operations.tokens import EmbedTokenTypes
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH, PRECISE_TOKENS, RunPlan
from localllm.engine.trace.recorder import trace_model
from localllm.errors import ContextError, LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE
from localllm.system.processes import has_driver

Ids = Sequence[int] | np.ndarray
MAX_PRECISE_TEXT = (
    PRECISE_TOKENS  # texts of at most this many tokens keep 16-bit activations, whatever else is in their run
)
MAX_TEXTS = 256  # texts per run; each begins a page of the cache
RunTexts = Callable[[Sequence[TextSpan]], np.ndarray]  # runs the texts of one run: float32 [texts, width]


class EmbeddingRunner:
    """A model that computes one vector per input. Calls from several threads are serialized.

    Attributes:
        hyperparameters: the model's.  context: maximum number of tokens in an input.  width: length of a vector.
        vocab_size: size of the vocabulary.  device: the backend's name for users.
        warning: one line for the user, or None.
    """

    def __init__(self, file: GGUFFile, pooling: str, options: EngineOptions | None = None):
        """Open a model. Raises LocalllmError.

        pooling: one of localllm.arch.decoder.KINDS except "none".
        """
        options = options or EngineOptions()
        options.require_valid()
        model, h = load_architecture(file)
        if h.start_token is not None:
            raise UnsupportedError(
                f"{file.path}: {h.arch} models generate text and do not make embeddings: use localllm run"
            )
        self.hyperparameters = replace(h, pooling=pooling)
        self.context, self.vocab_size, self._path = options.context or h.context, h.vocab_size, file.path
        weights = Weights(file.tensors)
        recorder = trace_model(file, model.forward, weights, self.hyperparameters, self.context)
        tables = [
            operation.weight.shape[0] for operation in recorder.operations if isinstance(operation, EmbedTokenTypes)
        ]
        self._has_kinds = bool(tables) and min(tables) > 1
        self.width, self.lock = recorder.operations[-1].output.columns, create_lock(self)
        self._close: Callable[[], None] = lambda: None
        self.warning: str | None = None
        self.prepare_all: Callable[[], None] = lambda: None  # waits for kernels that are compiled in the background
        self._kernel_limits: Sequence[int] = (MAX_PRECISE_TEXT,)
        states = self.hyperparameters.list_states()
        paged = [state for state in states if isinstance(state, PagedState | LatentState)]
        if len(paged) < len(states):
            raise ModelError(f"{file.path}: vectors of {h.arch} models are not supported: their layers are recurrent")
        self.device, (kind, _) = "CPU", choose_backend(options, has_driver)
        on_card = self._build_gpu_runner(recorder.operations, paged, options) if kind == "card" else None
        if kind == "reference":
            forward = partial(model.forward, w=weights, h=self.hyperparameters)
            self._read = build_reference_runner(forward, options, self.context)
        else:
            self._read = on_card or self._compile(recorder.operations, paged, options)

    def _build_gpu_runner(
        self, operations: list[Operation], states: Sequence[PagedState | LatentState], options: EngineOptions
    ) -> RunTexts | None:
        """Build the GPU runner; return None and set a warning if no GPU is usable and none is required."""
        from localllm.engine.cuda.backend import CudaEmbeddingRunner

        try:
            card = CudaEmbeddingRunner(operations, states, self.context, options)
        except LocalllmError as error:
            if options.backend != "auto":
                raise
            self.warning = f"the CPU computes: {error}"
            return None
        self._close, self.warning, self.device = card.close, card.warning, card.name
        return card.read

    def _compile(
        self, operations: list[Operation], states: Sequence[PagedState | LatentState], options: EngineOptions
    ) -> RunTexts:
        """Build the CPU runner."""
        tokens = max(BATCH, self.context)
        pages = -(-tokens // PAGE) + MAX_TEXTS
        cache, header = RunCache(states, pages, options.kv_cache_type, operations), RunHeader(tokens)
        places = StepMemory(cache, None, header)
        operations = options.observer.insert_sums(operations) if options.observer else operations
        program = compile_program(operations, places, options.thread_count, options.progress, keeps=False)
        self._close, self.prepare_all, self._kernel_limits = program.close, program.prepare_all, program.kernel_limits
        self.warning = self.warning or program.warning
        table = np.arange(pages)
        # With 16-bit weights, rounding activations to 8 bits is the largest error: the cosine with the float32 vectors
        # is 0.99999, against 0.9999998 with 16 bits (both planes), for 1.4 times the work. Quantizing the weights loses
        # more than either, except for short texts, where the errors of few tokens are averaged: with MiniLM in Q8_0
        # the cosine of the empty text is 0.9992 with 8 bits and 0.9996 with 16.
        weights = [operation.weight for operation in operations if isinstance(operation, MatrixProduct)]
        precise = any(weight.tensor.format.name in ("F16", "BF16") for weight in weights)
        return lambda texts: program.read(
            texts, table, precise or max(len(text.ids) for text in texts) <= MAX_PRECISE_TEXT
        )

    def read(
        self, texts: Sequence[Ids], seconds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Compute the vectors of inputs, given as token ids: float32 [inputs, width].

        seconds: for pairs of inputs, where the second begins, from which on the token type differs. progress: called
        after each run with the number of finished inputs. Raises ContextError for an input that is too long, UsageError
        for invalid ids, ModelError for NaN or infinite values.
        """
        ids = [self._validate_ids(text) for text in texts]
        lengths = [len(text) for text in ids]
        ends = seconds if seconds and self._has_kinds else lengths
        rows, tokens_read = np.empty((len(ids), self.width), np.float32), 0
        with self.lock:
            for numbers in group_texts(lengths, self._kernel_limits):
                some = [TextSpan(ids[number], ends[number]) for number in numbers.tolist()]
                try:
                    rows[numbers] = self._read(some)
                except ModelError as error:
                    raise ModelError(f"{self._path}: {error}") from None
                tokens_read += len(numbers)
                if progress:
                    progress(tokens_read)
        return rows

    def _validate_ids(self, text: Ids) -> np.ndarray:
        ids = np.asarray(text, np.int64)
        if not len(ids) or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise UsageError(f"token ids must be a list of integers from 0 to {self.vocab_size - 1}")
        if len(ids) > self.context:
            raise ContextError(
                f"an input of {len(ids)} tokens exceeds the model's context of {self.context}: shorten it"
            )
        return ids

    def close(self) -> None:
        with self.lock:
            self._close()


def build_reference_runner(forward: Callable[..., np.ndarray], options: EngineOptions, context: int) -> RunTexts:
    """Build the NumPy runner."""
    from localllm.engine.reference import ReferenceBackend  # rarely needed

    backend = ReferenceBackend(forward, options.kv_cache_type, context, options.observer)

    def build_span(text: TextSpan) -> SequenceSpan:
        return SequenceSpan(
            backend.create_state(), 0, text.ids, 1, (np.arange(len(text.ids)) >= text.second).astype(np.int64)
        )

    return lambda texts: backend.run([build_span(text) for text in texts], True)


def group_texts(lengths: Sequence[int], kernel_limits: Sequence[int] = (MAX_PRECISE_TEXT,)) -> Iterator[np.ndarray]:
    """Yield the indices of inputs to process in one run.

    The inputs of a run have similar lengths and at most BATCH tokens in total, unless one input alone is longer. They
    select the same kernels, so that an input's vector does not depend on the other inputs. kernel_limits: see Backend.
    """
    order, first, tokens = np.argsort(lengths, kind="stable"), 0, 0
    kernels = [bisect_left(kernel_limits, max(length, MIN_TEXT_KERNEL_TOKENS)) for length in lengths]
    for place, number in enumerate(order):
        length = lengths[number]
        is_other = kernels[number] != kernels[order[first]]
        if place > first and (tokens + length > BATCH or place - first == MAX_TEXTS or is_other):
            yield order[first:place]
            first, tokens = place, 0
        tokens += length
    if len(order):
        yield order[first:]


class EmbeddingOnlyEngine:
    """The engine of a model that cannot generate text: every run raises. Attributes as in Engine."""

    device, warning, bytes_per_token, runs, draft_head_path = "CPU", None, 0, RunPlan(), None
    adapters, adapter_scales, control_vectors, streamed_bytes = (), (), (), 0

    def __init__(self, path: str, hyperparameters: Hyperparameters, options: EngineOptions):
        self._path, self.hyperparameters = path, hyperparameters
        self.context, self.vocab_size = options.context or hyperparameters.context, hyperparameters.vocab_size
        self.thread_count, self.kv_type, self.lock = options.thread_count, options.kv_cache_type, create_lock(self)

    def get_cache_usage(self) -> tuple[int, int]:
        """Return zeros, because there is no cache."""
        return 0, 0

    def get_disk_statistics(self) -> dict[str, float]:
        """Return nothing: all weights are mapped."""
        return {}

    def sequence(self) -> NoReturn:
        """Raise UnsupportedError."""
        kind = f"{self.hyperparameters.arch} models make embeddings and cannot generate text"
        raise UnsupportedError(f"{self._path}: {kind}: use localllm embed or localllm rerank")

    def step(self, *requests: object) -> NoReturn:
        """Raise UnsupportedError."""
        self.sequence()

    def prepare_all(self) -> None: ...

    def close(self) -> None: ...
