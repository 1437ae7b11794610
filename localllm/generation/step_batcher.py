"""Runs of concurrent callers, joined in one run of the model.

Threads that answer at the same time would take turns at the engine, and each would read all weights for its own token.
Each caller submits its step, and the first to find the engine idle runs all submitted steps (flat combining:
Hendler et al. 2010). So a lone caller hands its work to no other thread. A caller that just got logits returns soon
with its next token: the next run waits for them. An answer hands in its next token before its text leaves, so what its
reader does meanwhile delays no other.
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

    Spans = Ids[tuple["Sequence | ShiftedSequence", list[int]]]  # what sequences are to read

PATIENCE = 0.2  # seconds that a run waits for a thread which should come back; sampling takes 0.001


class Step:
    """Spans that a caller submits for one run, and the logits: of each float32 [wanted, vocab].

    Attributes:
        is_alone: whether it has a run of its own.  wants_more: whether a span's last logits are not all of its logits.
        is_awaited: whether a thread waits for it.
        size: of its tokens.  tokens, seconds: of the run that it was part of.
    """

    rows: "list[np.ndarray] | None" = None
    error: Exception | None = None
    is_awaited = False
    tokens, seconds = 0, 0.0

    def __init__(self, member: "BatchMember", spans: "Spans", logits: str, precise: bool):
        self.member, self.spans, self.logits, self.precise = member, spans, logits, precise
        self.size = sum([len(ids) for _, ids in spans])
        self.wants_more = self.size > len(spans)
        self.is_alone = logits == "none" or not precise or self.size > PRECISE_TOKENS
        for sequence, ids in spans:
            self.is_alone = self.is_alone or isinstance(sequence, ShiftedSequence) or has_images(ids)
        self._held = [len(sequence.tokens) for sequence, _ in spans]

    @property
    def is_done(self) -> bool:
        return self.rows is not None or self.error is not None

    def joins(self, others: "list[Step]") -> bool:
        """Return whether it can be part of a run with these: in 16 bits, and with the same logits wanted."""
        room = PRECISE_TOKENS - sum(one.size for one in others)
        kinds = {one.logits for one in (*others, self) if one.wants_more}
        return not self.is_alone and not others[0].is_alone and self.size <= room and len(kinds) <= 1

    def go_back(self) -> None:
        """Undo what a run that failed has read of it."""
        for (sequence, _), held in zip(self.spans, self._held, strict=True):
            if len(sequence.tokens) > held:
                sequence.truncate(held)


class BatchMember:
    """A caller, which submits one step at a time.

    `leave` it in the end; it takes no lock where the garbage collector may call it, between two tokens.

    Attributes:
        step: that was handed in.  tokens, seconds: of the latest run.
    """

    step: Step | None
    tokens, seconds = 0, 0.0

    def __init__(self, batcher: "StepBatcher"):
        self._batcher, self.step, self.has_left = batcher, None, False

    @property
    def others(self) -> int:
        """Return how many others have been part of the latest run, or wait for the next."""
        return self._batcher.count_others(self)

    def submit(self, spans: "Spans", logits: str = "last", precise: bool = True) -> None:
        """Hand in a step. Raises LocalllmError in a process that was forked."""
        self.step = Step(self, spans, logits, precise)
        self._batcher.submit(self.step)

    def result(self) -> "list[np.ndarray]":
        """Return the logits of the step that was handed in, of each span float32 [wanted, vocab].

        Raises as Sequence.append.
        """
        assert self.step
        step = self.step
        self._batcher.complete(step)
        self.step, self.tokens, self.seconds = None, step.tokens, step.seconds
        if step.error:
            raise step.error
        assert step.rows is not None
        return step.rows

    def read(self, spans: "Spans", logits: str, precise: bool = True) -> "list[np.ndarray]":
        """Hand in a step and wait for it."""
        self.submit(spans, logits, precise)
        return self.result()

    def settle(self) -> None:
        """Let others run the model before the next step."""
        self._batcher.settle(self)

    def leave(self) -> None:
        """Submit no more steps; what was handed in is not wanted any more."""
        self.has_left, self.step = True, None
        self.settle()


class StepBatcher:
    """Joins the steps of an engine's concurrent callers into common runs."""

    def __init__(self) -> None:
        self.lock = lock_for(self)
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._queue, self._running = list[Step](), list[Step]()
        self._due = set[BatchMember]()  # have their logits, and come back soon
        self._latest, self._waiting = list[BatchMember](), 0

    def count_others(self, member: BatchMember) -> int:
        """Return how many others have been part of the latest run, or wait for the next."""
        if not self._queue and self._latest == [member]:
            return 0
        found = {*self._latest, *(step.member for step in [*self._queue])}
        return sum(one is not member and not one.has_left for one in found)

    def submit(self, step: Step) -> None:
        """Take a step for the next run."""
        with self.lock:
            self._due.discard(step.member)
            self._queue.append(step)
            self._notify()

    def settle(self, member: BatchMember) -> None:
        """Wait for this one no longer."""
        if member in self._due:
            with self.lock:
                self._due.discard(member)
                self._notify()

    def withdraw(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Forget what a sequence was to read; wait if it is being read."""
        with self.lock:
            self._queue = [step for step in self._queue if all(one is not sequence for one, _ in step.spans)]
            while any(one is sequence for step in self._running for one, _ in step.spans):
                self._wait()

    def complete(self, step: Step) -> None:
        """Wait until another thread has run a step, or run it together with the steps that others have handed in."""
        while not step.is_done:
            batch = list[Step]()
            try:
                with self.lock:
                    step.is_awaited = True
                    while not step.is_done and (self._running or self._due):
                        if not self._wait() and not self._running:
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
        """Wake the callers of these steps; those that were interrupted are to be made again."""
        is_shared = len(batch) > 1 or bool(self._queue)
        for step in batch:
            if step.is_done and step.is_awaited:
                if is_shared:  # else nobody waits, and whoever comes next need not
                    self._due.add(step.member)
            elif not step.is_done:
                step.go_back()
        self._queue[:0] = [step for step in batch if not step.is_done]
        self._latest, self._running = [step.member for step in batch], []
        self._notify()

    def _wait(self) -> bool:
        """Wait for a change; False after a timeout. The caller holds the lock."""
        self._waiting += 1
        try:
            return self._changed.wait(PATIENCE)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        """Wake waiting callers, which takes 1 microsecond even if there are none. The caller holds the lock."""
        if self._waiting:
            self._changed.notify_all()


def run(batch: list[Step]) -> None:
    """Make some steps in one run of the model; if it fails, make each alone, and record the errors."""
    if not batch:
        return
    began, first, logits = perf_counter(), batch[0], batch[0].logits
    spans, (sequence, ids) = first.spans, first.spans[0]
    if len(batch) > 1:
        spans = [span for step in batch for span in step.spans]
        logits = next((step.logits for step in batch if step.wants_more), logits)
    try:
        if isinstance(sequence, ShiftedSequence):  # which is alone
            rows = [sequence.append(ids, logits)]
        else:
            rows = sequence.engine.run(spans, logits, first.precise)  # type: ignore[arg-type]
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for step in batch:
            step.go_back()
            run([step])
        return
    tokens, seconds = sum(step.size for step in batch), perf_counter() - began
    for step in batch:
        step.tokens, step.seconds = tokens, seconds
        step.rows, rows = rows[: len(step.spans)], rows[len(step.spans) :]
