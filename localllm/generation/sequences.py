"""Sequences for generations, and what the last one has read, for the next one that begins alike.

A model reads every conversation from its beginning. What a sequence holds of it already, the longest common beginning
of the tokens, is not computed again, so a new turn costs its own tokens only.

How far it can go on is decided in localllm.generation.reuse. A conversation that goes back, to where any of its turns
ended, is as it was then: what was read up to there is not read again. So is one that was left for another (`hold`).
"""

import threading
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from localllm.engine.forks import Refusal, refuse_forks
from localllm.engine.run import PRECISE_TOKENS
from localllm.engine.runs import LONG
from localllm.generation.overflow import Rolling, rolling
from localllm.generation.reuse import Candidate, Reuse, TurnEnds, best_reuse, reuse_of

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.memory.prefixes import Prefixes
    from localllm.engine.sequence import Sequence


HELD = 4  # conversations that wait beside the latest


class BegunSequence(NamedTuple):
    """A sequence that holds the beginning of a prompt, or all of it: then with its logits, float32 [1, vocab]."""

    sequence: "Sequence | Rolling"
    logits: np.ndarray | None = None


class End(NamedTuple):
    """A sequence that has read a prompt and nothing else, and what came out of it, float32 [1, vocab]."""

    sequence: "Sequence"
    logits: np.ndarray


class Sequences:
    """The sequences of one engine. Several generations may go on at the same time, each with its own.

    Attributes:
        engine: theirs.  context: the most tokens of one.  vocab_size: length of a row of logits.
        prefixes: what is kept of prompts from process to process, or None.
    """

    def __init__(self, engine: "Engine", prefixes: "Prefixes | None" = None):
        self.engine, self.context, self.vocab_size = engine, engine.context, engine.vocab_size
        self._kept: Sequence | Rolling | None = None  # nobody's, for the next one
        self._busy: WeakSet[Sequence | Rolling] = WeakSet()
        self._held: deque[Sequence | Rolling] = deque()  # those that others have left, to come back to them
        self._turns: WeakKeyDictionary[Sequence | Rolling, list[TurnEnds]] = WeakKeyDictionary()
        self.prefixes = prefixes
        self._end: End | None = None  # where the latest prompt of more than PRECISE_TOKENS ends
        self._is_new = False  # that one, so that it is to be written
        self._resumed = 0  # tokens of an earlier process's conversation that goes on
        self.lock: threading.Lock | Refusal = threading.Lock()
        refuse_forks(self)

    @contextmanager
    def beginning_with(self, ids: Ids[int], keep: int | None = None) -> Iterator[BegunSequence]:
        """A sequence that holds what has been read of `ids`; if that is all of them, the logits are known.

        keep: how many of its first tokens stay when it is full; None: it cannot hold more than the context.
        """
        begun = self._take(ids, keep)
        try:
            yield begun
        finally:
            self._give_back(begun.sequence)

    def was_read(self, sequence: "Sequence | Rolling", begin: int, logits: np.ndarray) -> None:
        """It has read a prompt from place `begin` on, and these logits came out: remembered, for the same prompt."""
        length, runs = len(sequence.tokens), self.engine.runs
        if isinstance(sequence, Rolling) or length <= PRECISE_TOKENS:
            return
        if begin != runs.last_end(begin) or sequence.aligned != runs.last_end(length):
            return
        with self.lock:
            before, self._end, self._is_new = self._end, End(sequence.fork(), logits.copy()), True
        if before:
            before.sequence.close()

    def _take(self, ids: Ids[int], keep: int | None) -> BegunSequence:
        """The kept sequence, or a fork of one in use if that holds more, or what files have if that is still more."""
        with self.lock:
            begun = self._at_end(ids) if keep is None else None
            if begun is None:
                self._leave_end(ids)
                begun = BegunSequence(self._in_memory(ids, keep))
            if self.prefixes and begun.logits is None and len(ids) > LONG and keep is None:
                found = self.prefixes.find(ids, len(begun.sequence.tokens))
                if found:
                    begun.sequence.close()
                    begun = BegunSequence(found.sequence, found.logits)
            if said := self._earlier(ids, len(begun.sequence.tokens)) if keep is None else None:
                begun.sequence.close()
                begun = BegunSequence(said)
            self._busy.add(begun.sequence)
            turns = [turn for turn in self._ended(begun.sequence) if turn.prompt <= len(begun.sequence.tokens)]
            self._turns[begun.sequence] = [*turns, TurnEnds(len(ids))]
            return begun

    def _at_end(self, ids: Ids[int]) -> BegunSequence | None:
        """A fork of the sequence that has read just this prompt."""
        if self._end is None or self._end.sequence.tokens != list(ids):
            return None
        return BegunSequence(self._end.sequence.fork(), self._end.logits)

    def _leave_end(self, ids: Ids[int]) -> None:
        """Forget where the latest prompt ended, whose memory is needed, unless this one goes on from there."""
        if self._end and self._end.sequence.tokens != list(ids[: len(self._end.sequence.tokens)]):
            self._write_end()
            self._end.sequence.close()
            self._end = None

    def _write_end(self) -> None:
        """What was read anew goes to files."""
        if self._is_new and self.prefixes and self._end and len(self._end.sequence.tokens) > LONG:
            self.prefixes.keep(self._end.sequence.fork(), self._end.logits)
        self._is_new = False

    def _in_memory(self, ids: Ids[int], keep: int | None) -> "Sequence | Rolling":
        """A sequence that holds as much of a prompt as one that is kept, in use or waiting; keep: see Rolling."""
        kept, self._kept = self._kept, None
        known = [*([kept] if kept else []), *self._busy, *self._held]
        best = best_reuse(map(self._candidate, known), ids, self.engine.runs)
        if best and best.source is not kept:
            if kept:
                kept.close()
            kept = self._again(best.source)
        sequence = rolling(kept or self.engine.sequence(), keep)
        self._go_back(sequence, reuse_of(self._candidate(sequence), ids, self.engine.runs))
        return sequence

    def _candidate(self, sequence: "Sequence | Rolling") -> Candidate:
        aligned = None if isinstance(sequence, Rolling) else sequence.aligned
        return Candidate(sequence, sequence.tokens, self._turns.get(sequence, []), aligned)

    def _go_back(self, sequence: "Sequence | Rolling", reuse: Reuse) -> None:
        """To the last token that is of use."""
        if reuse.is_run and not isinstance(sequence, Rolling):
            sequence.rewind(reuse.length)
        else:
            sequence.truncate(reuse.length)

    def _again(self, known: "Sequence | Rolling") -> "Sequence | Rolling":
        """One that waits, or a fork of one in use."""
        if known in self._held:
            self._held.remove(known)
            return known
        return self._forked(known)

    def _forked(self, sequence: "Sequence | Rolling") -> "Sequence | Rolling":
        twin = sequence.fork()
        self._turns[twin] = self._ended(sequence)
        return twin

    def _ended(self, sequence: "Sequence | Rolling") -> list[TurnEnds]:
        """Its turns; none ends further than it goes now."""
        held = len(sequence.tokens)
        return [
            TurnEnds(prompt, held if end is None else min(end, held)) for prompt, end in self._turns.get(sequence, [])
        ]

    def resume(self, held: int) -> None:
        """The next prompt goes on with a conversation of an earlier process, which held so many tokens in the end."""
        self._resumed = held

    def _earlier(self, ids: Ids[int], known: int) -> "Sequence | None":
        """That one, if it is the case, and if files hold more than `known` tokens of it."""
        held, self._resumed, best = self._resumed, 0, None
        for length in (held - 1, held):  # the last token of an answer may not have been read
            if self.prefixes and known < length < len(ids):
                found = self.prefixes.find_conversation(ids[:length], known)
                if found and best:
                    best.close()
                best = found or best
                known = len(best.tokens) if best else known
        if best:
            self._turns[best] = [TurnEnds(known, known)]
        return best

    def write_conversation(self) -> None:
        """What the latest has read goes to files, for `resume`."""
        with self.lock:
            if self.prefixes and self._kept and not isinstance(self._kept, Rolling) and len(self._kept.tokens) > LONG:
                self.prefixes.keep(self._kept.fork(), None, is_conversation=True)

    def hold(self) -> None:
        """Somebody else comes, and one may come back: keep what the latest has read besides. Of those left so the HELD
        latest are kept, as long as there is room for a whole one more.
        """
        with self.lock:
            used, places = self.engine.places()
            if self._kept is None or isinstance(self._kept, Rolling) or used + self.context > places:
                return
            self._held.append(self._forked(self._kept))
            forgotten = self._held.popleft() if len(self._held) > HELD else None
        if forgotten:
            forgotten.close()

    def _give_back(self, sequence: "Sequence | Rolling") -> None:
        """Keep it for the next one, instead of what was kept before; a prompt that was read goes to files."""
        if sequence.closed:  # Python forgets a cycle with it, anywhere, perhaps while the lock is held
            return
        with self.lock:
            self._busy.discard(sequence)
            self._turns[sequence] = self._ended(sequence)
            before, self._kept = self._kept, sequence
            self._write_end()
        if before:
            before.close()
