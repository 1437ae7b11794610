"""Test uniqueItems: repeated items are dropped while the answer is streamed."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from served import scripted, serving
from tiny_model import write_tiny_model

import localllm
from localllm.generation.constraints.distinct_items import DistinctItems, drop_unique_items, has_unique_items
from tests.unit.generation.tools.test_tool_grammar import QWEN

SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
DEEP = {
    "type": "object",
    "properties": {
        "tags": {"$ref": "#/$defs/set"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "sets": {"anyOf": [{"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/set"}}, {"type": "null"}]},
    },
    "additionalProperties": {"type": "array", "uniqueItems": True, "items": {}},
    "$defs": {"set": SET},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (SET, ["a", "b", "a", "c", "c", "b"], ["a", "b", "c"]), (SET, [], []), (SET, ["a"], ["a"]),
        (SET, ["], [", "\"", "], ["], ["], [", "\""]), (SET, ["a\\", "a\\", "é", "\u00e9"], ["a\\", "é"]),
        ({"type": "array", "uniqueItems": True},
         [1, 1.0, True, "1", [1], [1.0], {"a": 1, "b": 2}, {"b": 2, "a": 1}, None],
         [1, True, "1", [1], {"a": 1, "b": 2}, None]),
        (DEEP, {"tags": ["x", "x"], "list": [1, 1], "sets": [["a", "a"], ["a"], []], "more": [1, 1]},
         {"tags": ["x"], "list": [1, 1], "sets": [["a"], []], "more": [1]}),
        ({"prefixItems": [SET, {}], "items": False}, [["a", "a"], ["a", "a"]], [["a"], ["a", "a"]]),
        ({"items": SET}, [["a", "a"], ["a"]], [["a"], ["a"]]),
    ],
)  # fmt: skip
def test_repeated_items_are_dropped_wherever_the_text_is_split(
    schema: dict, value: object, expected: object, indent: int | None
):
    text = json.dumps(value, indent=indent)
    for seed in range(4):
        draw, items, output, place = random.Random(seed), DistinctItems(schema), "", 0
        while place < len(text):
            size = draw.randint(1, 4)
            output += items.push(text[place : place + size])
            items = items.copy() if draw.random() < 0.3 else items
            place += size
        assert repr(json.loads(output)) == repr(expected)


def test_unique_items_are_detected_at_any_depth():
    assert (
        has_unique_items(DEEP)
        and not has_unique_items(drop_unique_items(DEEP))
        and not has_unique_items({"uniqueItems": False})
    )


TWICE = '["red", "blue", "red"]'
TOOL = {"type": "object", "properties": {"colors": SET}, "required": ["colors"]}
CALLED = f'<tool_call>\n{{"name": "f", "arguments": {{"colors": {TWICE}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048, chat_template=QWEN)


def test_the_server_drops_repeated_items_in_answers_and_arguments(path: Path):
    with serving({"scripted": lambda: scripted(str(path), {"set": TWICE, "call": CALLED})}) as server:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SET}}
        message = server.chat("set", response_format=form).json["choices"][0]["message"]
        assert message["content"] == '["red","blue"]'
        kept = server.chat("set", response_format=form, json_whitespace=True).json["choices"][0]["message"]["content"]
        assert json.loads(kept) == ["red", "blue"]
        events = server.chat("set", response_format=form, stream=True).events
        texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(texts) == '["red","blue"]' and sum(map(bool, texts)) > 2
        message = server.chat("call", tools=[{"type": "function", "function": {"name": "f", "parameters": TOOL}}])
        [call] = message.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"colors":["red","blue"]}'


def test_random_answers_stay_valid_and_reproducible_with_unique_items(path: Path):
    """Generate alone, in a batch and with beams."""
    letters = {"type": "string", "pattern": "^[ab]$"}
    schema = {"type": "array", "items": letters, "uniqueItems": True, "minItems": 1, "maxItems": 4}
    asked = [{"role": "user", "content": "x"}]
    with localllm.open(path, cache=False) as model:
        for seed in range(5):
            text = "".join(model.chat(asked, 1900, seed=seed, schema=schema))
            jsonschema.validate(json.loads(text), schema)
            assert [answer.text for answer in model.map([asked], 1900, seed=seed, schema=schema)] == [text]
        for answer in model.candidates(asked, 2, 2, max_tokens=1900, schema=schema):
            jsonschema.validate(json.loads(answer.text), schema)


def test_a_receipt_reproduces_an_answer_with_unique_items(path: Path, tmp_path: Path, cli):
    schema = json.dumps({**SET, "items": {"pattern": "^[ab]$", "type": "string"}, "minItems": 1, "maxItems": 4})
    receipt = str(tmp_path / "r.json")
    code, out, err = cli("run", path, "-p", "x", "-s", "2", "-n", "1900", "-j", schema, "--receipt", receipt)
    assert (code, err) == (0, "") and len(json.loads(out)) <= 2
    assert cli("replay", receipt)[:2] == (0, "the same text\n")
