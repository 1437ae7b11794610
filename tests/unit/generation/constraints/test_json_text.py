"""Test that JSON answers are sent compact, unless json_whitespace keeps the model's white space."""

import json
import random
import re
from pathlib import Path

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

import localllm
from localllm import api
from localllm.generation.constraints.constraint import Constraint, get_matcher
from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.model_methods import gather_options
from localllm.generation.request import Request
from tests.unit.generation.tools.test_tool_grammar import QWEN

VALUE = {"a b": [1, -2.5e3, {"c": '\\ " \n\t [ {  '}, None, True, "", []], 'd\\": 1': {"e": {}}, "ü  ö": "  \\\\"}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ROME = {"city": "New  Rome", "days": 2}
COMPACT, INDENTED = '{"city":"New  Rome","days":2}', json.dumps(ROME, indent=2)
CALLED = '<tool_call>\n{"name": "f", "arguments": ' + INDENTED + "}\n</tool_call>"
SCRIPT = {"json": INDENTED, "deep": json.dumps([[[[[[[ROME]]]]]]], indent=4), "call": CALLED, "end": "\n" * 400}
ARRAYS = {"type": "array", "items": {}}


@pytest.mark.parametrize("indent", [None, 1, 4, "\t"])
@pytest.mark.parametrize("seed", range(5))
def test_the_compactor_removes_white_space_outside_strings(indent, seed: int):
    text, draw = json.dumps(VALUE, indent=indent, ensure_ascii=bool(seed % 2)), random.Random(seed)
    compactor, output, place = JsonCompactor(), "", 0
    while place < len(text):
        size = draw.randint(1, 5)
        output += compactor.push(text[place : place + size])
        place += size
    assert output == json.dumps(VALUE, separators=(",", ":"), ensure_ascii=bool(seed % 2))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048, chat_template=QWEN)


@pytest.fixture(scope="module")
def server(path: Path):
    with serving({"scripted": lambda: scripted(str(path), SCRIPT)}) as served:
        yield served


@pytest.fixture(scope="module")
def model(path: Path):
    return scripted(str(path), SCRIPT)


def test_a_schema_allows_indentation_but_no_other_white_space(path: Path):
    """Allow what json.dumps writes with any indentation."""
    tokenizer = api.open_tokenizer(path)
    form = Constraint.from_schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [PLACE, {"type": "array", "items": {
        "$ref": "#/$defs/a"}}]}}})  # fmt: skip
    deep = [[[[[ROME]]]]]

    def may_be(text: str) -> bool:
        return get_matcher(form, tokenizer, tokenizer.vocab_size).accept_text(text)

    for written in (json.dumps(deep, indent=indent) for indent in (None, 0, 1, 2, 4, 8, "\t")):
        assert may_be(written)
    assert may_be(COMPACT) and may_be('[{ "city" : "a" , "days" : 2 } ]')
    for endless in ("[   {", "[\n\n\n", "[" + "\n" + " " * 65, "[" + "\t" * 9, "[" + "\r\n"):
        assert not may_be(endless)


def test_python_answers_are_compact_unless_white_space_is_kept(model):
    messages = [{"role": "user", "content": "json"}]
    pieces = [*model.chat(messages, schema=PLACE)]
    assert "".join(pieces) == COMPACT and len(pieces) > 5
    assert "".join(model.chat(messages, schema=PLACE, json_whitespace=True)) == INDENTED
    answer = model.chat([{"role": "user", "content": "end"}], 60, schema=PLACE)
    text = "".join(answer)
    assert text.startswith('{"city":"')
    assert not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"?', "", text))
    request: Request = model.session.request(messages, gather_options(300, (), {"schema": PLACE}))
    assert request.task.options.constraint.is_compact


def test_drafts_and_batches_give_the_same_compact_json(path: Path):
    with localllm.open(path, cache=False) as model:
        asked = [{"role": "user", "content": "Who?"}]
        schema = {**PLACE, "properties": {**PLACE["properties"], "city": {"type": "string", "maxLength": 9}}}
        alone, guessed = (model.chat(asked, 200, seed=4, schema=schema, speculate=how) for how in ("off", "ngram"))
        text = "".join(alone)
        assert text == "".join(guessed) and alone.tokens == guessed.tokens
        assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text
        kept = model.chat(asked, 200, seed=4, schema=schema, json_whitespace=True)
        assert json.loads("".join(kept)) == json.loads(text) and kept.tokens == alone.tokens
        assert [answer.text for answer in model.map([asked], 200, seed=4, schema=schema)] == [text]
        for answer in model.candidates(asked, 2, 2, max_tokens=200, schema=schema):
            assert answer.text.startswith('{"city":"')


FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


@pytest.mark.parametrize("whitespace", [False, True])
def test_every_endpoint_sends_compact_json_unless_told_otherwise(server: Served, whitespace: bool):
    """Compare whole and streamed answers."""
    expected, more = (INDENTED, {"json_whitespace": True}) if whitespace else (COMPACT, {})
    for form in (FORM, {"type": "json_object"}):
        fields = {"response_format": form, **more}
        assert server.chat("json", **fields).json["choices"][0]["message"]["content"] == expected
        events = server.chat("json", stream=True, **fields).events
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == expected
    asked = [{"role": "user", "content": "json"}]
    config = {"format": {"type": "json_schema", "schema": PLACE}}
    reply = server.post("/v1/messages", {"messages": asked, "max_tokens": 200, "output_config": config, **more})
    assert reply.json["content"][0]["text"] == expected
    text = {"format": {"type": "json_schema", "name": "p", "schema": PLACE}}
    reply = server.post("/v1/responses", {"input": "json", "text": text, **more})
    assert reply.json["output"][0]["content"][0]["text"] == expected


STOPS = ["days", "}", "\n", "R"]


def test_stop_strings_do_not_cut_json_answers(server: Served, path: Path, cli):
    """Apply stop strings to free text only, also beside tools."""
    for more in ({}, {"stream": True}):
        reply = server.chat("json", response_format=FORM, stop=STOPS, **more)
        choices = [event["choices"][0] for event in reply.events] if more else reply.json["choices"]
        texts = [choice.get("delta", choice.get("message")).get("content") or "" for choice in choices]
        assert ("".join(texts), choices[-1]["finish_reason"]) == (COMPACT, "stop")
    for form in ({"grammar": 'root ::= "New" " Rome"'}, {"regex": "New Rome"}):
        choice = server.chat("json", stop=STOPS, **form).json["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("New Rome", "stop")
    asked = [{"role": "user", "content": "json"}]
    body = {"messages": asked, "max_tokens": 200, "stop_sequences": STOPS}
    reply = server.post("/v1/messages", {**body, "output_config": {"format": {"type": "json_schema", "schema": PLACE}}})
    assert (reply.json["content"][0]["text"], reply.json["stop_reason"]) == (COMPACT, "end_turn")
    assert server.post("/v1/messages", body).json["stop_sequence"] == "\n"
    tools = [{"type": "function", "function": {"name": "f", "parameters": PLACE}}]
    assert server.chat("json", tools=tools, stop=STOPS).json["choices"][0]["message"]["content"] == "{"
    code, out, err = cli("run", path, "-p", "x", "--stop", "e", "-j", '{"enum": ["yes"]}')
    assert (code, out, err) == (0, '"yes"\n', "")


@pytest.mark.parametrize("whitespace", [False, True])
def test_tool_arguments_are_compact_unless_white_space_is_kept(server: Served, whitespace: bool):
    expected, more = (INDENTED, {"json_whitespace": True}) if whitespace else (COMPACT, {})
    tools = [{"type": "function", "function": {"name": "f", "parameters": PLACE}}]
    message = server.chat("call", tools=tools, **more).json["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    events = server.chat("call", tools=tools, stream=True, **more).events
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == expected


def test_run_and_map_print_compact_json(path: Path, tmp_path: Path, cli):
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    answers = {'{"a":"x"}', '{"a":"y"}'}
    receipt = ("--receipt", str(tmp_path / "r.json"))
    done = cli("run", str(path), "-p", "Who?", "-j", schema, "--seed", "3", *receipt)[1].strip()
    assert done in answers
    assert cli("replay", str(tmp_path / "r.json"))[:2] == (0, "the same text\n")
    lines = tmp_path / "in.txt"
    lines.write_text("a\nb\n")
    out = cli("map", str(path), str(lines), "-p", "{line}", "-j", schema, "--seed", "3")[1]
    outputs = [line.partition('"output": ')[2] for line in out.splitlines()]
    assert len(outputs) == 2 and all(output.startswith(('{"a": "x"}', '{"a": "y"}')) for output in outputs)
