"""Arrays of which a schema says uniqueItems: an item that was there before is left out of the text as it comes."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from served import scripted, serving
from tiny_model import write_tiny_model

import localllm
from localllm.generation.constraints.distinct_items import DistinctItems, drop_unique_items, has_distinct
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
def test_what_was_there_before_is_left_out(schema: dict, value: object, expected: object, indent: int | None):
    text = json.dumps(value, indent=indent)
    for seed in range(4):
        draw, items, said, place = random.Random(seed), DistinctItems(schema), "", 0
        while place < len(text):
            size = draw.randint(1, 4)
            said += items.push(text[place : place + size])
            items = items.copy() if draw.random() < 0.3 else items
            place += size
        assert repr(json.loads(said)) == repr(expected)


def test_who_asks_for_it():
    assert has_distinct(DEEP) and not has_distinct(drop_unique_items(DEEP)) and not has_distinct({"uniqueItems": False})


TWICE = '["red", "blue", "red"]'
TOOL = {"type": "object", "properties": {"colors": SET}, "required": ["colors"]}
CALLED = f'<tool_call>\n{{"name": "f", "arguments": {{"colors": {TWICE}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048, chat_template=QWEN)


def test_answers_and_arguments(path: Path):
    with serving({"scripted": lambda: scripted(str(path), {"set": TWICE, "call": CALLED})}) as told:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SET}}
        message = told.chat("set", response_format=form).json["choices"][0]["message"]
        assert message["content"] == '["red","blue"]'
        kept = told.chat("set", response_format=form, json_whitespace=True).json["choices"][0]["message"]["content"]
        assert json.loads(kept) == ["red", "blue"]
        events = told.chat("set", response_format=form, stream=True).events
        texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(texts) == '["red","blue"]' and sum(map(bool, texts)) > 2
        message = told.chat("call", tools=[{"type": "function", "function": {"name": "f", "parameters": TOOL}}])
        [call] = message.json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"colors":["red","blue"]}'


def test_a_model_that_says_anything(path: Path):
    """Alone, in a batch, with beams: valid, and the same by one seed."""
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


def test_a_receipt_says_it_again(path: Path, tmp_path: Path, cli):
    schema = json.dumps({**SET, "items": {"pattern": "^[ab]$", "type": "string"}, "minItems": 1, "maxItems": 4})
    receipt = str(tmp_path / "r.json")
    code, out, err = cli("run", path, "-p", "x", "-s", "2", "-n", "1900", "-j", schema, "--receipt", receipt)
    assert (code, err) == (0, "") and len(json.loads(out)) <= 2
    assert cli("replay", receipt)[:2] == (0, "the same text\n")
