"""The sources of sequences for a scheduler's answers, and where prefilled tokens are kept."""

from collections import deque
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

import numpy as np

from localllm.engine.runs import LONG
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.request import Completion
from localllm.generation.sequence_pool import SequencePool
from localllm.generation.step_batcher import StepBatcher

if TYPE_CHECKING:
    from localllm.engine.memory.prefix_cache import PrefixCache
    from localllm.engine.sequence import Sequence
    from localllm.generation.speculation.ngram_cache import NgramCache

LIVE_KEPT = 16  # conversations whose memory waits for their next turn


class BatchSource:
    """The sequences of a batch: what an answer has read is kept for those that begin alike.

    As a Scheduler's source of sequences it serves many requests, whose prompts are read in pieces.

    Attributes:
        is_live: whether requests come while others are answered.  is_shared: whether there are several requests.
        written: what was written before, for guesses.  steps: by which runs are joined with those of others.
        kept: answers that have finished, the oldest first, whose sequences are nobody's.
    """

    is_shared = True

    def __init__(
        self, prefixes: "PrefixCache | None" = None, written: "NgramCache | None" = None, is_live: bool = True
    ):
        """Collect the sources.

        prefixes: the prefix cache on disk; nothing is added to it, since what is prefilled in a batch may be rounded
        differently.
        """
        self._prefixes, self.written, self.is_live = prefixes, written, is_live
        self.steps, self.kept = StepBatcher(), deque[Completion]()

    def take(self, answer: Completion, least: int) -> bool:
        """Give an answer that has not begun what files have of its prompt, if that is more than `least` tokens."""
        found = self._prefixes.find(answer.ids, least) if self._prefixes and not answer.has_begun else None
        if found:
            answer.sequence, answer.known = found
        return found is not None

    def was_read(self, sequence: "Sequence", begin: int, logits: np.ndarray) -> None:
        """Record that a prompt was prefilled: see SequencePool."""

    def give_back(self, answer: Completion) -> None:
        """Keep what an answer has read that says no more, instead of what it goes on from and of the oldest."""
        self._learn(answer)
        if self.written:
            self.written.collect()
        read = answer.sequence.tokens if answer.sequence else []
        for one in [*self.kept]:
            if one.sequence and one.sequence.tokens == read[: one.held]:
                self.kept.remove(one)
                one.close()
        self.kept.append(answer)
        while len(self.kept) > (LIVE_KEPT if self.is_live else 1):
            self.forget()

    def _learn(self, answer: Completion) -> None:
        """Keep what an answer has written for the guesses of later ones, and forget its own. Takes no lock."""
        answer.guesses = None
        if self.written and answer.options.speculate != "off":
            self.written.add(answer.ids, answer.cached_tokens, len(answer.prompt) > LONG)

    def touch(self, answer: Completion | None) -> None:
        """Mark a kept prefix as recently used."""
        if answer and answer in self.kept:
            self.kept.remove(answer)
            self.kept.append(answer)

    def forget(self) -> bool:
        """Close the oldest of what is kept; False if there is none."""
        if not self.kept:
            return False
        self.kept.popleft().close()
        return True

    def discard(self, answer: Completion) -> None:
        """Close the sequence of an answer that comes to nothing."""
        if answer not in self.kept:
            answer.close()

    def abandon(self, running: Ids[Completion]) -> None:
        """Release all sequences. Takes no lock."""
        for answer in (*running, *self.kept):
            answer.release()
        self.kept.clear()


class PoolSource(BatchSource):
    """A model's pool of sequences, for the answers to one request, whose prompt is read in whole runs.

    What is kept of them, the pool keeps.
    """

    is_shared = False

    def __init__(self, pool: SequencePool):
        super().__init__(None, pool.written, is_live=False)
        self._pool, self.steps = pool, pool.steps

    def take(self, answer: Completion, least: int) -> bool:
        if answer.has_begun:
            return False
        begun = self._pool.begin(answer.prompt, answer.kept, answer.request.task.earlier)
        answer.sequence, answer.known = begun  # type: ignore[assignment]
        if isinstance(begun.sequence, ShiftedSequence):
            begun.sequence.begin(answer.prompt)
        return True

    def was_read(self, sequence: "Sequence", begin: int, logits: np.ndarray) -> None:
        self._pool.was_read(sequence, begin, logits)

    def give_back(self, answer: Completion) -> None:
        """Have the sequence of an answer that says no more; those of forks are closed. Takes no lock."""
        sequence = answer.sequence
        if sequence is None:
            answer.guesses = None
            return
        if isinstance(sequence, ShiftedSequence):
            answer.dropped, answer.skipped = sequence.dropped, sequence.skipped
        self._learn(answer)
        if answer.number:
            sequence.release()
        else:
            self._pool.put_back(sequence)
        answer.sequence = None

    discard = give_back

    def abandon(self, running: Ids[Completion]) -> None:
        for answer in running:
            self.give_back(answer)
