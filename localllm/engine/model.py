"""The engine: weights, architecture and verbs become something that turns tokens into logits."""

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ids
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from localllm.arch import architecture
from localllm.arch.states import Recurrent, State
from localllm.arch.storage import KVType
from localllm.arch.weights import Weights
from localllm.engine.cache import KVCache
from localllm.engine.cpu import compiled
from localllm.engine.driver import has_driver
from localllm.engine.forks import Refusal, refuse_forks
from localllm.engine.observe import Squares
from localllm.engine.page_table import PageTable
from localllm.engine.pages import Pages
from localllm.engine.program import BATCH, Span
from localllm.engine.recorder import Activation, Operation, recorded
from localllm.engine.recurrent import Layout, RecurrentState
from localllm.engine.runs import FIRST, LATER, Runs
from localllm.engine.sequence import Sequence, Store
from localllm.engine.shift import Turn, turns
from localllm.engine.store import HybridStore
from localllm.errors import ContextError, LocalllmError, ModelError, UsageError
from localllm.files.gguf_file import GGUFFile
from localllm.kernels.arguments import PAGE
from localllm.kernels.cores import usable_cores
from localllm.kernels.library import Progress

if TYPE_CHECKING:
    from localllm.engine.devices import Placed

Request = tuple[Sequence, Ids[int]]
NOTHING = np.zeros(0, np.int64)
REREAD = 16  # tokens that are read again together with new ones; more get a run of their own, whose end is remembered


class Reading(NamedTuple):
    """What a request comes to: the sequence's tokens from `begin` on, which its store does not have, and new ones."""

    sequence: Sequence
    begin: int
    ids: np.ndarray  # int64
    wanted: int  # of how many of them, the last ones, logits are returned

    def and_then(self, ids: np.ndarray, wanted: int) -> "Reading":
        """With new tokens behind."""
        ids = np.concatenate((self.ids, ids)) if len(self.ids) else ids
        return Reading(self.sequence, self.begin, ids, wanted)


class Backend(Protocol):
    """What computes."""

    warning: str | None  # what the user should know about it
    place_bytes: int  # of memory for one token of a sequence

    def store(self) -> Store:
        """What is kept for a new sequence."""
        ...

    def places(self) -> tuple[int, int]:
        """For how many tokens there are places in use, and at all; whole pages."""
        ...

    def run(self, spans: Ids[Span], precise: bool) -> np.ndarray:
        """The wanted logits, span by span: float32 [wanted, vocab]. Together, the spans have BATCH tokens at most.

        Raises ModelError if some are not numbers.
        """
        ...

    def prepare_all(self) -> None:
        """Wait for kernels that are compiled behind the first runs. Raises LocalllmError."""
        ...

    def prepare_shift(self, turns: Mapping[int, Turn]) -> None:
        """Be able to turn keys, those of a layer each in its way. Raises LocalllmError."""
        ...

    def turn(self, store: Any, first: int, end: int, distance: int) -> None:
        """Keys at positions `first` to end - 1, which were `distance` further behind, become those of their places."""
        ...

    def close(self) -> None: ...


class CpuBackend:
    """A model as a tape for the CPU."""

    def __init__(
        self,
        operations: list[Operation],
        states: Ids[State],
        context: int,
        kv_type: KVType,
        threads: int,
        progress: Progress | None,
    ):
        recurrent = [state for state in states if isinstance(state, Recurrent)]
        self._states = [state for state in states if not isinstance(state, Recurrent)]
        self._cache = KVCache(self._states, context, kv_type)
        self._pages, self._layout = Pages(self._cache.pages), Layout(recurrent) if recurrent else None
        self.place_bytes = self._cache.place_bytes
        self._program = compiled(operations, self._cache, self._layout, threads, progress)
        self.run, self.close, self.warning = self._program.run, self._program.close, self._program.warning
        self.prepare_all = self._program.prepare_all

    def store(self) -> Store:
        pages = PageTable(self._cache, self._pages)
        return HybridStore(pages, RecurrentState(self._layout)) if self._layout else pages

    def places(self) -> tuple[int, int]:
        return PAGE * self._pages.used, PAGE * len(self._pages)

    def prepare_shift(self, turns: Mapping[int, Turn]) -> None:
        """Raises LocalllmError."""
        from localllm.engine.cpu_shift import KeyTurner  # seldom needed

        self.turn = KeyTurner(self._cache, self._states, turns).turn


class Engine:
    """One model, and any number of sequences. Threads that call it wait for each other.

    Attributes:
        hyperparameters: the model's.  context: the most tokens of a sequence.  vocab_size: length of a row of logits.
        operations: what is done with tokens.  kv_type: how keys and values are kept.  runs: in which prompts are read.
        thread_count: how many compute.  lock: held by whoever runs the model or changes its sequences.
        device: what computes, for people.
        limits: of a card that computes all, bytes per second of its memory, and operations per second; None otherwise.
        abandoned: what was kept for sequences that were forgotten without being closed.
        warning: what the user should know, in one line, or None.
    """

    def __init__(
        self,
        file: GGUFFile,
        threads: int | None = None,
        context: int | None = None,
        kv_type: str = "f16",
        backend: str = "cpu",
        progress: Progress | None = None,
        observer: Squares | None = None,
        gpu_layers: int | str = "auto",
        uploading: Progress | None = None,
    ):
        """context: the most tokens of a sequence (None: as trained); kv_type: see KVType.of; backend: cpu,
        cuda, cuda:N, auto (a card if there is one that works) or reference; gpu_layers: how many of the last
        layers a card gets, a number, all, or auto for as many as it has room for.

        progress(done, total) is called while kernels are compiled, uploading(bytes, of all) while weights go to a card;
        observer: sums up what the matrices meet.
        Raises ModelError, MemoryLimitError, UsageError.
        """
        kept_as = KVType.of(kv_type)
        if context is not None and context < 1:
            raise UsageError(f"the context should be at least 1 token, not {context}")
        count = usable_cores() if threads is None else threads
        if not 1 <= count <= 1024:
            raise UsageError(f"threads should be from 1 to 1024, not {count}")
        if backend not in ("cpu", "auto", "reference"):
            from localllm.engine.devices import require_device  # where there may be a card

            require_device(backend)
        model, self.hyperparameters = architecture(file)
        self.context = self.hyperparameters.context if context is None else context
        self.vocab_size = self.hyperparameters.vocab_size
        self.lock: threading.Lock | Refusal = threading.Lock()
        refuse_forks(self)
        self.abandoned, self._path = list[Store](), file.path
        weights = Weights(file.tensors)
        operations = self._recorded(file, model.forward, weights, observer)
        self.operations, self.kv_type = operations, kept_as
        self.runs = Runs(FIRST if any(operation.verb == "route" for operation in operations) else LATER)
        self.thread_count = count
        placed = self._placed(file, operations, backend, gpu_layers)
        on_card = self._on_card(placed, operations, progress, uploading, backend == "auto") if placed else None
        if on_card:
            computing: Backend = on_card
        elif backend != "reference":
            operations = observer.watch(operations) if observer else operations
            states = self.hyperparameters.states()
            computing = CpuBackend(operations, states, self.context, kept_as, count, progress)
        else:
            from localllm.engine.reference import ReferenceBackend  # seldom needed

            forward = partial(model.forward, w=weights, h=self.hyperparameters)
            computing = ReferenceBackend(forward, kept_as, self.context, observer)
        self._backend: Backend | None = computing
        self._turns = partial(turns, operations, self.hyperparameters.states())
        self._shifts = False
        self.warning = computing.warning or self._note

    def _placed(
        self, file: GGUFFile, operations: list[Operation], backend: str, gpu_layers: int | str
    ) -> "Placed | None":
        """The card that gets layers, if one does. Raises LocalllmError."""
        self.device, self._note = "CPU", None
        self.limits: tuple[float, float] | None = None
        if backend in ("cpu", "reference"):
            return None
        if backend == "auto" and not has_driver():
            if gpu_layers not in ("auto", 0):
                self._note = "the CPU computes: there is no NVIDIA driver"
            return None
        from localllm.engine.cuda_program import buffer_bytes
        from localllm.engine.devices import placed

        h, buffers = self.hyperparameters, partial(buffer_bytes, operations)
        found = placed(backend, gpu_layers, file, h.states(), h.layers, self.context, self.kv_type, buffers)
        self._note = found.warning
        if found.card is None or not found.layers:
            return None
        self.device = f"{found.card.name}, {found.layers} of {h.layers} layers"
        self.limits = (found.card.bandwidth, found.card.peak) if found.layers == h.layers else None
        return found

    def _on_card(
        self, placed: "Placed", operations: list[Operation], progress: Progress | None, uploading: Progress | None,
        automatic: bool,
    ) -> Backend | None:  # fmt: skip
        """What computes with a card; None if it turns out that it cannot, and nobody insists. Raises LocalllmError."""
        from localllm.engine.cuda_backend import CudaBackend

        assert placed.card
        states, on_cpu = self.hyperparameters.states(), self.hyperparameters.layers - placed.layers
        try:
            return CudaBackend(
                placed.card, operations, states, self.context, self.kv_type, self.thread_count, progress, uploading,
                on_cpu, placed.spare,
            )  # fmt: skip
        except LocalllmError as error:
            placed.card.close()
            if not automatic:
                raise
            self.device, self.limits, self._note = "CPU", None, f"the CPU computes: {error}"
            return None

    def _recorded(
        self, file: GGUFFile, forward: Callable[..., Activation], weights: Weights, observer: Squares | None
    ) -> list[Operation]:
        """What the architecture says, checked. Raises ModelError."""
        operations = recorded(file, forward, weights, self.hyperparameters, self.context).operations
        if observer:
            try:
                observer.require_watchable(operations)
            except ModelError as error:
                raise type(error)(f"{file.path}: {error}") from None
        return operations

    def sequence(self) -> Sequence:
        """A new one, empty."""
        return Sequence(self, self.backend.store())

    def places(self) -> tuple[int, int]:
        """For how many tokens the cache has places in use, and at all; whole pages, shared ones counted once."""
        with self.lock:
            self._clean_up()
            return self.backend.places()

    @property
    def place_bytes(self) -> int:
        """Memory that a token of a sequence takes, in all layers."""
        return self.backend.place_bytes

    @property
    def backend(self) -> Backend:
        """Raises LocalllmError if the engine is closed."""
        if self._backend is None:
            raise LocalllmError("the model is closed")
        return self._backend

    def step(self, requests: Ids[Request], precise: bool = True) -> list[np.ndarray]:
        """Read the tokens of several sequences in one run of the model; of each the last logits, float32 [1, vocab].

        As Sequence.append for each of them; no sequence may be there twice.
        """
        return self.run(requests, "last", precise)

    def run(self, requests: Ids[Request], logits: str, precise: bool) -> list[np.ndarray]:
        """Read the tokens of all requests, BATCH at a time; of each the logits asked for, float32 [wanted, vocab].

        Raises as Sequence.append does, before anything has changed; a failure later leaves whole tokens in sequences.
        """
        if logits not in ("last", "all", "none"):
            raise UsageError(f"logits should be last, all or none, not {logits!r}")
        tokens = [self._checked(ids) for _, ids in requests]
        wanted = [{"all": len(ids), "last": 1, "none": 0}[logits] for ids in tokens]
        with self.lock:
            self._clean_up()
            self._require_room(requests, tokens)
            late = [unread(sequence) for sequence, _ in requests]
            if long := [reading for reading in late if len(reading.ids) > REREAD]:
                self._read(long, precise)
                late = [unread(sequence) for sequence, _ in requests]
            new = zip(late, tokens, wanted, strict=True)
            rows = self._read([reading.and_then(ids, count) for reading, ids, count in new], precise)
        return [some[0] if len(some) == 1 else np.concatenate(some) for some in rows]

    def prepare_all(self) -> None:
        """Wait for kernels that are compiled behind the first runs, which would be slower. Raises LocalllmError."""
        with self.lock:
            self.backend.prepare_all()

    def require_shift(self) -> None:
        """Be ready for Sequence.shift, which compiles kernels once. Raises UsageError if it is not possible."""
        if not self._shifts:
            self.backend.prepare_shift(self._turns())
            self._shifts = True

    def shift(self, sequence: Sequence, keep: int, count: int) -> None:
        """As Sequence.shift. If it fails, what is behind the first tokens will be read again."""
        if keep < 0 or count < 0 or count % PAGE or keep + count > len(sequence.tokens):
            raise UsageError(f"cannot forget {count} of {len(sequence.tokens)} tokens behind the first {keep}")
        with self.lock:
            self.require_shift()
            store = sequence.store
            held = store.truncate(len(sequence.tokens))
            try:
                kept = store.shift(keep, count) if held >= keep + count else store.truncate(min(held, keep))
                if kept > keep:
                    self.backend.turn(store, keep, kept, count)
            except BaseException:
                store.truncate(keep)
                raise
            del sequence.tokens[keep : keep + count]
            sequence.aligned = min(sequence.aligned, self.runs.last_end(keep))

    def _read(self, readings: Ids[Reading], precise: bool) -> list[list[np.ndarray]]:
        """The logits of each, in pieces."""
        rows: list[list[np.ndarray]] = [[] for _ in readings]
        for batch in batches([len(reading.ids) for reading in readings]):
            self._run_batch(readings, batch, precise, rows)
        return rows

    def _checked(self, ids: Ids[int]) -> np.ndarray:
        """Token ids as an array. Raises UsageError."""
        try:
            valid = len(ids) > 0 and all(0 <= index(token) < self.vocab_size for token in ids)
        except TypeError:
            valid = False
        if not valid:
            raise UsageError(f"token ids should be a list of numbers from 0 to {self.vocab_size - 1}")
        return np.asarray(ids, np.int64)

    def _clean_up(self) -> None:
        """Give back what forgotten sequences have left."""
        while self.abandoned:
            self.abandoned.pop().close()

    def _require_room(self, requests: Ids[Request], tokens: Ids[np.ndarray]) -> None:
        if len({id(sequence) for sequence, _ in requests}) < len(requests):
            raise UsageError("a sequence can take part in a run only once")
        if any(sequence.engine is not self for sequence, _ in requests):
            raise UsageError("a sequence can only be read by the model that it was made by")
        for (sequence, _), ids in zip(requests, tokens, strict=True):
            length = len(sequence.tokens) + len(ids)
            if length > self.context:
                raise ContextError(f"{length} tokens do not fit the context of {self.context}")

    def _run_batch(
        self, readings: Ids[Reading], batch: list[tuple[int, int, int]], precise: bool, rows: list[list[np.ndarray]]
    ) -> None:
        """Run some tokens (reading, first, last + 1) and add their logits to the requests' rows."""
        spans = []
        for number, first, end in batch:
            sequence, begin, ids, wanted = readings[number]
            some = max(0, end - max(first, len(ids) - wanted))
            spans.append(Span(sequence.store, begin + first, ids[first:end], some))
        try:
            for store, position, ids, _ in spans:
                store.prepare(position, len(ids))
            found = self.backend.run(spans, precise)
        except BaseException as error:
            for span in spans:  # what was to be read again is among the tokens, as if it had been
                span.store.truncate(span.position)
            if isinstance(error, ModelError):
                raise ModelError(f"{self._path}: {error}") from None
            raise
        for (number, _, _), span in zip(batch, spans, strict=True):
            sequence, end = readings[number].sequence, span.position + len(span.ids)
            sequence.tokens[span.position : end] = span.ids.tolist()
            sequence.aligned = min(sequence.aligned, self.runs.last_end(span.position))
            if span.position == sequence.aligned and end == self.runs.next_end(span.position):
                sequence.aligned = end
            rows[number].append(found[: span.wanted])
            found = found[span.wanted :]

    def close(self) -> None:
        """End the engine's threads; a second time does nothing, nor does it in a process that was forked."""
        if isinstance(self.lock, Refusal):
            return
        with self.lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


def unread(sequence: Sequence) -> Reading:
    """The tokens of a sequence that its store does not have any more; most often none."""
    begin, length = sequence.store.truncate(len(sequence.tokens)), len(sequence.tokens)
    return Reading(sequence, begin, NOTHING if begin == length else np.array(sequence.tokens[begin:], np.int64), 0)


def batches(counts: Ids[int]) -> Iterator[list[tuple[int, int, int]]]:
    """So many tokens of several requests as runs of at most BATCH tokens: lists of (request, first, last + 1)."""
    batch, room = list[tuple[int, int, int]](), BATCH
    for number, count in enumerate(counts):
        first = 0
        while first < count:
            end = min(count, first + room)
            batch.append((number, first, end))
            room -= end - first
            first = end
            if not room:
                yield batch
                batch, room = [], BATCH
    if batch:
        yield batch
