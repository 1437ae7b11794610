"""Test a model's worker without its thread, and requests with several prompts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.errors import ContextError, MemoryLimitError, ModelError, UsageError
from localllm.generation.logprobs import compute_token_logprobs
from localllm.generation.reasoning import ANSWER, REASONING, TextPart
from localllm.server import model_pool as model_pool
from localllm.server import service, worker
from localllm.server.http import ClientLimits, RequestTimeoutError
from localllm.server.worker import StoppedError


class Loop:
    """An event loop of a subscriber; closed: the loop has ended."""

    def __init__(self, closed: bool = False):
        self.calls, self.closed = list[int](), closed

    def time(self) -> float:
        return 10.0

    def call_soon_threadsafe(self, call: Any, events: list[Any]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(len(events))
        call(events)


def subscriber(loop: Loop, top_logprobs: int | None = None) -> Any:
    heard: list[Any] = []
    request = SimpleNamespace(listener=None, answers=[SimpleNamespace()], error=None)
    return SimpleNamespace(
        request=request, loop=loop, top_logprobs=top_logprobs, begin=7.5, heard=heard, publish=heard.append
    )


def test_subscribers_get_events_until_they_cancel(answers):
    it, batches, counted = answers
    here, there, closed = Loop(), Loop(), Loop(closed=True)
    first, second, third, gone, alone = (subscriber(loop) for loop in (here, here, there, here, closed))
    for each in (first, second, third, gone, alone):
        it.submit(each)
    it.cancel(gone)  # which the batch has not taken
    assert (it.waiting, it.running) == (5, 2) and iter(it) is it
    assert [next(it) for _ in range(4)] == [each.request for each in (first, second, third, alone)]
    assert next(it, None) is None and it.waiting == 1
    it.cancel(second)
    it.cancel(gone)
    it._token_times[id(second.request.answers[0])] = 1.0
    second.request.listener = first.request.listener = print
    third.request.error = "broken"
    it._finish_step([first.request, third.request, alone.request, gone.request])
    assert (first.heard, third.heard, second.heard, alone.heard) == ([None], ["broken"], [], [])
    assert (here.calls, there.calls) == ([1], [1]) and batches[0].dropped == [second.request] and not it._token_times
    assert counted == [
        *(("record_finished", each.request) for each in (first, third, alone)),
        ("record_cancelled", second.request),
    ]
    assert first.request.listener is None and second.request.listener is None
    assert not it._subscribers and not it._cancelled
    it.cancel(first)
    assert not it._cancelled


def test_the_request_queue_is_bounded(answers, monkeypatch):
    it, batches, _ = answers
    monkeypatch.setattr(it, "_max_waiting", 2)
    it.submit(subscriber(Loop()))
    it.submit(subscriber(Loop()))
    with pytest.raises(StoppedError, match=r"^the request queue is full \(2\); try again later$"):
        it.submit(subscriber(Loop()))
    assert it._wait_for_work() and worker.MAX_WAITING == 256
    it.close()
    assert batches[0].closed == 1 and not it._wait_for_work()
    with pytest.raises(StoppedError, match=r"^the server is stopping; try again after its restart$"):
        it.submit(subscriber(Loop()))


@pytest.mark.parametrize(("error", "message"), [
    (ModelError("the file"), "the file"), (KeyError("a secret"), "internal error: KeyError"),
    (MemoryError(), "not enough memory"),
])  # fmt: skip
def test_a_failing_batch_is_reported_to_all_subscribers(answers, error: Exception, message: str):
    """Serve later requests with a new batch."""
    it, batches, _ = answers
    both = [subscriber(Loop()), subscriber(Loop())]
    for each in both:
        it.submit(each)
    assert next(it) and not it._token_times.update({1: 1.0})
    it._fail(error)
    assert (
        [str(each.heard[0]) for each in both] == [message, message]
        and not it._queue
        and not it._subscribers
        and not it._token_times
    )
    assert isinstance(both[0].heard[0], MemoryLimitError) == isinstance(error, MemoryError)
    assert [batch.closed for batch in batches] == [1, 0] and it._batch is batches[1]
    it._closing = True
    it._fail(error)
    assert [batch.closed for batch in batches] == [1, 1]


def test_a_token_becomes_an_event_with_its_logprob(answers, monkeypatch):
    it, _, counted = answers
    now = [1.0]
    monkeypatch.setattr(worker, "monotonic", lambda: now[0])
    row, loop = np.log(np.array([0.5, 0.125, 0.375], np.float32)), Loop()
    guide = SimpleNamespace(transcript=SimpleNamespace(kind=ANSWER))
    answering: Any = SimpleNamespace(number=3, guide=guide, finish_reason=None)
    parts, events = [TextPart(ANSWER, "x")], []
    for likely, token, kind, reason in (
        (2, 1, ANSWER, None), (None, 1, ANSWER, None), (2, None, ANSWER, None), (2, 1, REASONING, "stop"),
    ):  # fmt: skip
        guide.transcript.kind, answering.finish_reason = kind, reason
        it._on_token(subscriber(loop, likely), answering, token, parts, row)
        now[0] += 0.25
        events.append(it._events[-1][1])
    assert [(each.number, each.parts, each.finish_reason) for each in events] == [(3, (*parts,), None)] * 3 + [
        (3, (*parts,), "stop")
    ]
    assert [each.logprob is None for each in events] == [False, True, True, True]
    assert counted == [("first_token", 2.5), *[("between_tokens", 0.25)] * 3] and not it._token_times


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_likeliest_tokens_are_sorted_by_probability(count: int):
    """Give the same for shifted logits."""
    for shift in (0.0, 5.0):
        logprobs = compute_token_logprobs(
            np.log(np.array([0.25, 0.125, 0.625], np.float32)) + np.float32(shift), 1, count
        )
        assert [each.token for each in logprobs.likeliest] == [2, 0, 1][:count]
        probabilities = [np.exp(each.logprob) for each in (logprobs.chosen, *logprobs.likeliest)]
        assert logprobs.chosen.token == 1 and probabilities == pytest.approx(
            [0.125, 0.625, 0.25, 0.125][: count + 1], rel=1e-5
        )


class Tokens:
    """A tokenizer with a known maximum of bytes."""

    vocab_size, bos_id, eos_id = 7, None, None

    def __init__(self, most: int):
        self.compute_max_bytes = lambda context: most


def make_stream(*prompts: Any, n: int = 1, context: int = 80, most: int = 1000, **limits: Any) -> Any:
    """Return a stream of a model with one token per character that refuses prompts above `most` bytes."""

    def request(prompt: Any, options: Any, count: int) -> Any:
        of_tokens = prompt and isinstance(prompt[0], int)
        parts = prompt if of_tokens or isinstance(prompt, str) else [message["content"] for message in prompt]
        text = "".join(map(str, parts))
        assert (options, count) == ("options", n)
        return SimpleNamespace(prompt=[*text], asked=prompt, cached=1, answers=[])

    model = SimpleNamespace(
        engine=SimpleNamespace(vocab_size=9), context=context, session=SimpleNamespace(request=request),
        tokenizer=Tokens(most),
    )  # fmt: skip
    left: list[Any] = []
    working: Any = SimpleNamespace(model=model, cancel=left.append, left=left)
    asked: Any = SimpleNamespace(prompts=[*prompts], options="options", n=n, top_logprobs=None, context=())
    return service.ResponseStream("m", working, asked, ClientLimits(**limits), AsyncExitStack())


def say(*texts: str) -> list[dict[str, str]]:
    """Return messages: of the assistant if capitalized, of the system if they begin with a dot."""
    roles = ["system" if text[0] == "." else "assistant" if text[0].isupper() else "user" for text in texts]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def test_prompts_that_cannot_fit_are_refused_at_once():
    it = make_stream()
    assert it._build_request([0, 8]).asked == [0, 8] and it._vocab == 7
    for odd in ([9], [-1], [0, "x"], [1.5]):
        with pytest.raises(UsageError, match=r"^prompt: token ids must be from 0 to 8$"):
            it._build_request(odd)
    for text in ("é" * 500, say("é" * 499 + "x", "X")):
        assert make_stream(most=1000)._build_request(text).asked == text
        problem = "the prompt has 1000 bytes, but at most 999 fit in a context of 80 tokens; shorten it"
        with pytest.raises(ContextError, match=f"^{problem}$"):
            make_stream(most=999)._build_request(text)
        assert make_stream(most=999, drops_turns=True)._build_request(text).asked == text
    assert service.count_bytes([{"content": None}, {}, {"content": "\ud800é"}]) == 3


@pytest.mark.parametrize(("texts", "dropped", "left"), [
    (["a" * 30, "A" * 30, "b" * 10], 0, 0), (["a" * 30, "A" * 30, "b" * 11], 1, 2), (["a" * 71], 0, 0),
    (["." * 9, "a" * 20, "A" * 20, "b" * 20, "B" * 20, "c" * 5], 1, 3),
    (["." * 9, "a" * 20, "A" * 20, "b" * 20, "B" * 20, "c" * 22], 2, 5), (["a", "A", "b" * 71], 1, 2),
    (["a", "A", "b", "B", "c", "C" * 69, "d"], 3, 6), ([".", "a" * 70, "b"], 1, 2),
])  # fmt: skip
def test_no_more_turns_than_necessary_are_dropped(texts: list[str], dropped: int, left: int):
    """Reserve an eighth of the context: 70 of 80 tokens may be prompt. Keep the system message."""
    it, parse_messages = make_stream(drops_turns=True), say(*texts)
    fitting = it._build_truncated_request(parse_messages)
    system = parse_messages[:1] if texts[0][0] == "." else []
    assert it.dropped == dropped and fitting.asked == (
        parse_messages if not dropped else [*system, *parse_messages[left:]]
    )


def test_completions_drop_no_turns():
    it = make_stream(drops_turns=True)
    for prompt in ("x" * 99, [5] * 99, []):
        assert it._build_truncated_request(prompt).asked == prompt and not it.dropped
    assert service.resolve_prompt_images(["x", [5]], []) == ["x", [5]]


def test_events_of_several_prompts_are_numbered_across_them():
    async def collect(it: Any) -> list[Any]:
        events = []
        try:
            async for number, each in it.stream_events():
                events.append((number, each.number))
        finally:
            await it.close()
        return events

    def of(*numbers: int, wait: float = 0) -> Any:
        async def events() -> AsyncIterator[Any]:
            for number in numbers:
                await asyncio.sleep(wait)
                yield SimpleNamespace(number=number)

        guide = SimpleNamespace(thoughts=2, transcript=SimpleNamespace(stopped_by="x"))
        answers = [SimpleNamespace(tokens=[1, 2, 3], guide=guide)] * 2
        return SimpleNamespace(stream_events=events, request=SimpleNamespace(prompt=[1] * 5, cached=4, answers=answers))

    it = make_stream(n=2)
    it._subscribers = [of(0, 1, 0), of(1)]
    assert sorted(asyncio.run(collect(it))) == [(0, 0), (0, 0), (1, 1), (3, 1)] and it._worker.left == it._subscribers
    assert it.usage == it.count_usage() == service.TokenUsage(10, 8, 12, 8) and it.stop_string() == "x"
    it._subscribers[0].request.answers = []
    assert it.stop_string() == ""
    late = make_stream(answer_seconds=0.01)
    late._subscribers = [of(0, wait=60)]
    with pytest.raises(
        RequestTimeoutError,
        match=r"^the answer took more than 0\.01 seconds, the limit of --timeout; lower max_tokens$",
    ):
        asyncio.run(collect(late))
    assert late.usage == service.TokenUsage() and late._worker.left == late._subscribers
