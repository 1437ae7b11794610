"""A sequence: tokens that a model has read, and what its layers keep of them."""

import weakref
from collections.abc import Sequence as Ids
from typing import Any, Protocol

import numpy as np

from localllm.engine.image_tokens import ImageEmbedding, last_end, row_of
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.run import BATCH
from localllm.engine.runs import Runs
from localllm.errors import LocalllmError, UsageError


class Reader(Protocol):
    """What a sequence needs of its engine.

    Attributes:
        context: the most tokens of a sequence.  vocab_size: length of a row of logits.
        runs: in which prompts are read.  lock: held by whoever runs the model or changes its sequences.
        abandoned: what was kept for sequences that were forgotten without being closed.
    """

    context: int
    vocab_size: int
    runs: Runs
    lock: Any
    abandoned: list[SequenceState]

    def run(self, requests: "Ids[tuple[Sequence, Ids[int]]]", logits: str, precise: bool) -> list[np.ndarray]:
        """Read the tokens of all requests; of each the logits asked for, float32 [wanted, vocab]."""
        ...

    def shift(self, sequence: "Sequence", keep: int, count: int) -> None:
        """As Sequence.shift."""


class ReadListener(Protocol):
    """Who goes on with what a model makes of tokens (localllm.engine.draft_head). Attribute engine: whose it is."""

    engine: Any

    def heard(self, place: int, ids: np.ndarray, made: np.ndarray) -> None:
        """Tokens were read, from this place on, int64, and that was made of them, float32 [tokens, width]."""

    def forget_behind(self, place: int) -> None:
        """The sequence goes back to there."""

    def close(self) -> None: ...

    def release(self) -> None:
        """Close, but without waiting: see Sequence.release."""


class Sequence:
    """One of an engine's sequences. Close it, or forget it: its memory then goes back.

    What it does is done under the engine's lock: threads that call one model wait for each other.

    Attributes:
        tokens: what it holds.  engine: whose it is.
        aligned: how many of them, from the first on, were read in whole runs (localllm.engine.runs), or up to the end
            of an image, as by any sequence that begins alike.
        listener: is told what is read; None if nobody wants to know.
        encoded: how many of them an encoder has read; with fewer, or nothing behind them, it holds nothing.
        images: those among the tokens, and where they begin.
    """

    listener: ReadListener | None = None

    def __init__(self, engine: Reader, store: SequenceState, tokens: Ids[int] = ()):
        self.tokens, self.aligned, self.encoded = list(tokens), 0, 0
        self.images = list[tuple[int, ImageEmbedding]]()
        self._begun = 0  # up to where what is behind the aligned ones was read so, too, if an image or its rest follows
        self.engine, self._store = engine, store
        self._forgotten = weakref.finalize(self, engine.abandoned.append, store)
        self._forgotten.atexit = False

    @property
    def context(self) -> int:
        """The most tokens that it can hold."""
        return self.engine.context

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is forgotten: then it is there only for what is forgotten together with it."""
        return not self._forgotten.alive

    @property
    def store(self) -> SequenceState:
        """What the engine's backend keeps for it. Raises LocalllmError if it is closed."""
        if self.closed:
            raise LocalllmError("this sequence is closed")
        return self._store

    def append(self, ids: Ids[int], logits: str = "last", precise: bool = True) -> np.ndarray:
        """Read tokens behind those that it holds; float32 [logits asked for, vocab].

        logits: after the "last" of the tokens, after "all" or "none". precise: keep activations in 16 bits in small
        batches; without, few tokens cost little more than one. Raises UsageError for an id outside of the vocabulary,
        ContextError if the tokens do not fit, MemoryLimitError, and ModelError for logits that are not numbers.
        """
        return self.engine.run([(self, ids)], logits, precise)[0]

    def fork(self) -> "Sequence":
        """Another sequence with the same tokens; memory is shared until one of them goes on."""
        with self.engine.lock:
            twin = Sequence(self.engine, self.store.fork(len(self.tokens)), self.tokens)
            twin.aligned, twin.encoded, twin.images = self.aligned, self.encoded, [*self.images]
            twin._begun = self._begun
            return twin

    def truncate(self, length: int) -> int:
        """Go back to the first `length` tokens; how many it holds then, which may be fewer.

        If its store cannot go back to just there, the next run reads some of the tokens again.
        """
        if length < 0:
            raise UsageError(f"a length should be 0 or above, not {length}")
        with self.engine.lock:
            kept = self._reach(min(length, len(self.tokens)))
            self.store.truncate(kept)
            self._hold(kept)
            return kept

    def rewind(self, length: int) -> int:
        """Go back to the end of a whole run, or of an image, within the first `length` tokens; how many it holds then.

        What it reads then, it reads as a new sequence would, to the bit.
        """
        with self.engine.lock:
            kept = self._reach(self._last_end(min(length, self.aligned)))
            while (there := self.store.truncate(kept)) < kept:
                kept = self._last_end(there)
            self._hold(kept)
            return kept

    def no_listener(self) -> None:
        """Nobody is told any more what is read."""
        listener, self.listener = self.listener, None
        if listener:
            listener.close()

    def _reach(self, length: int) -> int:
        """So many tokens, or none if they are no more than what an encoder has read."""
        return length if length > self.encoded else 0

    def _hold(self, length: int) -> None:
        """Only so many tokens."""
        self.aligned = min(self.aligned, self._last_end(length))
        del self.tokens[length:]
        self.encoded = self.encoded if length else 0
        self.images = [(begin, seen) for begin, seen in self.images if begin < length]
        if self.listener:
            self.listener.forget_behind(length)

    def _last_end(self, length: int) -> int:
        return last_end(self.tokens, length, self.engine.runs)

    def now_holds(self, place: int, ids: np.ndarray, seen: ImageEmbedding | None) -> None:
        """A run has read ids, of an image or of none, from this place on, instead of what was there."""
        end = place + len(ids)
        self.tokens[place:end] = ids.tolist()
        if seen is not None and (begin := place - row_of(int(ids[0]))) not in [known for known, _ in self.images]:
            self.images.append((begin, seen))
        self._align(place, end, seen)

    def _align(self, place: int, end: int, seen: ImageEmbedding | None) -> None:
        """See whether what was read from one place to another was so as by any sequence that begins alike."""
        if place < self.aligned:
            self.aligned = self._last_end(place)
        is_second = (
            seen is not None or place == self.engine.runs.exact
        )  # a prompt's first tokens are a run of their own
        begins = place == self.aligned or (is_second and place == self._begun)
        if seen is not None:
            is_end, is_part = row_of(self.tokens[end - 1]) + 1 == len(seen.rows), end - place == BATCH
        else:
            run = self.engine.runs.next_end(place)
            is_end, is_part = end == run, end < run
        if begins and is_end:
            self.aligned = end
        self._begun = end if begins and (is_end or is_part) else self.aligned

    def shift(self, keep: int, count: int) -> None:
        """Forget `count` tokens, a multiple of 64, behind the first `keep`; later ones move to their positions.

        What is left still knows what was forgotten: keys and values of deeper layers were made with it in sight. Raises
        UsageError if there are not so many tokens, or if the model's tokens cannot be moved; MemoryLimitError.
        """
        self.engine.shift(self, keep, count)

    def forget(self, keep: int, count: int) -> None:
        """The store has forgotten `count` tokens behind the first `keep`."""
        self.aligned = min(self.aligned, self._last_end(keep))
        self._begun = min(self._begun, self.aligned)
        del self.tokens[keep : keep + count]
        end = keep + count
        self.images = [
            (begin if begin < keep else begin - count, seen) for begin, seen in self.images if not keep <= begin < end
        ]

    def release(self) -> None:
        """Queue the memory, which goes back when the engine is used next. Takes no lock: finalizers may call it."""
        if self._forgotten.detach():
            self.engine.abandoned.append(self._store)
            if self.listener:
                self.listener.release()

    def close(self) -> None:
        """Give back the memory; a second time does nothing, nor does it wait then."""
        if self.closed:
            return
        with self.engine.lock:
            if self._forgotten.detach():
                self._store.close()
                self._hold(0)
                if self.listener:
                    self.listener.close()
