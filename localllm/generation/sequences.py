"""Sequences for generations, and what the last one has read, for the next one that begins alike.

A model reads every conversation from its beginning. What a sequence holds of it already, the longest common beginning
of the tokens, is not computed again, so a new turn costs its own tokens only.
"""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from localllm.generation.overflow import Rolling, rolling

if TYPE_CHECKING:
    from localllm.engine.model import Engine
    from localllm.engine.sequence import Sequence


class Sequences:
    """The sequences of one engine. Several generations may go on at the same time, each with its own.

    Attributes:
        engine: theirs.  context: the most tokens of one.  vocab_size: length of a row of logits.
    """

    def __init__(self, engine: "Engine"):
        self.engine, self.context, self.vocab_size = engine, engine.context, engine.vocab_size
        self._kept: Sequence | Rolling | None = None  # nobody's, for the next one
        self._busy: WeakSet[Sequence | Rolling] = WeakSet()
        self._lock = threading.Lock()

    @contextmanager
    def beginning_with(self, ids: Ids[int], keep: int | None = None) -> Iterator["Sequence | Rolling"]:
        """A sequence that holds what has been read of `ids`, never the last one, whose logits are wanted.

        keep: how many of its first tokens stay when it is full; None: it cannot hold more than the context.
        """
        sequence = self._take(ids, keep)
        try:
            yield sequence
        finally:
            self._give_back(sequence)

    def _take(self, ids: Ids[int], keep: int | None) -> "Sequence | Rolling":
        """The kept sequence, or a fork of one in use if that holds more."""
        with self._lock:
            kept, self._kept = self._kept, None
            known = max(self._busy, key=lambda sequence: common(sequence.tokens, ids), default=None)
            if known and common(known.tokens, ids) > (common(kept.tokens, ids) if kept else 0):
                if kept:
                    kept.close()
                kept = known.fork()
            sequence = rolling(kept or self.engine.sequence(), keep)
            sequence.truncate(common(sequence.tokens, ids))
            self._busy.add(sequence)
            return sequence

    def _give_back(self, sequence: "Sequence | Rolling") -> None:
        """Keep it for the next one, instead of what was kept before."""
        with self._lock:
            self._busy.discard(sequence)
            before, self._kept = self._kept, sequence
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
