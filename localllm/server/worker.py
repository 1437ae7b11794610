"""The thread that computes for one model: a batch that callers join and leave between any two steps."""

import threading
from collections import deque
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from localllm.errors import LocalllmError, MemoryLimitError
from localllm.generation.reasoning import ANSWER, TextPart
from localllm.generation.request import Completion, Request
from localllm.generation.sampling.sampler import log_total
from localllm.server.metrics import Metrics
from localllm.server.response_stream import LikelyToken, Subscriber, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from localllm.api import Model

STOPPING = "the server is stopping"
MOST_WAITING = 256  # requests that wait for their turn


class StoppedError(LocalllmError):
    """The server ends, or has more to do than it may put off."""


class Worker:
    """Answers requests to one model, many at once. All methods may be called from any thread.

    Attributes:
        model: whose batch it is.
    """

    def __init__(
        self,
        model: "Model",
        metrics: Metrics,
        parallel: int | None,
        memory: int | None,
    ):
        """parallel, memory: as of Model.batch."""
        self.model, self._metrics, self._most = model, metrics, MOST_WAITING
        self._begun = partial(model.batch, self, parallel, live=True, memory=memory)
        self._asked = deque[Subscriber]()  # that the batch has not taken yet
        self._left = deque[Subscriber]()  # whose clients are gone
        self._hearing = dict[int, Subscriber]()  # by the id of the request
        self._changed, self._closing = threading.Condition(), False
        self._told = list[tuple[Subscriber, TokenEvent | LocalllmError | None]]()
        self._times = dict[int, float]()  # of the latest token, by the id of the answer
        self._batch = self._begun()
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Worker":
        return self

    def __next__(self) -> Request:
        """For the batch: who has asked; StopIteration means that there is nobody now."""
        with self._changed:
            if not self._asked:
                raise StopIteration
            return self._asked.popleft().request

    def ask(self, hearer: Subscriber) -> None:
        """Answer this request some time. Raises StoppedError if too many wait already."""
        request = hearer.request
        with self._changed:
            if self._closing:
                raise StoppedError(STOPPING)
            if len(self._asked) >= self._most:
                raise StoppedError(f"{self._most} requests are waiting already; try again later")
            request.listener = partial(self._heard, hearer)
            self._hearing[id(request)] = hearer
            self._asked.append(hearer)
            self._changed.notify()

    def leave(self, hearer: Subscriber) -> None:
        """Nobody listens any more: the answers end with the step that runs now."""
        with self._changed:
            if hearer in self._asked:
                self._asked.remove(hearer)
                del self._hearing[id(hearer.request)]
            elif id(hearer.request) in self._hearing:
                self._left.append(hearer)

    @property
    def waiting(self) -> int:
        """How many requests have no sequence yet."""
        return len(self._asked) + len(self._batch.waiting)

    @property
    def running(self) -> int:
        """How many answers are being made."""
        return len(self._batch.running)

    def stop(self) -> None:
        """Who still waits is told so at once, and the thread ends after the step that runs now."""
        with self._changed:
            self._closing = True
            hearing, self._hearing = [*self._hearing.values()], {}
            self._changed.notify()
        deliver([(hearer, StoppedError(STOPPING)) for hearer in hearing])

    def close(self) -> None:
        """As `stop`, and wait for the thread."""
        self.stop()
        self._thread.join()
        self._batch.close()

    # ---- in the thread ----

    def _work(self) -> None:
        while self._is_wanted():
            try:
                for finished in self._batch:
                    self._after_turn(finished)
                    if self._closing:
                        break
            except Exception as error:  # whatever it is, who waits is told, and others are answered
                self._fail(error)
        self._fail(StoppedError(STOPPING))

    def _is_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            return not self._closing

    def _heard(
        self, hearer: Subscriber, answering: Completion, token: int | None, parts: list[TextPart], row: np.ndarray
    ) -> None:
        """A token of an answer."""
        logprob = None
        if hearer.most_likely is not None and token is not None and answering.guide.transcript.kind == ANSWER:
            logprob = chosen(row, token, hearer.most_likely)
        self._told.append((hearer, TokenEvent(answering.number, tuple(parts), logprob, answering.finish_reason)))
        now = monotonic()
        before = self._times.get(id(answering))
        self._times[id(answering)] = now
        if before is None:
            self._metrics.first_token.add(hearer.loop.time() - hearer.begin)
        else:
            self._metrics.between_tokens.add(now - before)
        if answering.finish_reason:
            del self._times[id(answering)]

    def _after_turn(self, finished: list[Request]) -> None:
        for request in finished:
            if hearer := self._hearing.pop(id(request), None):
                self._told.append((hearer, request.error))
                self._metrics.finished(request)
                request.listener = None  # which holds the hearer, which holds the request
        with self._changed:
            left, self._left = self._left, deque()
        for hearer in left:
            if self._hearing.pop(id(hearer.request), None):
                self._batch.drop(hearer.request)
                self._metrics.left(hearer.request)
                hearer.request.listener = None
                for answering in hearer.request.answers:
                    self._times.pop(id(answering), None)
        self._deliver()

    def _deliver(self) -> None:
        told, self._told = self._told, []
        deliver(told)

    def _fail(self, error: Exception) -> None:
        """Everybody is told, and the batch begins anew."""
        told = error if isinstance(error, LocalllmError) else internal(error)
        with self._changed:
            hearing, self._hearing = [*self._hearing.values()], {}
            self._asked.clear()
            self._left.clear()
        self._told += [(hearer, told) for hearer in hearing]
        self._times.clear()
        self._deliver()
        self._batch.close()
        if not self._closing:
            self._batch = self._begun()


def deliver(told: list[tuple[Subscriber, TokenEvent | LocalllmError | None]]) -> None:
    """One call into each event loop, most often the only one, for all that a turn has brought."""
    by_loop = dict[int, list[tuple[Subscriber, TokenEvent | LocalllmError | None]]]()
    for each in told:
        by_loop.setdefault(id(each[0].loop), []).append(each)
    for some in by_loop.values():
        try:
            some[0][0].loop.call_soon_threadsafe(tell_all, some)
        except RuntimeError:  # the loop is closed: nobody waits there
            continue


def tell_all(told: list[tuple[Subscriber, TokenEvent | LocalllmError | None]]) -> None:
    for hearer, each in told:
        hearer.tell(each)


def internal(error: Exception) -> LocalllmError:
    """What a client is told of an error that nobody expected: no more than its kind."""
    if isinstance(error, MemoryError):
        return MemoryLimitError("not enough memory")
    return LocalllmError(f"internal error: {type(error).__name__}")


def chosen(row: np.ndarray, token: int, count: int) -> LikelyToken:
    """Of logits float32 [vocab]: the log probability of a token, and the `count` likeliest."""
    total = log_total(row)
    best = np.argpartition(row, -count)[-count:] if count else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]
    likeliest = tuple(TokenLogprob(int(other), float(row[other]) - total) for other in best)
    return LikelyToken(TokenLogprob(token, float(row[token]) - total), likeliest)
