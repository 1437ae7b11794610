"""Sequences for generations, and what the last one has read, for the next one that begins alike.

A model reads every conversation from its beginning. What a sequence holds of it already, the longest common beginning
of the tokens, is not computed again, so a new turn costs its own tokens only.

Other prompts go on only where a whole run ended, in memory or, if they have more than LONG tokens, in a file of an
earlier process: so they are read in the same runs as by a model that has read nothing before, and the answer is the
same to the bit. After prompts of up to PRECISE_TOKENS, which are read in 16 bits in any pieces, such ones go on
anywhere.
"""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from localllm.engine.forks import Refusal, refuse_forks
from localllm.engine.program import PRECISE_TOKENS
from localllm.engine.runs import LONG
from localllm.generation.overflow import Rolling, rolling

if TYPE_CHECKING:
    from localllm.engine.model import Engine
    from localllm.engine.prefixes import Prefixes
    from localllm.engine.sequence import Sequence


class Begun(NamedTuple):
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
        self._prompts: WeakKeyDictionary[Sequence | Rolling, int] = WeakKeyDictionary()  # lengths
        self.prefixes = prefixes
        self._end: End | None = None  # where the latest prompt of more than PRECISE_TOKENS ends
        self._is_new = False  # that one, so that it is to be written
        self.lock: threading.Lock | Refusal = threading.Lock()
        refuse_forks(self)

    @contextmanager
    def beginning_with(self, ids: Ids[int], keep: int | None = None) -> Iterator[Begun]:
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

    def _take(self, ids: Ids[int], keep: int | None) -> Begun:
        """The kept sequence, or a fork of one in use if that holds more, or what files have if that is still more."""
        with self.lock:
            begun = self._at_end(ids) if keep is None else None
            if begun is None:
                self._leave_end(ids)
                begun = Begun(self._in_memory(ids, keep))
            if self.prefixes and begun.logits is None and len(ids) > LONG and keep is None:
                found = self.prefixes.find(ids, len(begun.sequence.tokens))
                if found:
                    begun.sequence.close()
                    begun = Begun(found.sequence, found.logits)
            self._busy.add(begun.sequence)
            self._prompts[begun.sequence] = len(ids)
            return begun

    def _at_end(self, ids: Ids[int]) -> Begun | None:
        """A fork of the sequence that has read just this prompt."""
        if self._end is None or self._end.sequence.tokens != list(ids):
            return None
        return Begun(self._end.sequence.fork(), self._end.logits)

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
        kept, self._kept = self._kept, None
        known = max(self._busy, key=lambda sequence: self._usable(sequence, ids), default=None)
        if known and self._usable(known, ids) > (self._usable(kept, ids) if kept else 0):
            if kept:
                kept.close()
            kept = known.fork()
            self._prompts[kept] = self._prompts[known]
        sequence = rolling(kept or self.engine.sequence(), keep)
        usable = self._usable(sequence, ids)
        if usable < common(sequence.tokens, ids) and not isinstance(sequence, Rolling):
            sequence.rewind(usable)
        else:
            sequence.truncate(usable)
        return sequence

    def _usable(self, sequence: "Sequence | Rolling", ids: Ids[int]) -> int:
        """How many of its tokens are worth something: a turn goes on where the last one ended; see above for others."""
        same, before = common(sequence.tokens, ids), self._prompts.get(sequence, inf)
        if isinstance(sequence, Rolling) or same >= before or max(len(ids), before) <= PRECISE_TOKENS:
            return same
        return self.engine.runs.last_end(min(same, sequence.aligned))

    def _give_back(self, sequence: "Sequence | Rolling") -> None:
        """Keep it for the next one, instead of what was kept before; a prompt that was read goes to files."""
        with self.lock:
            self._busy.discard(sequence)
            before, self._kept = self._kept, sequence
            self._write_end()
        if before:
            before.close()


def common(tokens: Ids[int], ids: Ids[int]) -> int:
    """How many of the first ids are the same, not counting the last of `ids`."""
    same = 0
    for ours, theirs in zip(tokens, ids[:-1], strict=False):
        if ours != theirs:
            break
        same += 1
    return same
