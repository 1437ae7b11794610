"""The thread that runs one model: a live batch, which requests join and leave between steps."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod

import numpy as np

from localllm.errors import ConstraintError, LocalllmError, MemoryLimitError, UsageError
from localllm.generation.logprobs import LikelyToken, compute_token_logprobs
from localllm.generation.reasoning import ANSWER, TextPart
from localllm.generation.request import Completion, Request
from localllm.server.metrics import Metrics

if TYPE_CHECKING:
    from localllm.api import Model

STOPPING = "the server is stopping; try again after its restart"
MAX_WAITING = 256  # maximum length of the request queue
_SHOWN = 300  # maximum characters of an answer in an error message


class StoppedError(LocalllmError):
    """The server is shutting down, or its queue is full."""


class PromptProgress(NamedTuple):
    """The progress of a prompt's prefill, as llama-server reports it.

    Attributes:
        total: tokens of the prompt.  cache: how many of them are from the prefix cache.
        processed: tokens done, with those of the cache.  time_ms: milliseconds since prefill began.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


class TokenEvent(NamedTuple):
    """A generated token, or progress before the first one.

    Attributes:
        number: index of the choice.  parts: text that became complete with this token.
        logprob: log probability of the token, if requested and if it is part of the response's text.
        finish_reason: "stop" or "length" for the last token, else "".
        progress: of the prompt, if requested; all else is empty then.
    """

    number: int
    parts: tuple[TextPart, ...]
    logprob: LikelyToken | None
    finish_reason: str
    progress: PromptProgress | None = None


class Subscriber:
    """The client of one request, in an event loop.

    Attributes:
        request: the request.  begin: time of its arrival, by the event loop's clock.
        progress: the latest of its prompt, None before prefill.
    """

    def __init__(
        self,
        request: Request,
        top_logprobs: int | None,
        cancel: Callable[["Subscriber"], None],
        wants_progress: bool = False,
    ):
        """Subscribe to a request.

        top_logprobs: alternatives to report for each token; None: no log probabilities.  wants_progress: whether
        progress of the prompt is published.
        """
        self.request, self.top_logprobs, self._cancel = request, top_logprobs, cancel
        self.loop = asyncio.get_running_loop()
        self.begin = self.loop.time()
        self._events: asyncio.Queue[TokenEvent | LocalllmError | None] = asyncio.Queue()
        self.progress: PromptProgress | None = None
        self._wants_progress, self._prefill_start = wants_progress, 0.0
        report = WeakMethod(self._report_progress)  # the request must not own its subscriber, which owns it

        def report_progress(done: int, total: int) -> None:
            if method := report():
                method(done, total)

        options = replace(request.task.options, on_progress=report_progress)
        request.task = replace(request.task, options=options)

    def _report_progress(self, done: int, total: int) -> None:
        """Record, in the worker's thread, how many tokens of the prompt are read, besides cached ones."""
        self._prefill_start = self._prefill_start or monotonic()
        cached, milliseconds = self.request.cached, round(1000 * (monotonic() - self._prefill_start))
        self.progress = PromptProgress(total + cached, cached, done + cached, milliseconds)
        if self._wants_progress:
            deliver([(self, TokenEvent(0, (), None, "", self.progress))])

    def publish(self, event: TokenEvent | LocalllmError | None) -> None:
        """Add an event (call this in the event loop); None: all completions have ended."""
        self._events.put_nowait(event)

    async def stream_events(self) -> AsyncIterator[TokenEvent]:
        """Yield events until all completions have ended; leaving early cancels them. Raises LocalllmError."""
        is_done = False
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, LocalllmError):
                    is_done = True
                    raise event
                yield event
            is_done = True
        finally:
            if not is_done:
                self._cancel(self)


class Worker:
    """A thread that runs one model's requests as a batch. All methods are thread-safe.

    Attributes:
        model: the model it runs.
    """

    def __init__(self, model: "Model", metrics: Metrics, parallel: int | None, memory: int | None):
        """Open a live batch and start the thread. parallel, memory: passed to Model.batch."""
        self.model, self._metrics, self._max_waiting = model, metrics, MAX_WAITING
        self._open_batch = partial(model.batch, self, parallel, live=True, memory=memory)
        self._queue = deque[Subscriber]()  # not yet taken by the batch
        self._cancelled = deque[Subscriber]()  # clients disconnected
        self._subscribers = dict[int, Subscriber]()  # by id(request)
        self._condition, self._closing = threading.Condition(), False
        self._events = list[tuple[Subscriber, TokenEvent | LocalllmError | None]]()
        self._token_times = dict[int, float]()  # of the latest token, by id(completion)
        self._batch = self._open_batch()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Worker":
        return self

    def __next__(self) -> Request:
        """Return the next queued request for the batch. Raises StopIteration while the queue is empty."""
        with self._condition:
            if not self._queue:
                raise StopIteration
            return self._queue.popleft().request

    def submit(self, subscriber: Subscriber) -> None:
        """Queue a request. Raises StoppedError if the queue is full."""
        request = subscriber.request
        with self._condition:
            if self._closing:
                raise StoppedError(STOPPING)
            if len(self._queue) >= self._max_waiting:
                raise StoppedError(f"the request queue is full ({self._max_waiting}); try again later")
            request.listener = partial(self._on_token, subscriber)
            self._subscribers[id(request)] = subscriber
            self._queue.append(subscriber)
            self._condition.notify()

    def cancel(self, subscriber: Subscriber) -> None:
        """Cancel a request; a running one ends with the current step."""
        with self._condition:
            if subscriber in self._queue:
                self._queue.remove(subscriber)
                del self._subscribers[id(subscriber.request)]
            elif id(subscriber.request) in self._subscribers:
                self._cancelled.append(subscriber)

    @property
    def waiting(self) -> int:
        """Count of requests without a sequence."""
        return len(self._queue) + len(self._batch.waiting)

    @property
    def running(self) -> int:
        return len(self._batch.running)

    def stop(self) -> None:
        """Fail all requests with StoppedError at once; the thread ends after the current step."""
        with self._condition:
            self._closing = True
            subscribers, self._subscribers = [*self._subscribers.values()], {}
            self._condition.notify()
        deliver([(subscriber, StoppedError(STOPPING)) for subscriber in subscribers])

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self._batch.close()

    # ---- in the thread ----

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                for finished in self._batch:
                    self._finish_step(finished)
                    if self._closing:
                        break
            except Exception as error:  # report it to all clients and continue serving
                self._fail(error)
        self._fail(StoppedError(STOPPING))

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._closing)
            return not self._closing

    def _on_token(
        self, subscriber: Subscriber, completion: Completion, token: int | None, parts: list[TextPart], row: np.ndarray
    ) -> None:
        """Record a completion's new token, with its log probability if requested."""
        logprob = None
        if subscriber.top_logprobs is not None and token is not None and completion.guide.transcript.kind == ANSWER:
            logprob = compute_token_logprobs(row, token, subscriber.top_logprobs)
        self._events.append(
            (subscriber, TokenEvent(completion.number, tuple(parts), logprob, completion.finish_reason))
        )
        time = monotonic()
        previous = self._token_times.get(id(completion))
        self._token_times[id(completion)] = time
        if previous is None:
            self._metrics.first_token.add(subscriber.loop.time() - subscriber.begin)
        else:
            self._metrics.between_tokens.add(time - previous)
        if completion.finish_reason:
            del self._token_times[id(completion)]

    def _finish_step(self, finished: list[Request]) -> None:
        for request in finished:
            if subscriber := self._subscribers.pop(id(request), None):
                self._events.append((subscriber, request.error and add_partial_text(request.error, request)))
                self._metrics.record_finished(request)
                request.listener = None  # breaks the cycle request - listener - subscriber
        with self._condition:
            cancelled, self._cancelled = self._cancelled, deque()
        for subscriber in cancelled:
            if self._subscribers.pop(id(subscriber.request), None):
                self._batch.cancel(subscriber.request)
                self._metrics.record_cancelled(subscriber.request)
                subscriber.request.listener = None
                for completion in subscriber.request.answers:
                    self._token_times.pop(id(completion), None)
        self._deliver()

    def _deliver(self) -> None:
        events, self._events = self._events, []
        deliver(events)

    def _fail(self, error: Exception) -> None:
        reported = error if isinstance(error, LocalllmError) else hide_details(error)
        with self._condition:
            subscribers, self._subscribers = [*self._subscribers.values()], {}
            self._queue.clear()
            self._cancelled.clear()
        self._events += [(subscriber, reported) for subscriber in subscribers]
        self._token_times.clear()
        self._deliver()
        self._batch.close()
        if not self._closing:
            self._batch = self._open_batch()


def add_partial_text(error: LocalllmError, request: Request) -> LocalllmError:
    """Add the text generated so far to an error of a constraint that could not be satisfied."""
    if not isinstance(error, UsageError | ConstraintError):
        return error
    text = next((answer.text for answer in request.answers if answer.text), "")
    if not text:
        return error
    return type(error)(f"{error}; written so far: {text[-_SHOWN:]!r}")


def deliver(events: list[tuple[Subscriber, TokenEvent | LocalllmError | None]]) -> None:
    """Publish events to subscribers, with one call per event loop (usually there is one)."""
    by_loop = dict[int, list[tuple[Subscriber, TokenEvent | LocalllmError | None]]]()
    for each in events:
        by_loop.setdefault(id(each[0].loop), []).append(each)
    for some in by_loop.values():
        try:
            some[0][0].loop.call_soon_threadsafe(publish_all, some)
        except RuntimeError:  # the loop is closed
            continue


def publish_all(events: list[tuple[Subscriber, TokenEvent | LocalllmError | None]]) -> None:
    for subscriber, each in events:
        subscriber.publish(each)


def hide_details(error: Exception) -> LocalllmError:
    """Convert an unexpected error to one that tells clients only its type."""
    if isinstance(error, MemoryError):
        return MemoryLimitError("not enough memory")
    return LocalllmError(f"internal error: {type(error).__name__}")
