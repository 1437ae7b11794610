"""Hold a sequence: tokens that a model has processed, and their state."""

import sys
import weakref
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.image_tokens import ImageEmbedding, decode_row, find_last_end
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.runs import BATCH, RunPlan
from localllm.errors import ContextError, LocalllmError, UsageError

if TYPE_CHECKING:
    import threading

    from localllm.engine.adapters import Adapter
    from localllm.engine.forks import ForkedLock, HookLock
    from localllm.engine.hooks import LayerHook


class SequenceRunner(Protocol):
    """The methods of an engine that its sequences use.

    Attributes:
        context: maximum number of tokens in a sequence.  vocab_size: length of a row of logits.
        runs: how prompts are divided into runs.  lock: held while the model runs or its sequences change.
        orphaned: states of sequences that were garbage-collected without being closed.
        adapters: low-rank adapters.  adapter_scales: their scales in new sequences.
    """

    context: int
    vocab_size: int
    runs: RunPlan
    lock: "threading.Lock | ForkedLock | HookLock"
    orphaned: list[SequenceState]
    adapters: "tuple[Adapter, ...]"
    adapter_scales: tuple[float, ...]

    def run(
        self, requests: "Ids[tuple[Sequence, Ids[int]]]", logits: str, precise: bool, kernel_tokens: Ids[int] = ()
    ) -> list[np.ndarray]:
        """Process the tokens of all requests; return the requested logits of each, float32 [wanted, vocab]."""
        ...

    def shift(self, sequence: "Sequence", keep: int, count: int) -> None:
        """Shift a sequence, see Sequence.shift."""


class SequenceListener(Protocol):
    """Observes the tokens that a sequence processes (localllm.engine.draft_head)."""

    @property
    def engine(self) -> object:
        """The engine that runs the listener."""

    def on_hidden_states(self, place: int, ids: np.ndarray, hidden_states: np.ndarray) -> None:
        """Record tokens from this position on, int64, and their hidden states, float32 [tokens, width]."""

    def follow_rewind(self, place: int) -> None:
        """Discard everything after this position of the sequence."""

    def close(self) -> None: ...

    def release(self) -> None:
        """Close without waiting, see Sequence.release."""


class Sequence:
    """A sequence of an engine, whose memory is freed when it is closed or garbage-collected.

    Its methods hold the engine's lock: calls from several threads are serialized.

    Attributes:
        tokens: the ids that the model has processed.  engine: its engine.
        aligned: length of the prefix whose state any sequence with the same tokens would have, to the bit: it was
            computed in whole runs (localllm.engine.runs) or up to the end of an image.
        listener: receives the tokens that the sequence processes; None: no listener.
        encoded: number of tokens at the beginning that belong to the encoder; without later tokens, the sequence
            is empty.
        images: the images among the tokens, each with the index of its first row.
        exact: length of the prefix before the first token that was copied from another sequence.
        gaps: positions [begin, end) before copied tokens that the state lacks: the next run computes them.
        adapter_scales: the scales of adapters for its tokens.
        hook: sees and changes hidden states of its tokens, or None.
    """

    listener: SequenceListener | None = None
    hook: "LayerHook | None" = None

    def __init__(self, engine: SequenceRunner, store: SequenceState, tokens: Ids[int] = ()):
        self.tokens, self.aligned, self.encoded = list(tokens), 0, 0
        self.images, self.exact = list[tuple[int, ImageEmbedding]](), sys.maxsize
        self.gaps = list[tuple[int, int]]()
        self.adapter_scales = AdapterScales.uniform(engine.adapter_scales)
        self._pending_aligned = 0  # end of further tokens that become aligned once their run or image is complete
        self.engine, self._store = engine, store
        self._finalizer = weakref.finalize(self, engine.orphaned.append, store)
        self._finalizer.atexit = False

    @property
    def context(self) -> int:
        """The maximum number of tokens in the sequence."""
        return self.engine.context

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def closed(self) -> bool:
        """Return whether it was closed or garbage-collected."""
        return not self._finalizer.alive

    @property
    def store(self) -> SequenceState:
        """The sequence's state in the backend. Raises LocalllmError if the sequence is closed."""
        if not self._finalizer.alive:
            raise LocalllmError("this sequence is closed: create another one")
        return self._store

    def append(self, ids: Ids[int], logits: str = "last", precise: bool = True, kernel_tokens: int = 0) -> np.ndarray:
        """Process tokens; return the requested logits, float32 [tokens, vocab].

        logits: those after the "last" token, after "all" or "none". precise: keep activations in 16 bits in small
        batches; otherwise in 8, and a few tokens cost little more than one. kernel_tokens: see localllm.engine.runs; 0
        for the number of tokens. Raises UsageError for an id outside of the vocabulary, ContextError if the tokens do
        not fit, MemoryLimitError, and ModelError for NaN or infinite logits.
        """
        return self.engine.run([(self, ids)], logits, precise, [kernel_tokens])[0]

    def fork(self) -> "Sequence":
        """Return a copy of the tokens before a gap, which shares memory with this sequence until one continues."""
        with self.engine.lock:
            length = self.gaps[0][0] if self.gaps else len(self.tokens)
            twin = Sequence(self.engine, self.store.fork(length), self.tokens[:length])
            twin.aligned, twin.encoded, twin.images = self.aligned, self.encoded, [*self.images]
            twin._pending_aligned, twin.exact = self._pending_aligned, self.exact
            twin.adapter_scales, twin.hook = AdapterScales(self.adapter_scales.changes), self.hook
            return twin

    def set_adapter_scales(self, scales: Ids[float]) -> None:
        """Use these scales of the engine's adapters for the tokens that are processed from now on.

        Raises UsageError.
        """
        if len(scales) > len(self.engine.adapters):
            raise UsageError(
                f"there must be at most {len(self.engine.adapters)} scales, one per adapter (found {len(scales)})"
            )
        with self.engine.lock:
            self.adapter_scales.set(len(self.tokens), scales)

    def truncate(self, length: int) -> int:
        """Keep only the first `length` tokens; return how many remain (0 if they all belong to the encoder).

        If the state cannot be cut exactly there, the next run recomputes some of the tokens.
        """
        if length < 0:
            raise UsageError(f"a length must be 0 or greater (found {length})")
        with self.engine.lock:
            kept_length = self.clamp_length(min(length, len(self.tokens)))
            self.store.truncate(kept_length)
            self._truncate_tokens(kept_length)
            return kept_length

    def rewind(self, length: int) -> int:
        """Go back to the last end of a whole run or image within `length` tokens; return how many remain.

        Later tokens are then computed as in a new sequence, to the bit.
        """
        with self.engine.lock:
            kept_length = self.clamp_length(self._find_last_end(min(length, self.aligned)))
            while (reached := self.store.truncate(kept_length)) < kept_length:
                kept_length = self._find_last_end(reached)
            self._truncate_tokens(kept_length)
            return kept_length

    def detach_listener(self) -> None:
        listener, self.listener = self.listener, None
        if listener:
            listener.close()

    def clamp_length(self, length: int) -> int:
        """Return `length`, or 0 if it does not exceed the encoder's tokens."""
        return length if length > self.encoded else 0

    def _truncate_tokens(self, length: int) -> None:
        self.aligned = min(self.aligned, self._find_last_end(length))
        del self.tokens[length:]
        self.gaps = [(begin, min(end, length)) for begin, end in self.gaps if begin < length]
        self.adapter_scales.truncate(length)
        self.exact = self.exact if self.exact < length else sys.maxsize
        self.encoded = self.encoded if length else 0
        self.images = [(begin, image) for begin, image in self.images if begin < length]
        if self.listener:
            self.listener.follow_rewind(length)

    def _find_last_end(self, length: int) -> int:
        return find_last_end(self.tokens, length, self.engine.runs)

    def commit_tokens(self, place: int, ids: np.ndarray, image: ImageEmbedding | None) -> None:
        """Record that a run has processed ids from this position on.

        image: the image of these rows, or None.
        """
        end = place + len(ids)
        self.tokens[place:end] = ids.tolist()
        self.gaps = [gap for gap in self.gaps if not place <= gap[0] < end]
        if image is not None and (begin := place - decode_row(int(ids[0]))) not in [
            registered for registered, _ in self.images
        ]:
            self.images.append((begin, image))
        self._update_aligned(place, end, image)

    def _update_aligned(self, place: int, end: int, image: ImageEmbedding | None) -> None:
        """Update `aligned`: whether tokens [place, end) were prefilled in the runs of a new sequence."""
        if place < self.aligned:
            self.aligned = self._find_last_end(place)
        is_second = image is not None or place == self.engine.runs.exact  # a prompt's first tokens have a separate run
        begins = place == self.aligned or (is_second and place == self._pending_aligned)
        if image is not None:
            is_end, is_part = decode_row(self.tokens[end - 1]) + 1 == len(image.rows), end - place == BATCH
        else:
            run = self.engine.runs.find_next_end(place)
            is_end, is_part = end == run, end < run
        if begins and is_end:
            self.aligned = end
        self._pending_aligned = end if begins and (is_end or is_part) else self.aligned

    def shift(self, keep: int, count: int) -> None:
        """Drop `count` tokens, a multiple of 64, after the first `keep`; later tokens move to their positions.

        The later tokens still depend on the dropped ones: keys and values of deeper layers were computed with them.
        Raises UsageError if there are not enough tokens, or if the model's keys cannot be moved; MemoryLimitError.
        """
        self.engine.shift(self, keep, count)

    def drop_range(self, keep: int, count: int) -> None:
        """Record that the state has dropped `count` tokens after the first `keep`."""
        self.aligned = min(self.aligned, self._find_last_end(keep))
        self._pending_aligned = min(self._pending_aligned, self.aligned)
        del self.tokens[keep : keep + count]
        self.adapter_scales.drop_range(keep, count)
        end = keep + count
        self.images = [
            (begin if begin < keep else begin - count, image) for begin, image in self.images if not keep <= begin < end
        ]

    def commit_copies(self, ids: Ids[int], skipped: Ids[int] = ()) -> None:
        """Record that these tokens were appended by copying another sequence's state.

        skipped: tokens of a gap before them.
        """
        length = len(self.tokens)
        self.exact, self._pending_aligned = min(self.exact, length), self.aligned
        if skipped:
            self.gaps.append((length, length + len(skipped)))
        self.tokens += [*skipped, *ids]

    def drop_gaps(self) -> int:
        """Forget the gaps; return the number of tokens before the first, after which the state must be truncated."""
        length, self.gaps = self.gaps[0][0] if self.gaps else len(self.tokens), []
        return length

    def release(self) -> None:
        """Queue the memory to be freed when the engine is used next.

        This takes no lock, because finalizers call it.
        """
        if self._finalizer.detach():
            self.engine.orphaned.append(self._store)
            if self.listener:
                self.listener.release()

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self.closed:
            return
        with self.engine.lock:
            if self._finalizer.detach():
                self._store.close()
                self._truncate_tokens(0)
                if self.listener:
                    self.listener.close()


def require_capacity(engine: SequenceRunner, requests: Ids[tuple[Sequence, Ids[int]]], tokens: Ids[np.ndarray]) -> None:
    """Raise UsageError for sequences that cannot share a run, ContextError for too many tokens."""
    if len(requests) > 1 and len({id(sequence) for sequence, _ in requests}) < len(requests):
        raise UsageError("a sequence can be in a run only once")
    for (sequence, _), ids in zip(requests, tokens, strict=True):
        if sequence.engine is not engine:
            raise UsageError("this sequence was created by another model: create one with this model's sequence()")
        length = len(sequence.tokens) + len(ids)
        if length > engine.context:
            raise ContextError(
                f"{length} tokens do not fit the context of {engine.context}: open the model with a larger one"
            )
