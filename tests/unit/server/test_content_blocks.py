"""Test content blocks of an answer, metrics, and streams that break off."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.errors import ModelError, UsageError
from localllm.generation.reasoning import ANSWER, ARGUMENTS, CALL, REASONING, TextPart
from localllm.server import model_pool as model_pool
from localllm.server import service
from localllm.server.anthropic_messages import stream_events as streamed_message
from localllm.server.content_blocks import CLOSE, DELTA, OPEN, ContentBlockList
from localllm.server.embeddings import MAX_TEXTS, parse_strings, run_exclusively
from localllm.server.http import format_anthropic_error, format_openai_error, select_error_format
from localllm.server.metrics import Histogram, Metrics
from localllm.server.openai_chat import stream_chunks as streamed_chat
from localllm.server.openai_completions import stream_chunks as streamed_texts
from localllm.server.openai_responses import ResponseBuilder
from localllm.server.openai_responses import stream_events as streamed_response


class Broken:
    """An answer that fails after some words."""

    name, usage, wants_logprobs = "m", service.TokenUsage(), False

    def __init__(self, *words: str):
        self.words, self.closed = words, 0

    async def stream_events(self) -> AsyncIterator[Any]:
        for word in self.words:
            yield 0, SimpleNamespace(parts=[TextPart(ANSWER, word)], logprob=None, finish_reason="", progress=None)
        raise ModelError("it broke")

    def count_usage(self) -> Any:
        return self.usage

    async def close(self) -> None:
        self.closed += 1


def lines_of(stream: Any) -> list[Any]:
    async def read() -> list[bytes]:
        return [line async for line in stream]

    return [json.loads(line.decode().rpartition("data: ")[2]) for line in asyncio.run(read())]


@pytest.mark.parametrize("words", [(), ("a",)])
def test_a_failing_stream_ends_with_an_error_event(words: tuple[str, ...]):
    """Use each API's error event after the text so far, and close the answer."""
    question: Any = SimpleNamespace(top_logprobs=None, n=1, prompts=[1])
    error = format_openai_error(ModelError("it broke"))
    for streamed, end in (
        (lambda one: streamed_chat(one, question, True), error),
        (lambda one: streamed_texts(one, question, True), error),
        (lambda one: streamed_message(one, question), format_anthropic_error(ModelError("it broke"))),
    ):  # fmt: skip
        broken: Any = Broken(*words)
        *before, last = lines_of(streamed(broken))
        content = [each for each in before if each.get("type") not in ("message_start", "ping")]  # at once
        assert last == end and bool(content) == bool(words) and broken.closed == 1
    broken = Broken(*words)
    events = lines_of(streamed_response(broken, ResponseBuilder("m", {}, {})))
    assert [each["sequence_number"] for each in events] == [*range(len(events))] and broken.closed == 1
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
    assert events[-1]["response"]["error"] == {**error["error"], "code": "server_error"}


@pytest.mark.parametrize(
    ("path", "is_claude"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/chat/completions", False)],
)
def test_errors_have_the_format_of_their_path(path: str, is_claude: bool):
    assert select_error_format(path) is (format_anthropic_error if is_claude else format_openai_error)


def test_the_number_of_texts_is_limited():
    assert parse_strings("a", "input") == ["a"] and len(parse_strings(["a"] * MAX_TEXTS, "input")) == MAX_TEXTS
    with pytest.raises(UsageError, match=f"input must be at most {MAX_TEXTS} strings, not {MAX_TEXTS + 1}"):
        parse_strings(["a"] * (MAX_TEXTS + 1), "input")
    for odd in ([1], ["a", 1], None, 5):
        with pytest.raises(UsageError, match="input must be a string or an array of strings"):
            parse_strings(odd, "input")


def test_parts_become_content_blocks():
    parts = [TextPart(REASONING, "a"), TextPart(REASONING, "b"), TextPart(ANSWER, "c"), TextPart(CALL, "f"),
             TextPart(ARGUMENTS, "{"),
             TextPart(ARGUMENTS, "}"), TextPart(CALL, "g"), TextPart(ANSWER, "d")]  # fmt: skip
    blocks = ContentBlockList()
    assert not blocks.has_calls and not list(blocks.finish())
    changes = [(each.action, each.block.index, each.text) for part in parts for each in blocks.take(part)]
    changes += [(each.action, each.block.index, each.text) for each in [*blocks.finish(), *blocks.finish()]]
    assert changes == [
        (OPEN, 0, ""), (DELTA, 0, "a"), (DELTA, 0, "b"), (CLOSE, 0, ""), (OPEN, 1, ""), (DELTA, 1, "c"), (CLOSE, 1, ""),
        (OPEN, 2, ""), (DELTA, 2, "{"), (DELTA, 2, "}"), (CLOSE, 2, ""), (OPEN, 3, ""), (CLOSE, 3, ""),
        (OPEN, 4, ""), (DELTA, 4, "d"), (CLOSE, 4, ""),
    ]  # fmt: skip
    contents = [(block.kind, block.name, block.text) for block in blocks.all]
    assert contents == [(REASONING, "", "ab"), (ANSWER, "", "c"), (CALL, "f", "{}"), (CALL, "g", ""), (ANSWER, "", "d")]
    assert blocks.has_calls


def test_histograms_count_values_up_to_each_bound():
    counted = Histogram()
    for seconds in (0.001, 0.005, 0.0051, 60.0, 61.0):
        counted.add(seconds)
    lines = dict(line.rsplit(" ", 1) for line in counted.format_lines("x"))
    assert [lines[f'x_bucket{{le="{bound}"}}'] for bound in (0.005, 0.01, 30.0, 60.0, "+Inf")] == [
        "2",
        "3",
        "3",
        "4",
        "5",
    ]
    assert (lines["x_sum"], lines["x_count"]) == ("121.011100", "5")


def test_metrics_count_requests_and_tokens():
    """Count only the end of requests that had not begun."""
    metrics = Metrics()
    answers = [SimpleNamespace(tokens=[1, 2]), SimpleNamespace(tokens=[3])]
    for begun in (True, False):
        request: Any = SimpleNamespace(begun=begun, prompt=[0] * 9, cached=4, answers=answers)
        metrics.record_finished(request)
        metrics.record_cancelled(request)
        metrics.record_cancelled(request)
    metrics.responses.update({("/b", 200): 2, ("/a", 404): 1})
    lines = metrics.format(7, 8, {"memory_held_bytes": 5e9}, {"read_bytes": 6.0}).splitlines()
    counts = dict(
        line.removeprefix("localllm_").rsplit(" ", 1) for line in lines if line[0] != "#" and "seconds" not in line
    )
    assert counts == {
        'http_requests_total{path="/a",status="404"}': "1", 'http_requests_total{path="/b",status="200"}': "2",
        "answers_running": "7", "requests_waiting": "8", "requests_finished_total": "2", "requests_left_total": "4",
        "prompt_tokens_read_total": "15", "prompt_tokens_cached_total": "12", "tokens_written_total": "9",
        "memory_held_bytes": "5e+09", "weights_read_bytes_total": "6",
    }  # fmt: skip
    kinds = {line.split()[2].removeprefix("localllm_"): line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert {name for name, kind in kinds.items() if kind == "gauge"} == {
        "answers_running", "requests_waiting", "memory_held_bytes",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {
        "first_token_seconds", "between_tokens_seconds",
    }  # fmt: skip
    assert "# HELP localllm_memory_held_bytes Memory held bytes." in lines and len(kinds) == 12


def test_embeddings_of_a_model_run_one_after_the_other():
    """Run them in sequence, because memory is planned for one run."""
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    async def all_at_once() -> None:
        await asyncio.gather(*(run_exclusively(work, "input") for _ in range(4)))

    asyncio.run(all_at_once())
    assert most == 1
