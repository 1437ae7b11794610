"""Steps of concurrent callers, joined in one run of the model.

Threads that answer at the same time would take turns at the engine, and each would read all weights for its own token.
Here each hands in its step, and whoever finds nobody at the engine runs it for all that have (flat combining: Hendler
et al. 2010). So a lone caller hands its work to no other thread. Who has just got logits comes back at once with the
next token: the next run waits for them. An answer hands in its next step before its text leaves, so what its reader
does meanwhile delays no other.
"""

import threading
from collections.abc import Sequence as Ids
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.engine.forks import lock_for
from localllm.engine.image_tokens import has_images
from localllm.engine.run import PRECISE_TOKENS
from localllm.generation.context_overflow import ShiftedSequence

if TYPE_CHECKING:
    import numpy as np

    from localllm.engine.sequence import Sequence

PATIENCE = 0.2  # seconds that a run waits for a thread which should come back; sampling takes 0.001


class Step:
    """Tokens that a sequence is to read, then the logits behind the last or all of them, float32 [wanted, vocab].

    Attributes:
        is_alone: whether it has a run of its own.  is_awaited: whether a thread waits for it.
        tokens, seconds: of the run that it was part of.
    """

    rows: "np.ndarray | None" = None
    error: Exception | None = None
    is_awaited = False
    tokens, seconds = 0, 0.0

    def __init__(self, member: "BatchMember", sequence: "Sequence | ShiftedSequence", ids: list[int], logits: str):
        self.member, self.sequence, self.ids, self.logits = member, sequence, ids, logits
        is_large = len(ids) > PRECISE_TOKENS or logits == "none"
        self.is_alone = is_large or isinstance(sequence, ShiftedSequence) or has_images(ids)
        self._held = len(sequence.tokens)

    @property
    def is_done(self) -> bool:
        return self.rows is not None or self.error is not None

    def joins(self, others: "list[Step]") -> bool:
        """Whether it can be part of a run with these: in 16 bits, and with the same logits wanted."""
        room = PRECISE_TOKENS - sum(len(one.ids) for one in others)
        kinds = {one.logits for one in (*others, self) if len(one.ids) > 1}
        return not self.is_alone and not others[0].is_alone and len(self.ids) <= room and len(kinds) <= 1

    def go_back(self) -> None:
        """Undo what a run that failed has read of it."""
        if len(self.sequence.tokens) > self._held:
            self.sequence.truncate(self._held)


class BatchMember:
    """An answer in the making, of which one step at a time can be handed in.

    `leave` it in the end; it takes no lock where the garbage collector may call it, between two tokens.
    """

    def __init__(self, batcher: "StepBatcher"):
        self._batcher, self.step, self.has_left = batcher, None, False

    step: Step | None
    tokens, seconds = 0, 0.0  # of the latest run

    @property
    def others(self) -> int:
        """How many others have been part of the latest run, or wait for the next."""
        return self._batcher.count_others(self)

    def submit(self, sequence: "Sequence | ShiftedSequence", ids: Ids[int], logits: str = "last") -> None:
        """Hand in a step. Raises LocalllmError in a process that was forked."""
        self.step = Step(self, sequence, list(ids), logits)
        self._batcher.submit(self.step)

    def result(self) -> "np.ndarray":
        """Return the logits of the step that was handed in, float32 [wanted, vocab]. Raises as Sequence.append."""
        assert self.step
        step = self.step
        self._batcher.complete(step)
        self.step, self.tokens, self.seconds = None, step.tokens, step.seconds
        if step.error:
            raise step.error
        assert step.rows is not None
        return step.rows

    def read(self, sequence: "Sequence | ShiftedSequence", ids: Ids[int], logits: str) -> "np.ndarray":
        """Hand in a step and wait for it."""
        self.submit(sequence, ids, logits)
        return self.result()

    def settle(self) -> None:
        """Let others run the model before the next step comes."""
        self._batcher.settle(self)

    def leave(self) -> None:
        """Hand in nothing more; what was handed in is not wanted any more."""
        self.has_left, self.step = True, None
        self.settle()


class StepBatcher:
    """The steps of one engine's answers."""

    def __init__(self) -> None:
        self.lock = lock_for(self)
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._queue, self._running = list[Step](), list[Step]()
        self._due = set[BatchMember]()  # have their logits, and come back soon
        self._latest = list[BatchMember]()

    def count_others(self, member: BatchMember) -> int:
        """Return how many others have been part of the latest run, or wait for the next."""
        found = {*self._latest, *(step.member for step in [*self._queue])}
        return sum(one is not member and not one.has_left for one in found)

    def submit(self, step: Step) -> None:
        """Take a step for the next run."""
        with self.lock:
            self._due.discard(step.member)
            self._queue.append(step)
            self._changed.notify_all()

    def settle(self, member: BatchMember) -> None:
        """Wait for this one no longer."""
        if member in self._due:
            with self.lock:
                self._due.discard(member)
                self._changed.notify_all()

    def withdraw(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Forget what a sequence was to read; wait if it is being read."""
        with self.lock:
            self._queue = [step for step in self._queue if step.sequence is not sequence]
            while any(step.sequence is sequence for step in self._running):
                self._changed.wait(PATIENCE)

    def complete(self, step: Step) -> None:
        """Wait until others have made a step, or make it together with what they have handed in."""
        while not step.is_done:
            batch = list[Step]()
            try:
                with self.lock:
                    step.is_awaited = True
                    while not step.is_done and (self._running or self._due):
                        if not self._changed.wait(PATIENCE) and not self._running:
                            self._due.clear()
                    if not step.is_done:
                        batch = self._running = self._take()
                run(batch)
            finally:
                with self.lock:
                    step.is_awaited = step.is_done
                    if batch:
                        self._end(batch)
        step.is_awaited = False

    def _take(self) -> list[Step]:
        """Remove the steps of the next run from the queue: the first, and what can be part of the same run."""
        queue = [step for step in self._queue if not step.member.has_left]
        batch = queue[:1]
        for step in queue[1:]:
            if step.joins(batch):
                batch.append(step)
        self._queue = [step for step in queue if step not in batch]
        return batch

    def _end(self, batch: list[Step]) -> None:
        """Wake who waits for these steps; those that were interrupted are to be made again."""
        for step in batch:
            if step.is_done and step.is_awaited:
                self._due.add(step.member)
            elif not step.is_done:
                step.go_back()
        self._queue[:0] = [step for step in batch if not step.is_done]
        self._latest, self._running = [step.member for step in batch], []
        self._changed.notify_all()


def run(batch: list[Step]) -> None:
    """Make some steps in one run of the model; if that fails, each in its own, and those that fail know why."""
    began = perf_counter()
    try:
        if len(batch) == 1:
            rows = [step.sequence.append(step.ids, step.logits) for step in batch]
        elif batch:
            logits = next((step.logits for step in batch if len(step.ids) > 1), "last")
            work = [(step.sequence, step.ids) for step in batch]
            rows = batch[0].sequence.engine.run(work, logits, True)  # type: ignore[arg-type]
        else:
            return
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for step in batch:
            step.go_back()
            run([step])
        return
    tokens, seconds = sum(len(step.ids) for step in batch), perf_counter() - began
    for step, row in zip(batch, rows, strict=True):
        step.tokens, step.seconds, step.rows = tokens, seconds, row
