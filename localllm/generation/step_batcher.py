"""Join the steps of concurrent callers into common runs of the model.

If threads that generate at the same time took turns at the engine, each would read all weights for its own token.
Instead, each caller submits its step, and the first that finds the engine idle runs all submitted steps (flat
combining, Hendler et al. 2010), so that a single caller needs no other thread. A run waits for callers that have just
got logits, because they soon submit their next token. A scheduler submits an answer's next token before it yields the
text, so that a slow consumer delays no other answer.
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

    Spans = Ids[tuple["Sequence | ShiftedSequence", list[int]]]  # sequences, and the tokens to append to each

PATIENCE = 0.2  # most seconds that a run waits for another thread's next step; sampling takes 0.001


class Step:
    """Spans that a caller submits for one run, and the results.

    Attributes:
        rows: logits of each span, float32 [wanted, vocab]; None until it has run.  error: error of its run.
        is_alone: whether it cannot share a run.  wants_more: whether a span has more than one token.
        kernel_tokens: of each span, see localllm.engine.run.  kernels: the class of kernels that they select.
        is_awaited: whether its caller waits for the result.
        size: its number of tokens.  tokens, seconds: number of tokens and duration of the run that it was part of.
    """

    rows: "list[np.ndarray] | None" = None
    error: Exception | None = None
    is_awaited = False
    tokens, seconds = 0, 0.0

    def __init__(self, member: "BatchMember", spans: "Spans", logits: str, precise: bool, kernel_tokens: Ids[int] = ()):
        self.member, self.spans, self.logits, self.precise = member, spans, logits, precise
        self.kernel_tokens = [*kernel_tokens] or [0] * len(spans)
        self.size = sum([len(ids) for _, ids in spans])
        self.wants_more = self.size > len(spans)
        self.is_alone = logits == "none" or not precise or self.size > PRECISE_TOKENS
        for sequence, ids in spans:
            self.is_alone = self.is_alone or isinstance(sequence, ShiftedSequence) or has_images(ids)
        selected = [count or len(ids) for count, (_, ids) in zip(self.kernel_tokens, spans, strict=True)]
        self.kernels = spans[0][0].engine.runs.kernel_class(max(selected)) if spans and not self.is_alone else 0
        self._lengths = [len(sequence.tokens) for sequence, _ in spans]

    @property
    def is_done(self) -> bool:
        return self.rows is not None or self.error is not None

    def joins(self, steps: "list[Step]") -> bool:
        """Return whether it can share a run with these steps: 16-bit activations, the same kernels, alike logits."""
        room = PRECISE_TOKENS - sum(step.size for step in steps)
        kinds = {step.logits for step in (*steps, self) if step.wants_more}
        is_alike = not self.is_alone and not steps[0].is_alone and self.kernels == steps[0].kernels
        return is_alike and self.size <= room and len(kinds) <= 1

    def undo(self) -> None:
        """Truncate its sequences to their lengths before a failed run."""
        for (sequence, _), length in zip(self.spans, self._lengths, strict=True):
            if len(sequence.tokens) > length:
                sequence.truncate(length)


class BatchMember:
    """A caller, which submits one step at a time and calls `leave` in the end.

    Attributes:
        step: the step that was submitted, or None.  tokens, seconds: number of tokens and duration of the latest run.
    """

    step: Step | None
    tokens, seconds = 0, 0.0

    def __init__(self, batcher: "StepBatcher"):
        self._batcher, self.step, self.has_left = batcher, None, False

    @property
    def others(self) -> int:
        """The number of other callers that took part in the latest run or wait for the next."""
        return self._batcher.count_others(self)

    def submit(self, spans: "Spans", logits: str = "last", precise: bool = True, kernel_tokens: Ids[int] = ()) -> None:
        """Submit a step. Raises LocalllmError in a process that was forked."""
        self.step = Step(self, spans, logits, precise, kernel_tokens)
        self._batcher.submit(self.step)

    def result(self) -> "list[np.ndarray]":
        """Wait for the submitted step, and return the logits of each span, float32 [wanted, vocab].

        Raises the errors of Sequence.append.
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
        """Submit a step and return its logits: see `submit` and `result`."""
        self.submit(spans, logits, precise)
        return self.result()

    def settle(self) -> None:
        """Tell other callers not to wait for this one's next step."""
        self._batcher.settle(self)

    def leave(self) -> None:
        """Leave the batch; drop a submitted step. Takes no lock between two tokens: finalizers may call it."""
        self.has_left, self.step = True, None
        self.settle()


class StepBatcher:
    """Joins the steps of an engine's concurrent callers into common runs."""

    def __init__(self) -> None:
        self.lock = lock_for(self)
        self._condition = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._queue, self._running = list[Step](), list[Step]()
        self._due = set[BatchMember]()  # have their logits, and will soon submit the next step
        self._latest, self._waiting = list[BatchMember](), 0

    def count_others(self, member: BatchMember) -> int:
        """Return the number of other callers that took part in the latest run or wait for the next."""
        if not self._queue and self._latest == [member]:
            return 0
        members = {*self._latest, *(step.member for step in [*self._queue])}
        return sum(other is not member and not other.has_left for other in members)

    def submit(self, step: Step) -> None:
        """Queue a step for the next run."""
        with self.lock:
            self._due.discard(step.member)
            self._queue.append(step)
            self._notify()

    def settle(self, member: BatchMember) -> None:
        """Stop waiting for the next step of a caller."""
        if member in self._due:
            with self.lock:
                self._due.discard(member)
                self._notify()

    def withdraw(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Remove the steps of a sequence from the queue; wait for a run that is using it."""
        with self.lock:
            self._queue = [step for step in self._queue if all(each is not sequence for each, _ in step.spans)]
            while any(each is sequence for step in self._running for each, _ in step.spans):
                self._wait()

    def complete(self, step: Step) -> None:
        """Wait until another thread has run a step, or run it together with the other submitted steps."""
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
        """Remove the steps of the next run from the queue: the first, and all that can share its run."""
        queue = [step for step in self._queue if not step.member.has_left]
        batch = queue[:1]
        for step in queue[1:]:
            if step.joins(batch):
                batch.append(step)
        self._queue = [step for step in queue if step not in batch]
        return batch

    def _end(self, batch: list[Step]) -> None:
        """Wake the callers of these steps; interrupted steps are queued again."""
        is_shared = len(batch) > 1 or bool(self._queue)
        for step in batch:
            if step.is_done and step.is_awaited:
                if is_shared:  # a single caller need not be waited for
                    self._due.add(step.member)
            elif not step.is_done:
                step.undo()
        self._queue[:0] = [step for step in batch if not step.is_done]
        self._latest, self._running = [step.member for step in batch], []
        self._notify()

    def _wait(self) -> bool:
        """Wait for a change; False after a timeout. The caller holds the lock."""
        self._waiting += 1
        try:
            return self._condition.wait(PATIENCE)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        """Wake waiting callers, which takes 1 microsecond even if there are none. The caller holds the lock."""
        if self._waiting:
            self._condition.notify_all()


def run(batch: list[Step]) -> None:
    """Execute steps in one run of the model; if it fails, run each step alone and record its error."""
    if not batch:
        return
    began, first, logits = perf_counter(), batch[0], batch[0].logits
    spans, kernel_tokens, (sequence, ids) = first.spans, first.kernel_tokens, first.spans[0]
    if len(batch) > 1:
        spans = [span for step in batch for span in step.spans]
        kernel_tokens = [count for step in batch for count in step.kernel_tokens]
        logits = next((step.logits for step in batch if step.wants_more), logits)
    try:
        if isinstance(sequence, ShiftedSequence):  # its step is always alone
            rows = [sequence.append(ids, logits, kernel_tokens=kernel_tokens[0])]
        else:
            rows = sequence.engine.run(spans, logits, first.precise, kernel_tokens)  # type: ignore[arg-type]
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for step in batch:
            step.undo()
            run([step])
        return
    tokens, seconds = sum(step.size for step in batch), perf_counter() - began
    for step in batch:
        step.tokens, step.seconds = tokens, seconds
        step.rows, rows = rows[: len(step.spans)], rows[len(step.spans) :]
