"""Sequences for generations, and what the last one has read, for the next one that begins alike.

A model reads every conversation from its beginning. What a sequence holds of it already, the longest common beginning
of the tokens, is not computed again, so a new turn costs its own tokens only.

How far it can go on is decided in generation.prefix_match. A conversation that goes back, to where any of its turns
ended, is as it was then: what was read up to there is not read again. So is one that was left for another (`hold`).
"""

import sys
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from localllm.engine.forks import lock_for
from localllm.engine.image_tokens import is_worth_caching, last_end
from localllm.engine.memory.sequence_state import StoredPrefix
from localllm.engine.run import PRECISE_TOKENS
from localllm.generation.context_overflow import ShiftedSequence, rolling
from localllm.generation.prefix_match import PrefixMatch, ReuseCandidate, TurnBoundary, longest_match, match
from localllm.generation.step_batcher import StepBatcher

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.memory.prefix_cache import PrefixCache
    from localllm.engine.sequence import Sequence
    from localllm.generation.speculation.ngram_cache import NgramCache

HELD = 4  # conversations that wait beside the latest


class PooledSequence(NamedTuple):
    """A sequence that holds the beginning of a prompt, or all of it: then with its logits, float32 [1, vocab]."""

    sequence: "Sequence | ShiftedSequence"
    logits: np.ndarray | None = None


class PromptEnd(NamedTuple):
    """A sequence that has read a prompt and nothing else, and what came out of it, float32 [1, vocab]."""

    sequence: "Sequence"
    logits: np.ndarray


class SequencePool:
    """The sequences of one engine. Several generations may go on at the same time, each with its own.

    Attributes:
        engine: theirs.  context: the most tokens of one.  vocab_size: length of a row of logits.
        prefixes: what is kept of prompts from process to process, or None.
        written: what was written before, which guesses come from, or None.
        steps: by which generations that go on at the same time share runs of the model.
    """

    def __init__(self, engine: "Engine", prefixes: "PrefixCache | None" = None, written: "NgramCache | None" = None):
        self.engine, self.context, self.vocab_size = engine, engine.context, engine.vocab_size
        self._kept: Sequence | ShiftedSequence | None = None  # nobody's, for the next one
        self._busy: WeakSet[Sequence | ShiftedSequence] = WeakSet()
        self._held: deque[Sequence | ShiftedSequence] = deque()  # those that others have left, to come back to them
        self._turns: WeakKeyDictionary[Sequence | ShiftedSequence, list[TurnBoundary]] = WeakKeyDictionary()
        self.prefixes, self.written, self.steps = prefixes, written, StepBatcher()
        self._end: PromptEnd | None = None  # where the latest prompt of more than PRECISE_TOKENS ends
        self._is_new = False  # that one, so that it is to be written
        self._released: deque[Sequence | ShiftedSequence] = deque()  # that answers are done with: see `collect`
        self.lock = lock_for(self)

    def put_back(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Queue a sequence that nobody goes on with.

        Takes no lock: the garbage collector may do this anywhere, even while this thread holds one.
        """
        self._released.append(sequence)

    def collect(self) -> None:
        """Take back what answers have released, and keep the latest; a prompt that was read goes to files.

        Waits for locks, so no finalizer may call it.
        """
        with self.lock:
            self._collect()
        if self.written:
            self.written.collect()

    def was_read(self, sequence: "Sequence | ShiftedSequence", begin: int, logits: np.ndarray) -> None:
        """Remember what came out of a prompt, float32 [1, vocab], that was read from place `begin` on."""
        tokens, runs = sequence.tokens, self.engine.runs
        if isinstance(sequence, ShiftedSequence) or len(tokens) <= PRECISE_TOKENS:
            return
        if begin != last_end(tokens, begin, runs) or sequence.aligned != last_end(tokens, len(tokens), runs):
            return
        with self.lock:
            before, self._end, self._is_new = self._end, PromptEnd(sequence.fork(), logits.copy()), True
        if before:
            before.sequence.close()

    def begin(self, ids: Ids[int], keep: int | None = None, earlier: int = 0) -> PooledSequence:
        """One that goes on from what is worth most: of those in memory, or in files if these have still more.

        keep: how many of its first tokens stay when it is full; None: it cannot hold more than the context. earlier:
        how many of them a conversation of an earlier process held in the end, if they go on with one.
        """
        with self.lock:
            self._collect()
            self._leave_end(ids)
            begun, most = None, sys.maxsize
            while begun is None:
                stored = self._stored(ids, earlier, most) if keep is None else []
                best = longest_match([*self._in_memory(keep), *stored], ids, self.engine.runs)
                begun, most = self._begun(best, ids, keep), best.length - 1
            if self._kept:
                self._kept.close()
                self._kept = None
            self._busy.add(begun.sequence)
            turns = [turn for turn in self._ended(begun.sequence) if turn.prompt <= len(begun.sequence.tokens)]
            self._turns[begun.sequence] = [*turns, TurnBoundary(len(ids))]
            return begun

    def _in_memory(self, keep: int | None) -> Iterator[ReuseCandidate]:
        """Sequences that are kept, in use or waiting, and where the latest prompt ends."""
        if self._end and keep is None:
            yield self._candidate(self._end.sequence)._replace(has_logits=True)
        yield from map(self._candidate, [*([self._kept] if self._kept else []), *self._busy, *self._held])

    def _candidate(self, sequence: "Sequence | ShiftedSequence") -> ReuseCandidate:
        aligned = None if isinstance(sequence, ShiftedSequence) else sequence.aligned
        return ReuseCandidate(sequence, sequence.tokens, self._turns.get(sequence, []), aligned)

    def _stored(self, ids: Ids[int], earlier: int, most: int) -> Iterator[ReuseCandidate]:
        """Find a prompt and the conversation that it continues on disk, if that is up to `most` tokens."""
        if self.prefixes is None:
            return
        if found := self.prefixes.stored(ids, most):
            yield ReuseCandidate(found, found.ids, (), len(found.ids), found.has_logits)
        for length in (earlier - 1, earlier):  # the last token of an answer may not have been read
            conversation = ids[: max(length, 0)]
            if length < len(ids) and (found := self.prefixes.stored(conversation, most, is_conversation=True)):
                yield ReuseCandidate(found, found.ids, ended_with(found), 0)

    def _begun(self, reuse: PrefixMatch, ids: Ids[int], keep: int | None) -> PooledSequence | None:
        """Acquire the sequence of a match for this caller only; None if its files are gone."""
        source = reuse.source
        if isinstance(source, StoredPrefix):
            assert self.prefixes is not None
            read = self.prefixes.load(source)
            if read and source.is_conversation:
                self._turns[read.sequence] = ended_with(source)
            return read and PooledSequence(*read)
        if source is None:
            return PooledSequence(rolling(self.engine.sequence(), keep))
        if source is self._kept:
            self._kept = None
        elif source in self._held:
            self._held.remove(source)
        else:
            source = self._forked(source)
        if reuse.length == len(ids):
            return PooledSequence(source, self._end and self._end.logits)
        sequence = rolling(source, keep)
        self._go_back(sequence, match(self._candidate(sequence), ids, self.engine.runs))
        return PooledSequence(sequence)

    def _leave_end(self, ids: Ids[int]) -> None:
        """Forget where the latest prompt ended, whose memory is needed, unless this one goes on from there."""
        if self._end and self._end.sequence.tokens != list(ids[: len(self._end.sequence.tokens)]):
            self._write_end()
            self._end.sequence.close()
            self._end = None

    def _write_end(self) -> None:
        """Write the newly prefilled tokens to disk."""
        if self._is_new and self.prefixes and self._end and is_worth_caching(self._end.sequence.tokens):
            self.prefixes.keep(self._end.sequence.fork(), self._end.logits)
        self._is_new = False

    def _go_back(self, sequence: "Sequence | ShiftedSequence", reuse: PrefixMatch) -> None:
        """Rewind to the last token that is of use."""
        if reuse.is_run and not isinstance(sequence, ShiftedSequence):
            sequence.rewind(reuse.length)
        else:
            sequence.truncate(reuse.length)

    def _forked(self, sequence: "Sequence | ShiftedSequence") -> "Sequence | ShiftedSequence":
        twin = sequence.fork()
        self._turns[twin] = self._ended(sequence)
        return twin

    def _ended(self, sequence: "Sequence | ShiftedSequence") -> list[TurnBoundary]:
        """Its turns; none ends further than it goes now."""
        held = len(sequence.tokens)
        return [
            TurnBoundary(prompt, held if end is None else min(end, held))
            for prompt, end in self._turns.get(sequence, [])
        ]

    def write_conversation(self) -> None:
        """Write the latest conversation's cache to disk, for a later process that resumes it."""
        with self.lock:
            self._collect()
            if self.written and self._kept:
                self.written.add(self._kept.tokens, is_kept=True)
            kept = self._kept
            if self.prefixes and kept and not isinstance(kept, ShiftedSequence) and is_worth_caching(kept.tokens):
                self.prefixes.keep(kept.fork(), None, is_conversation=True)

    def hold(self) -> None:
        """Park the current conversation's cache so that it can be resumed.

        The HELD latest parked ones are kept, as long as there is room for a whole further one.
        """
        with self.lock:
            self._collect()
            used, places = self.engine.places()
            if self._kept is None or isinstance(self._kept, ShiftedSequence) or used + self.context > places:
                return
            self._held.append(self._forked(self._kept))
            forgotten = self._held.popleft() if len(self._held) > HELD else None
        if forgotten:
            forgotten.close()

    def _collect(self) -> None:
        """Empty the queue of released sequences. The caller holds the lock."""
        while self._released:
            sequence = self._released.popleft()
            self.steps.withdraw(sequence)
            if sequence.closed or sequence is self._kept:  # garbage together with its answer; put back twice by Ctrl-C
                continue
            self._busy.discard(sequence)
            self._turns[sequence] = self._ended(sequence)
            before, self._kept = self._kept, sequence
            self._write_end()
            if before:
                before.close()


def ended_with(conversation: StoredPrefix) -> list[TurnBoundary]:
    """Return the turns of a stored conversation of which only the end is known."""
    return [TurnBoundary(len(conversation.ids), len(conversation.ids))]
