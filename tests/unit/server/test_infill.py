"""Test localllm serve: infill by `suffix` of completions, and by /infill as llama-server has it."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from served import Served, serving

import localllm
from localllm.generation.infill import Infill
from localllm.generation.reasoning import ANSWER, TextPart
from localllm.server.fields import RequestBody
from localllm.server.infill import InfillStops, InfillStream, parse_ending, parse_request
from localllm.server.openai_chat import IGNORED_HEADER
from localllm.server.worker import TokenEvent
from tests.unit.generation.test_infill import write_fim_model

GAP = {"input_prefix": "hello", "input_suffix": "world"}
GREEDY = {"n_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
def fim_path(tmp_path_factory) -> str:
    return str(write_fim_model(tmp_path_factory.mktemp("fim")))


@pytest.fixture(scope="module")
def served(fim_path: str, tiny: str):
    with serving({"fim": fim_path, "tiny": tiny}) as server:
        yield server


def answer_of(path: str, gap: Infill, count: int = 6) -> tuple[list[int], str]:
    """Return the prompt's token ids and the text of a greedy answer."""
    with localllm.open(path, threads=2) as model:
        ids = gap.encode_to_fit(model.tokenizer, model.context, count)
        return ids, "".join(model.generate(ids, count, temperature=0))


# ---- completions


def test_completions_with_a_suffix_fill_the_middle(served: Served, fim_path: str):
    _, text = answer_of(fim_path, Infill("hello", "world"))
    body = {"model": "fim", "prompt": "hello", "suffix": "world", "max_tokens": 6, "temperature": 0}
    reply = served.post("/v1/completions", body).json
    assert reply["choices"][0]["text"] == text
    several = served.post("/v1/completions", {**body, "prompt": ["hello", "he"]}).json["choices"]
    assert [choice["text"] for choice in several] == [text, answer_of(fim_path, Infill("he", "world"))[1]]
    streamed = served.post("/v1/completions", {**body, "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == text
    plain = {name: value for name, value in body.items() if name != "suffix"}
    without = served.post("/v1/completions", plain).json["usage"]["prompt_tokens"]
    assert served.post("/v1/completions", {**body, "suffix": ""}).json["usage"]["prompt_tokens"] == without
    assert reply["usage"]["prompt_tokens"] > without


def test_infill_parts_beyond_the_context_are_refused_or_cut(served: Served):
    body = {"model": "fim", "prompt": "a" * 600, "suffix": "b", "max_tokens": 6}
    assert served.post("/v1/completions", body).json["error"]["code"] == "context_length_exceeded"
    many = served.post("/v1/completions", {**body, "suffix": "b" * 100_000}).json["error"]
    assert many["code"] == "context_length_exceeded" and "has 100600 bytes" in many["message"]
    assert served.post("/infill", {"model": "fim", "input_prefix": "a" * 100_000, "input_suffix": "b"}).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/infill"])
def test_a_model_without_infill_tokens_is_refused(served: Served, path: str):
    reply = served.post(path, {"model": "tiny", "prompt": "a", "suffix": "b", **GAP})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("this model cannot fill in the middle of a text")


# ---- /infill


def test_infill_returns_the_fields_of_llama_server(served: Served, fim_path: str):
    extra = [{"filename": "a.py", "text": "he\n"}, {"text": "ll"}]
    gap = Infill("hello", "world", [("a.py", "he\n"), ("tmp", "ll")], "he", is_cut=True)
    ids, text = answer_of(fim_path, gap)
    body = {"model": "fim", **GAP, "prompt": "he", "input_extra": extra, **GREEDY, "cache_prompt": True}
    reply = served.post("/infill", body).json
    assert reply["content"] == text and reply["stop"] is True and reply["stop_type"] == "limit"
    assert (reply["tokens_evaluated"], reply["tokens_predicted"]) == (len(ids), 6)
    assert (reply["tokens_cached"], reply["truncated"]) == (len(ids) + 6, False)
    assert reply["generation_settings"] == {"n_ctx": 512, "n_predict": 6}
    timings = served.post("/infill", body).json["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(ids) and timings["cache_n"] > 0
    assert timings["predicted_n"] == 6 and timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(6000 / timings["predicted_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 6)


def test_infill_streams_the_same_text(served: Served):
    body = {"model": "fim", **GAP, **GREEDY}
    whole = served.post("/infill", body).json
    *events, last = served.post("/infill", {**body, "stream": True}).events
    assert "".join(event["content"] for event in events) == whole["content"]
    assert not any(event["stop"] for event in events) and (last["stop"], last["content"]) == (True, "")
    assert last["tokens_predicted"] == 6


def test_response_fields_select_what_is_returned(served: Served):
    body = {"model": "fim", **GAP, **GREEDY, "response_fields": ["content", "timings/prompt_n", "truncated", "x/y"]}
    reply = served.post("/infill", body).json
    assert reply.keys() == {"content", "timings/prompt_n", "truncated"} and reply["timings/prompt_n"] > 0


def test_a_stop_string_ends_the_middle(served: Served):
    body = {"model": "fim", **GAP, **GREEDY}
    text = served.post("/infill", body).json["content"]
    reply = served.post("/infill", {**body, "stop": [text[2]]}).json
    assert reply["content"] == text[: text.index(text[2])]
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", text[2])


def test_requests_of_llama_vim_and_llama_vscode_are_answered(served: Served):
    """Cache the prompt of a request without an answer."""
    body = {
        "model": "fim", **GAP, "prompt": "", "input_extra": [], "n_predict": 0, "samplers": [], "stream": False,
        "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""], "id_slot": 0,
    }  # fmt: skip
    warmed = served.post("/infill", body).json
    assert (warmed["content"], warmed["tokens_predicted"], warmed["stop_type"]) == ("", 0, "limit")
    more = {"n_predict": 8, "samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9, "n_indent": 4}
    reply = served.post("/infill", {**body, **more, "stop": [], "response_fields": []})
    assert (reply.json["content"], reply.json["stop_type"]) == ("", "eos"), "no token is likely, so infill ends it"
    assert reply.json["timings"]["cache_n"] > 0
    assert reply.headers[IGNORED_HEADER.lower()] == "t_max_prompt_ms"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_prefix": None}, "input_prefix is missing"),
        ({"input_suffix": 5}, "input_suffix must be a string"),
        ({"prompt": [1]}, "prompt must be a string"),
        ({"input_extra": "x"}, "input_extra must be an array"),
        ({"input_extra": ["x"]}, "input_extra must be an object"),
        ({"input_extra": [{"filename": "x"}]}, "text is missing"),
        ({"input_extra": [{"filename": 1, "text": "x"}]}, "filename must be a string"),
        ({"n_indent": -1}, "n_indent must be 0 or greater"),
        ({"samplers": ["nothing"]}, "samplers: unknown sampler"),
        ({"response_fields": 1}, "response_fields must be a string or an array"),
    ],
)
def test_invalid_infill_requests_are_refused(served: Served, changes: dict[str, Any], message: str):
    reply = served.post("/infill", {"model": "fim", **GAP, **changes})
    assert reply.status == 400 and message in reply.json["error"]["message"], reply.json


def test_infill_limits_and_samplers_are_parsed():
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        assert parse_request(RequestBody({**GAP, name: 7})).options.max_tokens == 7
    assert parse_request(RequestBody({**GAP, "n_predict": -1})).options.max_tokens is None
    assert parse_ending(RequestBody({"t_max_predict_ms": 250, "n_indent": 4})) == InfillStops(4, 0.25)
    assert (
        parse_ending(RequestBody({"t_max_predict_ms": -1}))
        == parse_ending(RequestBody({"t_max_predict_ms": 0}))
        == InfillStops()
    )
    sampling = parse_request(RequestBody({**GAP, "samplers": ["top_k", "infill"]})).options.sampling
    assert sampling.samplers == ("top_k", "infill")


# ---- where it ends


def end_middle(parts: list[str], ending: InfillStops, seconds: float = 0, reason: str = "stop") -> tuple[str, str, str]:
    """Return the text, its joined chunks and the stop type of parts that arrive `seconds` apart."""

    async def events() -> AsyncGenerator[tuple[int, TokenEvent]]:
        for place, part in enumerate(parts):
            await asyncio.sleep(seconds)
            yield 0, TokenEvent(0, (TextPart(ANSWER, part),), None, reason if place == len(parts) - 1 else "")

    async def collect() -> tuple[str, str, str]:
        stream: Any = SimpleNamespace(stream_events=events, stop_string=lambda: "")
        middle = InfillStream(stream, ending)
        joined = "".join([part async for part in middle.stream_parts()])
        return middle.text, joined, middle.stop_type

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\n    b\n    c", None),
        ("a\n\t\t\t\tb", None),
        ("a\n    b\n  c\n    d", "a\n    b\n"),
        ("a\nb", "a\n"),
        ("a\n    b\n\n    c", "a\n    b\n"),
        ("a\n  ", None),
        ("  a", None),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_n_indent_ends_the_middle_at_a_line_with_less_indentation(text: str, kept: str | None, size: int):
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    middle, joined, stop_type = end_middle(parts, InfillStops(indent=4))
    assert middle == joined and stop_type == ("eos" if kept is None else "limit")
    assert middle.rstrip(" ") == (text if kept is None else kept).rstrip(" ")
    assert end_middle(parts, InfillStops())[0] == text


def test_a_time_limit_ends_the_middle_at_a_line():
    parts = ["a", "\n", "b", "c\n", "d"]
    assert end_middle(parts, InfillStops(seconds=0.001), 0.01) == ("a\n", "a\n", "limit")
    assert end_middle(parts, InfillStops(seconds=60)) == ("a\nbc\nd", "a\nbc\nd", "eos")
    assert end_middle(["a", "b"], InfillStops(seconds=0.001), 0.01, "length") == ("ab", "ab", "limit")


def test_infill_reuses_chunks_after_the_cursor_moved(served: Served):
    """Prefill little, unless n_cache_reuse is 0."""
    text = "".join(chr(97 + place * place % 23) for place in range(240))
    prompts = [(text[:150], {}), (text[3:150], {}), (text[3:151], {"n_cache_reuse": 0}),
               (text[3:152], {"n_cache_reuse": 16})]  # fmt: skip
    read = []
    for prefix, changes in prompts:
        body = {"model": "fim", "input_prefix": prefix, "input_suffix": text[180:], **GREEDY, **changes}
        read.append(served.post("/infill", body).json["timings"]["prompt_n"])
    cold, moved, exact, longer = read
    assert cold > 150 and moved < 100 and exact > 150 and longer < 30  # the suffix has 60 tokens


def test_infill_may_put_the_suffix_first():
    gap = parse_request(RequestBody({**GAP, "prompt": "he"}), suffix_first=True).prompts[0]
    assert isinstance(gap, Infill) and gap.suffix_first
