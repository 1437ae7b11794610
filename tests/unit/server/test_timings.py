"""Test llama-server's timings and progress in the other endpoints' responses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import Served, serving

from localllm.server import http

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
CHAT, TEXT, PLAIN = "/v1/chat/completions", "/v1/completions", "/completion"


@pytest.fixture(scope="module")
def served(tiny: str) -> Iterator[Served]:
    with serving({"tiny": tiny}) as served:
        yield served


def read_events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = served.post(path, {"stream": True, "max_tokens": 3, "temperature": 0, **body})
    lines = [line for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_only_the_last_chunk_has_the_timings_of_the_response(served: Served, path: str, fields: dict[str, Any]):
    body = {"messages": HELLO, "prompt": "Hello, who are you?", **fields}
    *first, last = read_events(served, path, body)
    whole = served.post(path, {"max_tokens": 3, "temperature": 0, **body, "stream_options": None}).json
    assert not any("timings" in event for event in first)
    assert {*last["timings"]} == {*whole["timings"]} >= {"cache_n", "prompt_n", "prompt_ms", "predicted_per_second"}
    for timings in (last["timings"], whole["timings"]):
        assert timings["cache_n"] + timings["prompt_n"] == whole["usage"]["prompt_tokens"]
        assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
    if "stream_options" in fields:
        assert last["usage"]["total_tokens"] > 0 and not last["choices"]


@pytest.mark.parametrize("path", [CHAT, TEXT, PLAIN])
def test_return_progress_tells_how_much_of_the_prompt_is_read(served: Served, path: str):
    text = f"{path} " + " ".join(f"word{index}" for index in range(120))
    body = {"messages": [{"role": "user", "content": text}], "prompt": text}
    events = read_events(served, path, {**body, "return_progress": True})
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress and "prompt_progress" in events[0]
    for each in progress:
        assert {*each} == {"total", "cache", "processed", "time_ms"}
        assert each["cache"] <= each["processed"] <= each["total"] == progress[0]["total"] > 100
    assert "".join(get_text(event) for event in events if "prompt_progress" in event) == ""
    silent = read_events(served, path, body)
    assert not any("prompt_progress" in event for event in silent)
    assert [get_text(event) for event in silent if get_text(event)] == [
        get_text(event) for event in events if get_text(event)
    ]


def get_text(event: dict[str, Any]) -> str:
    if "choices" not in event:
        return event["content"]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


def test_comments_tell_progress_while_a_prompt_is_read(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.0005)
    text = "comments " + " ".join(f"word{index}" for index in range(150))
    reply = served.post(CHAT, {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 2})
    comments = {line for line in reply.body.decode().splitlines() if line.startswith(":")}
    assert any(line.startswith(": read ") and line.endswith(" tokens of the prompt") for line in comments)
