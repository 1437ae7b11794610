"""Test endpoints: requests, parsed replies and retries, without a program or a model."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from localllm.errors import ContextError, UsageError
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import ANSWER, REASONING
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.tools.tool_grammar import Tool, ToolUse
from localllm.services.records.lines import PromptBuilder, Record
from localllm.services.remote import http
from localllm.services.remote import model as remote_model
from localllm.services.remote.dialect import DIALECTS, OTHER, OutputFormat, ServerDialect, build_request
from localllm.services.remote.http import Endpoint, EndpointError
from localllm.services.remote.mapping import AT_ONCE, RemoteMapping, make_success
from localllm.services.remote.model import RemoteAnswer, RemoteModel, StreamedResponse, fetch_context_length
from tests.integration.test_endpoint import reply_with, serve_reactions

OURS, LLAMA, VLLM = (DIALECTS[name] for name in ("localllm", "llamacpp", "vllm"))
TOOL = Tool("now", "The time.")


# ---- requests


def test_unset_options_are_not_sent():
    for dialect in (OURS, LLAMA, VLLM, OTHER):
        assert build_request(GenerationOptions(), OutputFormat(), dialect) == {}


def test_options_have_the_fields_of_the_openai_api():
    sampling = SamplingOptions(temperature=0.0, seed=3, logit_bias={5: float("-inf"), 6: 7.5, 8: 200.0})
    options = GenerationOptions(0, ("a", "b"), sampling, tools=ToolUse([TOOL]))
    assert build_request(options, OutputFormat(), OTHER) == {
        "max_tokens": 0, "stop": ["a", "b"], "temperature": 0.0, "seed": 3,
        "logit_bias": {"5": -100.0, "6": 7.5, "8": 100.0}, "tools": [TOOL.to_json_schema()],
    }  # fmt: skip
    assert "tools" not in build_request(GenerationOptions(tools=ToolUse([TOOL], "none")), OutputFormat(), OTHER)


def test_options_have_the_names_of_each_server():
    options = GenerationOptions(sampling=SamplingOptions(typical=0.5, dry_sequence_breakers=("x",), ignore_eos=True))
    fields = {"typical_p": 0.5, "dry_sequence_breakers": ["x"], "ignore_eos": True}
    assert build_request(options, OutputFormat(), LLAMA) == fields
    assert build_request(options, OutputFormat(), OURS) == {
        "typical": 0.5,
        **{name: fields[name] for name in [*fields][1:]},
    }


def test_only_localllm_accepts_banned_strings():
    assert build_request(GenerationOptions(ban="x"), OutputFormat(), OURS) == {"banned_strings": ["x"]}
    with pytest.raises(UsageError, match="ban is not available with this endpoint"):
        build_request(GenerationOptions(ban="x"), OutputFormat(), LLAMA)


def test_unsupported_options_are_refused_with_the_servers_name():
    for dialect, option, name in (
        (OTHER, {"top_k": 3}, "a server with OpenAI's API"), (VLLM, {"typical": 0.5}, "vLLM"),
        (LLAMA, {"xtc_probability": 0.1, "dry_base": 2.0}, ""),
    ):  # fmt: skip
        options = GenerationOptions(sampling=SamplingOptions(**option))
        if name:
            with pytest.raises(UsageError) as failure:
                build_request(options, OutputFormat(), dialect)
            assert (
                str(failure.value)
                == f"{next(iter(option))} is not available with this endpoint: {name} does not support it"
            )
        else:
            assert build_request(options, OutputFormat(), dialect) == option and dialect.name == "llama-server"


def test_constraints_have_the_fields_of_each_server():
    asked = {
        dialect.name: build_request(GenerationOptions(), OutputFormat(grammar="g"), dialect)
        for dialect in (OURS, LLAMA)
    }
    assert asked == {"localllm": {"grammar": "g"}, "llama-server": {"grammar": "g"}}
    assert build_request(GenerationOptions(), OutputFormat(regex="r"), OURS) == {"regex": "r"}
    assert build_request(GenerationOptions(), OutputFormat(grammar="g"), VLLM) == {
        "structured_outputs": {"grammar": "g"}
    }
    assert build_request(GenerationOptions(), OutputFormat(regex="r"), VLLM) == {"structured_outputs": {"regex": "r"}}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}, "strict": True}}
    assert build_request(GenerationOptions(), OutputFormat({}), OTHER) == {
        "response_format": schema
    }  # one that allows everything
    with pytest.raises(UsageError, match="grammar is not available with this endpoint"):
        build_request(GenerationOptions(), OutputFormat(grammar="g"), OTHER)


ON, OFF = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))


@pytest.mark.parametrize(
    ("think", "dialect", "asked"),
    [
        ("auto", OURS, {}), ("on", OURS, {"think": "on"}), ("high", OURS, {"think": "high"}),
        ("auto", VLLM, {}), ("on", VLLM, ON), ("off", LLAMA, OFF), ("low", LLAMA, {"reasoning_effort": "low"}),
        ("high", OTHER, {"reasoning_effort": "high"}), ("off", OTHER, None), ("on", OTHER, None),
    ],
)  # fmt: skip
def test_think_has_the_fields_of_each_server(think: str, dialect: ServerDialect, asked: dict[str, Any] | None):
    options = GenerationOptions(think=think)
    if asked is None:
        with pytest.raises(UsageError, match="think is not available with this endpoint"):
            build_request(options, OutputFormat(), dialect)
    else:
        assert build_request(options, OutputFormat(), dialect) == asked


def test_reasoning_budgets_and_template_variables_are_sent():
    budget = GenerationOptions(think_budget=0)
    assert build_request(budget, OutputFormat(), OURS) == {"think_budget": 0}
    with pytest.raises(UsageError, match="think_budget is not available with this endpoint"):
        build_request(budget, OutputFormat(), VLLM)
    named = GenerationOptions(think="off", template_variables={"mood": "calm"})
    assert build_request(named, OutputFormat(), LLAMA) == {
        "chat_template_kwargs": {"mood": "calm", "enable_thinking": False}
    }
    assert build_request(named, OutputFormat(), OURS) == {"think": "off", "chat_template_kwargs": {"mood": "calm"}}
    with pytest.raises(UsageError, match="template_var is not available with this endpoint"):
        build_request(GenerationOptions(template_variables={"mood": "calm"}), OutputFormat(), OTHER)


# ---- answers


def streamed(*events: Any) -> tuple[StreamedResponse, list[tuple[str, str]]]:
    streaming = StreamedResponse()
    return streaming, [(part.kind, part.text) for event in events for part in streaming.push(event)]


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [fields]}


def test_text_and_reasoning_are_read_by_every_name():
    streaming, parts = streamed(
        choice(delta={"reasoning_content": "a"}), choice(delta={"reasoning": "b", "content": "c"}), choice(text="d"),
        choice(delta=None), choice(delta={"content": ""}), {"choices": 5}, {"choices": None}, {"usage": 5},
        choice(finish_reason="eos", delta={}), choice(delta={}, finish_reason=None), {"usage": {"prompt_tokens": 3}},
    )  # fmt: skip
    assert parts == [(REASONING, "a"), (REASONING, "b"), (ANSWER, "c"), (ANSWER, "d")]
    assert (streaming.text, streaming.events, streaming.finish_reason) == ({REASONING: "ab", ANSWER: "cd"}, 4, "stop")
    assert streaming.usage == {"prompt_tokens": 3} and not streaming.calls


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [5, None]}, {"choices": [{"delta": {"content": ""}, "text": ""}]}, {"choices": [{"text": 5}]},
        {"choices": [{"delta": {"content": ["a"], "reasoning": {"b": 1}}}]},
        {"choices": [{"delta": {"tool_calls": [5]}}]},
        {"choices": [{"delta": {"tool_calls": None}}]}, {"choices": {"delta": {"content": "x"}}}, {},
    ],
)  # fmt: skip
def test_invalid_events_add_nothing(odd: dict[str, Any]):
    streaming, parts = streamed(odd, choice(delta={"content": "a"}))
    assert (parts, streaming.events, streaming.calls) == ([(ANSWER, "a")], 1, [])


def test_a_call_may_get_its_name_late():
    streaming, _ = streamed(
        call(index=0, function={"name": None, "arguments": "{}"}), call(index=0, function={"name": "now"})
    )
    assert [each.name for each in streaming.calls] == ["now"]
    assert [each.name for each in streamed(call(function={"arguments": "{}"}))[0].calls] == [""]


@pytest.mark.parametrize(
    ("reason", "ours"),
    [("length", "length"), ("content_filter", "stop"), ("stop_sequence", "stop"), ("function_call", "tool_calls")],
)
def test_finish_reasons_of_other_servers_are_translated(reason: str, ours: str):
    assert streamed(choice(finish_reason=reason))[0].finish_reason == ours


def call(**fields: Any) -> dict[str, Any]:
    return choice(delta={"tool_calls": [fields]})


def test_calls_are_joined_from_their_chunks():
    streaming, parts = streamed(
        call(index=1, id="two", function={"name": "now", "arguments": '{"a"'}),
        call(index=0, id="one", function={"name": "list", "arguments": "{}"}),
        call(index=1, id="", function={"name": "other", "arguments": ": 1}"}), call(index=1, function={"name": None}),
        call(index=2, id="three", function={"name": "cut", "arguments": '{"a'}), call(index=3, function=5),
    )  # fmt: skip
    calls = [(each.id, each.name, each.arguments) for each in streaming.calls]
    assert calls == [("one", "list", {}), ("two", "now", {"a": 1})] and not parts and streaming.events == 6
    whole = {"function": {"name": "now", "arguments": "{}"}}
    assert [each.name for each in streamed(call(**whole), call(**whole))[0].calls] == ["now", "now"]


def test_whole_answers_are_parsed_and_invalid_ones_are_empty():
    message = {"content": "Hi", "reasoning_content": "Hm"}
    logprobs = {"content": [{"logprob": -1.0}, {"logprob": -2}, {"logprob": None}, 5]}
    reply = {"message": message, "finish_reason": "eos", "logprobs": logprobs}
    assert RemoteAnswer.parse(reply, {"completion_tokens": 2}) == RemoteAnswer("Hi", "Hm", "stop", -1.5, True, 2)
    assert RemoteAnswer.parse({"text": "x", "message": {"reasoning": "y"}}, None) == RemoteAnswer("x", "y", "length")
    assert RemoteAnswer.parse({}, {"completion_tokens": None}).completion_tokens == 0
    assert RemoteAnswer.parse({"finish_reason": 7, "logprobs": None}, None) == RemoteAnswer("", "", "7")
    for odd in (5, {"message": 5}, {"logprobs": {"content": None}}, {"logprobs": 5}):
        assert RemoteAnswer.parse(odd, {}) == RemoteAnswer("", "", "length")


# ---- addresses, and servers that are busy


@pytest.mark.parametrize(
    ("address", "url"),
    [("http://a", "http://a/v1"), ("http://a:1", "http://a:1/v1"), ("https://a:1/", "https://a:1/v1"), ("http://a/v1/", "http://a/v1"),
     ("http://a/b", "http://a/b"), ("http://[::1]:80", "http://[::1]:80/v1")],
)  # fmt: skip
def test_addresses_are_completed_to_the_api(address: str, url: str):
    assert Endpoint.parse(address).url == url


@pytest.mark.parametrize(
    "address",
    ["a", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a:x", "http://a?b=1", "http://a#b", "http://u@a",
     "http://u:p@a", "http://[a", "https:///v1", ""],
)  # fmt: skip
def test_invalid_addresses_are_refused(address: str):
    with pytest.raises(UsageError) as failure:
        Endpoint.parse(address)
    expected = "endpoint must be the URL of a server, such as http://127.0.0.1:8000/v1, not "
    assert str(failure.value) == f"{expected}{address!r}"


def test_keys_must_be_printable_ascii():
    assert Endpoint.parse("http://a", "sk-1 2").key == "sk-1 2"
    for key in ("a\nb", "é", "\x7f"):
        with pytest.raises(UsageError, match="printable ASCII"):
            Endpoint.parse("http://a", key)


def test_the_key_and_path_are_sent():
    seen = []

    def react(handler: Any, number: int) -> None:
        seen.append((handler.path, {name.lower(): value for name, value in handler.headers.items()}))
        reply_with(200, b"{}")(handler, number)

    with serve_reactions(react) as (url, asked):
        assert Endpoint.parse(f"{url}/deep", "k").post("/x", {"a": "ö"}) == Endpoint.parse(url).post("/y", 1) == {}
    (path, headers), (second, bare) = seen
    assert (path, second, asked) == ("/deep/x", "/v1/y", [{"a": "ö"}, 1])
    assert headers["authorization"] == "Bearer k" and headers["content-type"] == "application/json"
    assert "authorization" not in bare


def record_waits(status: int, monkeypatch: pytest.MonkeyPatch, **headers: str) -> list[float]:
    """Return the waits between requests that a server refuses with this status."""
    seconds = list[float]()
    monkeypatch.setattr(http, "sleep", seconds.append)
    with serve_reactions(reply_with(status, b"{}", **headers)) as (url, asked), pytest.raises(EndpointError):
        Endpoint.parse(url).post("/x", 1)
    assert len(asked) == len(seconds) + 1
    return seconds


def test_busy_servers_are_retried_after_growing_or_given_waits(monkeypatch: pytest.MonkeyPatch):
    assert record_waits(503, monkeypatch) == [2, 4, 8, 16]
    assert record_waits(429, monkeypatch, Retry_After="7") == [7] * 4
    assert (
        record_waits(502, monkeypatch, Retry_After="900")
        == record_waits(504, monkeypatch, Retry_After="31")
        == [30] * 4
    )
    assert record_waits(503, monkeypatch, Retry_After="Fri, 31 Dec 1999 23:59:59 GMT") == [2, 4, 8, 16]
    assert record_waits(500, monkeypatch) == [2]  # a fault of the request itself, mostly
    assert record_waits(400, monkeypatch) == record_waits(301, monkeypatch) == []


@pytest.mark.parametrize(
    ("status", "key", "error", "kind", "message"),
    [
        (401, "k", {"message": "no"}, EndpointError, r"rejected the API key \(401: no\)"),
        (403, "k", {"message": "no"}, EndpointError, r"rejected the API key \(403: no\)"),
        (403, None, "no", EndpointError, r"needs an API key: .* \(403: no\)"),
        (404, None, {"message": " a\n b "}, EndpointError, r"rejected the request \(404\): a b$"),
        (400, None, {"message": "Too many", "code": "context_length_exceeded"}, ContextError, "Too many"),
        (400, None, {"message": "exceeds the available context size"}, ContextError, "exceeds"),
        (400, None, {"message": "x" * 900}, EndpointError, r"\(400\): x{500}$"),
    ],
)
def test_refusals_of_a_server_are_explained(
    status: int, key: str | None, error: Any, kind: type[Exception], message: str
):
    body = json.dumps({"error": error}).encode()
    with serve_reactions(reply_with(status, body)) as (url, _), pytest.raises(kind, match=message):
        Endpoint.parse(url, key).post("/x", 1)


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b"[1]", b"7", b"\xff", b"[" * 100_000])
def test_replies_that_are_no_json_objects_are_refused(body: bytes):
    """Accept any body of a refusal."""
    with serve_reactions(reply_with(200, body)) as (url, _), pytest.raises(EndpointError) as failure:
        Endpoint.parse(url).post("/x", 1)
    shown = repr(body[:60].decode(errors="replace"))
    assert str(failure.value) == f"{url}/v1 sent an invalid JSON object: {shown}"
    with serve_reactions(reply_with(404, body)) as (url, _), pytest.raises(EndpointError) as failure:
        Endpoint.parse(url).post("/x", 1)
    assert str(failure.value) == f"{url}/v1 rejected the request (404): the server gave no reason"


# ---- models and sessions


@dataclass
class ScriptedEndpoint:
    """An endpoint with known replies: of GET by address, of POST in order."""

    gets: dict[str, Any]
    replies: list[Any] = field(default_factory=list)
    url: str = "http://a/v1"
    asked: list[Any] = field(default_factory=list)

    def get(self, path: str) -> Any:
        if self.url + path not in self.gets:
            raise EndpointError("nothing is there")
        return self.gets[self.url + path]

    def post(self, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def stream_events(self, path: str, body: Any) -> Iterator[Any]:
        yield from self.post(path, body)


def model(*replies: Any, owner: str = "somebody", name: str | None = None, form: OutputFormat | None = None) -> Any:
    listed = {"data": [5, about(owner), about("vllm", id="n", max_model_len=32)]}
    endpoint: Any = ScriptedEndpoint({"http://a/v1/models": listed}, [*replies])
    return RemoteModel(endpoint, name, form)


def about(owner: str, **fields: Any) -> dict[str, Any]:
    return {"id": "m", "owned_by": owner, **fields}


def answer_events(*texts: str, **usage: Any) -> list[Any]:
    return [*(choice(delta={"content": text}) for text in texts), {**choice(finish_reason="stop"), "usage": usage}]


def test_model_and_server_are_chosen_from_the_list():
    assert (model().name, model().dialect, model().context) == ("m", OTHER, 0)
    assert (model(name="n").name, model(name="n").dialect, model(name="n").context) == ("n", VLLM, 32)
    with pytest.raises(UsageError, match="does not serve model 'x'; available: m, n"):
        model(name="x")
    for listed in ({}, {"data": 5}, {"data": []}):
        endpoint: Any = ScriptedEndpoint({"http://a/v1/models": listed})
        with pytest.raises(EndpointError, match="serves no models"):
            RemoteModel(endpoint)
        assert (RemoteModel(endpoint, "y").name, RemoteModel(endpoint, "y").dialect) == ("y", OTHER)  # it may have it


@pytest.mark.parametrize(
    ("owner", "props", "context"),
    [
        ("llamacpp", {"default_generation_settings": {"n_ctx": 512}}, 512),
        ("localllm", {"models": [{"name": "x", "context": 5}, {"name": "m", "context": 64}]}, 64),
        ("localllm", {"models": [{"name": "x", "context": 5}]}, 0), ("llamacpp", {}, 0), ("llamacpp", None, 0),
        ("somebody", {"default_generation_settings": {"n_ctx": 512}}, 0),
    ],
)  # fmt: skip
def test_the_context_is_read_from_the_list_or_props(owner: str, props: dict[str, Any] | None, context: int):
    endpoint: Any = ScriptedEndpoint({} if props is None else {"http://a/props": props})
    assert fetch_context_length(about(owner), endpoint, "m") == context


def test_the_context_is_asked_for_until_it_is_known():
    """Ask again, as a server may open the model later."""
    asking = model(owner="llamacpp")
    assert asking.context == 0
    props = asking.endpoint.gets["http://a/props"] = {"default_generation_settings": {"n_ctx": 512}}
    assert asking.context == 512
    props["default_generation_settings"] = {"n_ctx": 7}
    assert asking.context == 512


def test_an_answer_has_its_usage_calls_and_reasoning():
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    thought = choice(delta={"reasoning_content": "Hm"})
    called = call(index=0, id="c", function={"name": "now", "arguments": "{}"})
    end = {**choice(finish_reason="tool_calls"), "usage": usage}
    answer = model([thought, *answer_events("H", "i")[:2], called, end]).session.ask("Hello")
    assert answer.finish_reason == "interrupted" and (answer.prompt_tokens, answer.completion_tokens) == (0, 0)
    assert "".join(answer) == "Hi" and answer.finish_reason == "stop"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 4)
    assert 0 < answer.ttft_s == answer.prefill_s and answer.decode_s > 0
    function = {"name": "now", "arguments": "{}"}
    assert answer.message() == {
        "role": "assistant", "content": "Hi", "reasoning_content": "Hm",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }  # fmt: skip
    counted = model(answer_events("H", "i")).session.ask("Hello")
    assert "".join(counted) == "Hi" and counted.completion_tokens == 2  # events, if nobody says better
    assert counted.message() == {"role": "assistant", "content": "Hi"}
    assert (counted.cached_tokens, counted.prompt_tokens) == (0, 0)


@pytest.mark.parametrize(("reason", "expected"), [("length", "length"), ("stop", "stop"), ("tool_calls", "stop")])
@pytest.mark.parametrize("details", [None, {"cached_tokens": None}, {}])
def test_finish_reason_and_missing_usage_are_read(reason: str, expected: str, details: object):
    usage = {"completion_tokens": None, "prompt_tokens": None, "prompt_tokens_details": details}
    answer = model([*answer_events("a")[:1], {**choice(finish_reason=reason), "usage": usage}]).session.ask("Hello")
    assert "".join(answer) == "a" and answer.finish_reason == expected
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (0, 0, 1)


def test_prefill_and_decode_times_are_measured(monkeypatch: pytest.MonkeyPatch):
    """Split at the first word."""
    clock = iter([0.0, 1.0, 3.0, 3.5, 6.0])
    monkeypatch.setattr(remote_model, "perf_counter", lambda: next(clock))
    answer = model(answer_events("a", "b")).session.ask("Hello")
    assert "".join(answer) == "ab" and (answer.ttft_s, answer.prefill_s, answer.decode_s) == (2.0, 2.0, 3.0)


def test_a_conversation_is_sent_with_its_history():
    asking = model(answer_events("Hi"), answer_events("Yes"), answer_events("No"), form=OutputFormat({}))
    session = asking.session
    session.system = "Be short."
    "".join(session.ask("Hello"))
    "".join(session.ask("Sure?", GenerationOptions(1)))
    "".join(session.chat([{"role": "user", "content": "Alone"}]))
    (path, first), (_, second), (_, third) = asking.endpoint.asked
    assert path == "/chat/completions" and first["model"] == "m" and "max_tokens" not in first
    assert first["stream"] is True and first["stream_options"] == {"include_usage": True}
    assert first["response_format"]["json_schema"]["schema"] == {}
    assert [each["content"] for each in second["messages"]] == ["Be short.", "Hello", "Hi", "Sure?"]
    assert second["max_tokens"] == 1 and [each["content"] for each in third["messages"]] == ["Alone"]
    assert [each["content"] for each in session.messages] == ["Be short.", "Hello", "Hi", "Sure?", "Yes"]


TOO_LONG = ContextError("too long")


@pytest.mark.parametrize(("refusals", "left"), [(0, 5), (1, 2), (2, 1)])
def test_a_conversation_too_long_drops_its_older_half(refusals: int, left: int):
    asking = model(*[answer_events("a")] * 4, *[TOO_LONG] * refusals, answer_events("b"))
    for number in range(5):
        "".join(asking.session.ask(f"q{number}"))
    last = [each["content"] for each in asking.endpoint.asked[-1][1]["messages"] if each["role"] == "user"]
    assert last == [f"q{number}" for number in range(5)][5 - left :] and asking.session.forgotten == 5 - left
    assert [each["content"] for each in asking.session.messages if each["role"] == "user"] == last


def test_turns_with_tool_calls_are_dropped_whole():
    asking, words = model(TOO_LONG, answer_events("b")), list[dict[str, Any]]()
    for number in range(3):
        tool = {"role": "tool", "content": f"t{number}", "tool_call_id": "c"}
        asked = {"role": "assistant", "content": "", "tool_calls": []}
        words += [{"role": "user", "content": f"q{number}"}, asked, tool, {"role": "assistant", "content": "a"}]
    asking.session.messages = words
    "".join(asking.session.ask("q3"))
    ((_, first), (_, second)) = asking.endpoint.asked
    assert first["messages"] == [*words, {"role": "user", "content": "q3"}]
    assert second["messages"] == first["messages"][8:] and asking.session.forgotten == 2


def test_a_conversation_that_may_not_drop_turns_raises():
    asking = model(answer_events("a"), TOO_LONG, TOO_LONG)
    "".join(asking.session.ask("q0"))
    with pytest.raises(ContextError):
        asking.session.ask("q1", GenerationOptions(on_overflow="error"))
    assert [each["content"] for each in asking.session.messages] == ["q0", "a"] and len(asking.endpoint.asked) == 2
    with pytest.raises(ContextError):  # one question is the least
        model(TOO_LONG).session.ask("q")
    with pytest.raises(UsageError, match="on_overflow=shift"):
        asking.session.ask("q1", GenerationOptions(on_overflow="shift"))


def test_raw_prompts_need_max_tokens_unless_unlimited_is_known():
    for owner, most in (("localllm", 2**31 - 1), ("llamacpp", -1)):
        asking = model(answer_events("b"), answer_events("b"), owner=owner)
        "".join(asking.session.complete("a"))
        "".join(asking.session.complete("a", GenerationOptions(5)))
        (path, first), (_, second) = asking.endpoint.asked
        assert (path, first["prompt"], first["max_tokens"], second["max_tokens"]) == ("/completions", "a", most, 5)
    with pytest.raises(UsageError, match="max_tokens must be set"):
        model().session.complete("a", GenerationOptions())
    assert "".join(model(answer_events("b")).session.complete("a", GenerationOptions(0))) == "b"


def answered(text: str, logprob: float | None = None) -> dict[str, Any]:
    logprobs = {} if logprob is None else {"logprobs": {"content": [{"logprob": logprob}]}}
    return {"message": {"content": text}, "finish_reason": "stop", **logprobs}


def test_several_answers_are_sorted_by_probability():
    three = [answered("a", -2.0), answered("b", -0.5), answered("c", -1.0)]
    asking = model({"choices": three}, {"choices": [*three[:2], answered("c")]}, {"choices": [answered("a")]})
    messages = [{"role": "user", "content": "Hi"}]
    assert [each.text for each in asking.session.candidates(messages, n=3)] == ["b", "c", "a"]
    assert [each.text for each in asking.session.candidates("Hi", GenerationOptions(3), 16)] == ["a", "b", "c"]
    assert [each.text for each in asking.session.candidates(messages)] == ["a"]
    (path, first), (raw, second), (_, third) = asking.endpoint.asked
    assert (path, first["n"], first["logprobs"]) == ("/chat/completions", 3, True)
    assert (raw, second["n"], second["prompt"]) == ("/completions", 16, "Hi") and "logprobs" not in second
    assert third["n"] == 1 and "logprobs" not in third and "stream" not in third


def test_two_candidates_are_requested_with_logprobs():
    asking, hello = model({"choices": [answered("a", -2.0), answered("b", -1.0)]}), [{"role": "user", "content": "Hi"}]
    assert [each.text for each in asking.session.candidates(hello, GenerationOptions(3, ("x",)), 2)] == ["b", "a"]
    fields = {"model": "m", "max_tokens": 3, "stop": ["x"], "messages": hello, "n": 2, "logprobs": True}
    assert asking.endpoint.asked == [("/chat/completions", fields)]


def test_unsupported_overflow_options_are_refused():
    asking, hello = model(answer_events("a")), [{"role": "user", "content": "Hi"}]
    answer = asking.session.chat(hello, GenerationOptions(3, sampling=SamplingOptions(seed=9)))
    assert "".join(answer) == "a" and answer.seed == 9
    ((_, fields),) = asking.endpoint.asked
    assert (fields["max_tokens"], fields["seed"], fields["messages"]) == (3, 9, hello)


def test_a_cut_answer_cannot_be_continued():
    with model() as asking, pytest.raises(UsageError) as failure:
        asking.session.resume()
    assert str(failure.value) == ("an endpoint's answer cannot be continued: its API does not support it")


def test_invalid_counts_and_empty_replies_are_refused():
    for n in (0, 17):
        with pytest.raises(UsageError, match="n must be from 1 to 16"):
            model().session.candidates([], n=n)
    with pytest.raises(UsageError, match="beams is not available with"):
        model().session.candidates([], beams=1)
    for reply in ({}, {"choices": []}, {"choices": 5}):
        with pytest.raises(EndpointError, match="sent a response without `choices`"):
            model(reply).session.candidates([])


def test_closing_an_answer_closes_the_connection():
    closed = threading.Event()

    def endless() -> Iterator[Any]:
        try:
            while True:
                yield choice(delta={"content": "x"})
        finally:
            closed.set()

    answer = model(endless()).session.ask("Hi")
    assert next(iter(answer)) == "x" and not closed.is_set()
    answer.close()
    assert closed.is_set() and answer.finish_reason == "interrupted" and answer.text == "x"


# ---- many


class Counting(ScriptedEndpoint):
    """An endpoint that counts concurrent requests."""

    def __init__(self) -> None:
        super().__init__({"http://a/v1/models": {"data": [about("somebody")]}})
        self.now, self.most, self.lock, self.full = 0, 0, threading.Lock(), threading.Event()

    def post(self, path: str, body: Any) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if self.most == AT_ONCE:
            self.full.set()
        assert self.full.wait(30)
        with self.lock:
            self.now -= 1
        text = body["messages"][-1]["content"]
        cut = {**answered(text), "finish_reason": "length"} if text == "cut" else answered(text)
        return {"choices": [cut] * body["n"], "usage": {"completion_tokens": 3}}


def make_mapping(texts: list[str], options: GenerationOptions | None = None, n: int = 1) -> Any:
    endpoint: Any = Counting()
    records = [Record(number, text) for number, text in enumerate(texts)]
    return RemoteMapping(RemoteModel(endpoint), PromptBuilder(), options or GenerationOptions(), records, n), endpoint


def test_no_more_than_32_requests_run_at_once():
    many, endpoint = make_mapping([str(number) for number in range(50)])
    outputs = {record.id: result["output"] for record, result in many}
    assert outputs == {number: str(number) for number in range(50)} and endpoint.most == AT_ONCE
    assert (many.done, many.written) == (50, 150)


def test_stopping_sends_no_new_request():
    many, _ = make_mapping([str(number) for number in range(50)])
    for _ in many:
        many.stop()
    assert AT_ONCE <= many.done < 2 * AT_ONCE


def test_reasoning_is_written_only_if_there_is_some():
    hm, none = RemoteAnswer("a", "hm", "stop", completion_tokens=3), RemoteAnswer("b", "", "length")
    record = Record(7, "Hi")
    known = {"id": 7, "output": "a", "finish_reason": "stop", "completion_tokens": 3, "input": "Hi"}
    assert make_success(record, [hm]) == {**known, "thinking": "hm"}
    assert make_success(record, [none]) == {**known, "output": "b", "finish_reason": "length", "completion_tokens": 0}
    assert make_success(record, [none, hm])["thinking"] == ["", "hm"]


def test_failed_records_get_results_of_their_own():
    many, _ = make_mapping(["cut", *map(str, range(15))], GenerationOptions(constraint=make_constraint(regex="x")))
    by_id = {record.id: result for record, result in many}
    assert "the answer was cut off before it matched" in by_id.pop(0)["error"]
    assert all("error" not in result for result in by_id.values()) and many.written == 45
    free, _ = make_mapping(["cut", *map(str, range(15))], n=2)
    results = {record.id: result for record, result in free}
    assert results[0]["finish_reason"] == ["length", "length"] and "thinking" not in results[0]
    assert results[1] == {
        "id": 1, "output": ["0", "0"], "finish_reason": ["stop", "stop"], "completion_tokens": 3, "input": "0"
    }  # fmt: skip
    with pytest.raises(UsageError, match="top_k is not available with this endpoint"):  # before anything is asked
        make_mapping(["a"], GenerationOptions(sampling=SamplingOptions(top_k=1)))
