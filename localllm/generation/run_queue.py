"""Join the steps of concurrent schedulers into common runs of the model.

If threads that generate at the same time took turns at the engine, each would read all weights for its own token.
Instead, each scheduler submits its step, and the first that finds the engine idle runs all submitted steps (flat
combining, Hendler et al. 2010), so that no thread is needed besides the callers'. A run waits for schedulers that have
just received logits, because they soon submit their next token. A scheduler submits an answer's next token before it
yields the text, so that a slow consumer delays no other answer. A scheduler that is alone runs its steps at once.
"""

import threading
from collections.abc import Sequence as Ids
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.engine.forks import create_lock
from localllm.engine.image_tokens import has_images
from localllm.engine.runs import PRECISE_TOKENS
from localllm.generation.context_overflow import ShiftedSequence

if TYPE_CHECKING:
    import numpy as np

    from localllm.engine.sequence import Sequence

    Spans = Ids[tuple["Sequence | ShiftedSequence", list[int]]]  # sequences, and the tokens to append to each

PATIENCE = 0.2  # maximum seconds that a run waits for another thread's next step; sampling takes 0.001


class QueuedStep:
    """One step of a scheduler: tokens to append to several sequences in one run, and the logits after them.

    Attributes:
        scheduler: its owner.  size: number of its tokens.
        kernel_tokens: token count of each span that selects its kernels, see localllm.engine.runs.
        rows: logits of each span, float32 [wanted, vocab]; None until it has run.  error: error of its run, or None.
        is_submitted: whether it was queued.  is_awaited: whether its scheduler waits for the result.
        tokens, seconds: number of tokens and duration of the run that it was part of.
    """

    rows: "list[np.ndarray] | None" = None
    error: Exception | None = None
    is_submitted = is_awaited = False
    tokens, seconds = 0, 0.0

    def __init__(
        self, scheduler: object, spans: "Spans", logits: str, precise: bool = True, kernel_tokens: Ids[int] = ()
    ):
        self.scheduler, self.spans, self.logits, self.precise = scheduler, spans, logits, precise
        self.kernel_tokens = [*kernel_tokens] or [0] * len(spans)
        self.size, self._lengths = 0, list[int]()
        for sequence, ids in spans:
            self.size += len(ids)
            self._lengths.append(len(sequence.tokens))

    @property
    def is_done(self) -> bool:
        """Return whether it has run or failed."""
        return self.rows is not None or self.error is not None

    @property
    def wants_more(self) -> bool:
        """Return whether a span has more than one token."""
        return self.size > len(self.spans)

    @cached_property
    def kernel_class(self) -> int | None:
        """The set of kernels that its tokens select; None if it cannot share a run."""
        if self.logits == "none" or not self.precise or self.size > PRECISE_TOKENS:
            return None
        if any(isinstance(sequence, ShiftedSequence) or has_images(ids) for sequence, ids in self.spans):
            return None
        selected = [count or len(ids) for count, (_, ids) in zip(self.kernel_tokens, self.spans, strict=True)]
        return self.spans[0][0].engine.runs.find_kernel_class(max(selected))

    def can_join(self, steps: "list[QueuedStep]") -> bool:
        """Return whether it can share a run with other steps.

        All must have 16-bit activations and the same kernels, and ask for the same logits.
        """
        room = PRECISE_TOKENS - sum(step.size for step in steps)
        kinds = {step.logits for step in (*steps, self) if step.wants_more}
        return (
            self.kernel_class is not None
            and self.kernel_class == steps[0].kernel_class
            and self.size <= room
            and len(kinds) <= 1
        )

    def run(self) -> "list[np.ndarray]":
        """Run the step alone; return the logits of each span, float32 [wanted, vocab].

        If it fails, restores its sequences and raises the error of Sequence.append.
        """
        began, (sequence, ids) = perf_counter(), self.spans[0]
        try:
            if isinstance(sequence, ShiftedSequence):
                rows = [sequence.append(ids, self.logits, kernel_tokens=self.kernel_tokens[0])]
            else:
                rows = sequence.engine.run(self.spans, self.logits, self.precise, self.kernel_tokens)  # type: ignore[arg-type]
            self.rows, self.tokens, self.seconds = rows, self.size, perf_counter() - began
        except BaseException:
            self.restore_sequences()
            raise
        return rows

    def restore_sequences(self) -> None:
        """Drop the results, and truncate the sequences to their lengths before the step."""
        self.rows = None
        for (sequence, _), length in zip(self.spans, self._lengths, strict=True):
            if len(sequence.tokens) > length:
                sequence.truncate(length)


class RunQueue:
    """The steps that the schedulers of an engine have submitted."""

    def __init__(self) -> None:
        self.lock = create_lock(self)
        self._condition = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._schedulers = set[object]()  # those that have run a step and have not left
        self._queue, self._running = list[QueuedStep](), list[QueuedStep]()
        self._due = set[object]()  # schedulers that have their logits, and will soon submit the next step
        self._latest, self._waiting = list[object](), 0

    def register(self, scheduler: object) -> bool:
        """Register a scheduler that will run steps; return whether other schedulers are registered."""
        self._schedulers.add(scheduler)
        if len(self._schedulers) == 1:
            self._due.discard(scheduler)  # there is nobody who would wait for it
        return len(self._schedulers) > 1

    def run(self, step: QueuedStep) -> "list[np.ndarray]":
        """Run a step together with others, or wait until another thread has run it; return its logits.

        The logits are those of QueuedStep.run. Raises the error of the step.
        """
        if not step.is_submitted:
            self.submit(step)
        while not step.is_done:
            batch = list[QueuedStep]()
            try:
                with self.lock:
                    step.is_awaited = True
                    while not step.is_done and (self._running or self._due):
                        if not self._wait() and not self._running:
                            self._due.clear()
                    if not step.is_done:
                        batch = self._running = self._take_batch()
                self._run_batch(batch)
            finally:
                with self.lock:
                    step.is_awaited = step.is_done
                    if batch:
                        self._finish_batch(batch)
        step.is_awaited = False
        if step.error:
            raise step.error
        assert step.rows is not None
        return step.rows

    def submit(self, step: QueuedStep) -> None:
        """Queue a step for the next run. Raises LocalllmError in a forked process."""
        self.register(step.scheduler)
        with self.lock:
            self._due.discard(step.scheduler)
            step.is_submitted = True
            self._queue.append(step)
            self._notify()

    def count_others(self, scheduler: object) -> int:
        """Return how many other schedulers took part in the latest run or wait for the next."""
        if self._schedulers <= {scheduler} or (not self._queue and self._latest == [scheduler]):
            return 0
        active = {*self._latest, *(step.scheduler for step in [*self._queue])}
        return len((active & self._schedulers) - {scheduler})

    def stop_waiting(self, scheduler: object) -> None:
        """Let runs start without waiting for the next step of a scheduler."""
        if scheduler in self._due:
            with self.lock:
                self._due.discard(scheduler)
                self._notify()

    def unregister(self, scheduler: object) -> None:
        """Unregister a scheduler and its submitted step.

        Takes no lock between two tokens, so finalizers may call it.
        """
        self._schedulers.discard(scheduler)
        self.stop_waiting(scheduler)

    def withdraw(self, sequence: "Sequence | ShiftedSequence") -> None:
        """Remove the steps of a sequence from the queue; wait for a run that uses the sequence."""
        with self.lock:
            self._queue = [step for step in self._queue if all(each is not sequence for each, _ in step.spans)]
            while any(each is sequence for step in self._running for each, _ in step.spans):
                self._wait()

    def _take_batch(self) -> list[QueuedStep]:
        """Remove the steps of the next run from the queue: the first step, and all that can share its run."""
        queue = [step for step in self._queue if step.scheduler in self._schedulers]
        batch = queue[:1]
        for step in queue[1:]:
            if step.can_join(batch):
                batch.append(step)
        self._queue = [step for step in queue if step not in batch]
        return batch

    def _finish_batch(self, batch: list[QueuedStep]) -> None:
        """Wake the threads that wait for these steps; queue interrupted steps again."""
        is_shared = len(batch) > 1 or bool(self._queue)
        for step in batch:
            if step.is_done and step.is_awaited:
                if is_shared:  # a single scheduler need not be waited for
                    self._due.add(step.scheduler)
            elif not step.is_done:
                step.restore_sequences()
        self._queue[:0] = [step for step in batch if not step.is_done]
        self._latest, self._running = [step.scheduler for step in batch], []
        self._notify()

    def _wait(self) -> bool:
        """Wait for a notification; return False after PATIENCE. The caller holds the lock."""
        self._waiting += 1
        try:
            return self._condition.wait(PATIENCE)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        """Wake waiting threads, if any. The caller holds the lock.

        The check for waiting threads saves 1 microsecond.
        """
        if self._waiting:
            self._condition.notify_all()

    def _run_batch(self, batch: list[QueuedStep]) -> None:
        """Run steps together, or each alone if that fails, and record their results or errors."""
        if len(batch) > 1:
            began, size = perf_counter(), sum(step.size for step in batch)
            spans = [span for step in batch for span in step.spans]
            kernel_tokens = [count for step in batch for count in step.kernel_tokens]
            logits = next((step.logits for step in batch if step.wants_more), batch[0].logits)
            try:
                rows = spans[0][0].engine.run(spans, logits, True, kernel_tokens)  # type: ignore[arg-type]
            except Exception:
                for step in batch:
                    step.restore_sequences()
                    self._run_batch([step])
                return
            for step in batch:
                step.tokens, step.seconds = size, perf_counter() - began
                step.rows, rows = rows[: len(step.spans)], rows[len(step.spans) :]
        elif batch:
            try:
                batch[0].run()
            except Exception as error:
                batch[0].error = error
