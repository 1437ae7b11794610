"""Test marked parameters, as Qwen3-Coder writes them: raw strings, any order, and unnamed ones if allowed."""

from typing import Any

import jsonschema
import pytest
import tiny_model

from localllm import api
from localllm.generation.tools.tool_call_format import ToolCallFormat
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse
from tests.unit.generation.tools.test_tool_grammar import CODER, LFM2, parse


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return api.open_tokenizer(tiny_model.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


TEXT = {"type": "string"}
MAYBE = {"anyOf": [TEXT, {"type": "null"}], "default": None}


def tool(properties: dict, required: list[str] | None = None, **more: Any) -> Tool:
    return Tool("f", "", {"type": "object", "properties": properties, "required": required or [], **more})


def write_call(*parameters: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def parse_call(tool: Tool, text: str, tokenizer, format: ToolCallFormat = CODER, **use: Any) -> dict | None:
    """Return a call's arguments; None if the grammar does not allow it."""
    calls = ToolGrammar(ToolUse([tool], "required", **use), format, tokenizer)
    matcher = calls.make_matcher(tokenizer.vocab_size)
    if not matcher.accept_text(text) or not (
        matcher.is_complete or matcher.compute_allowed_mask()[[*tokenizer.end_ids]].any()
    ):
        return None
    prose, [(name, values)] = parse(calls.create_parser(), text)
    assert (prose, name) == ("", "f")
    jsonschema.validate(values, dict(tool.parameters))
    return values


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "New York", "New York"), (TEXT, "null", "null"), (TEXT, "5", "5"), (TEXT, '"a"', '"a"'),
        (MAYBE, "New York", "New York"), (MAYBE, "null", None), (MAYBE, "5", "5"), (MAYBE, '"a" b', '"a" b'),
        (MAYBE, "a\n<b>\n</c> ", "a\n<b>\n</c> "), (MAYBE, "", ""),
        ({"type": ["string", "null"]}, "a b", "a b"), ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5), ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({}, "a b", "a b"), ({}, "5", 5), ({"description": "d"}, '{"a": [1]}', {"a": [1]}), ({}, "{a}", "{a}"),
        ({"const": "a"}, "a", "a"), ({"const": 5}, "5", 5), ({"$ref": "#/$defs/t"}, "a b", "a b"),
        ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, "a b", "a b"),
        ({"allOf": [{"$ref": "#/$defs/t"}], "default": "x"}, "a b", "a b"),
        ({"anyOf": [{"enum": ["a b", "c"]}, {"type": "null"}]}, "a b", "a b"),
        ({"anyOf": [{"enum": ["a b", "c"]}, {"type": "null"}]}, "null", None), ({"enum": ["a", 1, None]}, "1", 1),
        ({"anyOf": [TEXT, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
         '{"a": "x"}', '{"a": "x"}'),
        ({"type": "array", "items": TEXT}, '["a", "b"]', ["a", "b"]), ({"type": "boolean"}, "true", True),
    ],
)  # fmt: skip
def test_values_are_parsed_by_their_schema(tokenizer, schema: dict, text: str, value: object):
    one = tool({"x": schema}, ["x"], **{"$defs": {"t": TEXT}})
    assert parse_call(one, write_call(("x", text)), tokenizer) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": "a"}, "b"), ({"anyOf": [{"enum": ["a", "c"]}, {"type": "null"}]}, "b"), ({"type": "integer"}, "a"),
        ({"enum": ["a", 1]}, "2"), ({"type": ["integer", "null"]}, '"a"'), ({**TEXT, "maxLength": 2}, "abc"),
    ],
)  # fmt: skip
def test_values_against_their_schema_are_not_allowed(tokenizer, schema: dict, text: str):
    assert parse_call(tool({"x": schema}, ["x"]), write_call(("x", text)), tokenizer) is None


THREE = {"a": TEXT, "b": {"type": "integer"}, "c": MAYBE}


@pytest.mark.parametrize("order", ["abc", "cba", "bca", "ab", "ba", "b", "cb"])
def test_parameters_come_in_any_order(tokenizer, order: str):
    """Allow each once, and demand the required ones."""
    values = {"a": ("x y", "x y"), "b": ("5", 5), "c": ("null", None)}
    parameters = [(key, values[key][0]) for key in order]
    assert parse_call(tool(THREE, ["b"]), write_call(*parameters), tokenizer) == {key: values[key][1] for key in order}
    assert parse_call(tool(THREE, ["b"]), write_call(*parameters, parameters[0]), tokenizer) is None
    assert (
        parse_call(tool(THREE, ["b", "z"]), write_call(*[each for each in parameters if each[0] != "b"]), tokenizer)
        is None
    )


def test_named_arguments_quote_only_strings(tokenizer):
    one = tool(THREE, ["b"])
    for inside, value in (('c="x", b=5', {"c": "x", "b": 5}), ("b=5, c=null", {"b": 5, "c": None})):
        assert parse_call(one, f"<|tool_call_start|>[f({inside})]<|tool_call_end|>", tokenizer, LFM2) == value


def test_many_optional_parameters_come_in_any_order(tokenizer):
    """Use the first of a repeated optional one; a required one comes once."""
    many = tool({f"p{number}": TEXT for number in range(30)}, ["p3", "p20"])
    parameters = [(f"p{number}", "x") for number in (0, 3, 7, 20, 29)]
    assert parse_call(many, write_call(*parameters), tokenizer) == dict(parameters)
    assert parse_call(many, write_call(*reversed(parameters)), tokenizer) == dict(parameters)
    assert parse_call(many, write_call(*parameters, ("p29", "y")), tokenizer) == dict(parameters)
    assert parse_call(many, write_call(*parameters, ("p3", "y")), tokenizer) is None
    assert parse_call(many, write_call(("p0", "x"), ("p20", "x")), tokenizer) is None


def test_many_required_parameters_keep_the_order_of_the_schema(tokenizer):
    many = tool({f"p{number}": TEXT for number in range(9)}, [f"p{number}" for number in range(7)])
    parameters = [(f"p{number}", "x") for number in (0, 1, 2, 3, 4, 5, 6, 8)]
    assert parse_call(many, write_call(*parameters), tokenizer) == dict(parameters)
    assert parse_call(many, write_call(*reversed(parameters)), tokenizer) is None


def test_python_literals_are_accepted_where_the_schema_allows(tokenizer):
    """Read True and None as booleans and nulls, but keep strings."""
    kinds = {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"]}, "c": TEXT, "d": {"enum": [True, 5]}}
    text = write_call(("a", "True"), ("b", "None"), ("c", "True"), ("d", "True"))
    assert parse_call(tool(kinds, []), text, tokenizer) == {"a": True, "b": None, "c": "True", "d": True}
    for odd in (("b", "True"), ("d", "False"), ("a", "None")):
        assert parse_call(tool(kinds, []), write_call(odd), tokenizer) is None


def test_unnamed_parameters_are_allowed_in_open_schemas(tokenizer):
    anything = Tool("f", "", {"type": "object", "additionalProperties": True})
    text = write_call(("city", "New York"), ("days", "5"), ("where.to", '{"a": 1}'))
    assert parse_call(anything, text, tokenizer) == {"city": "New York", "days": 5, "where.to": {"a": 1}}
    numbers = tool({"a": TEXT}, ["a"], additionalProperties={"type": "integer"})
    assert parse_call(numbers, write_call(("x", "5"), ("a", "5"), ("ab", "6")), tokenizer) == {
        "x": 5,
        "a": "5",
        "ab": 6,
    }
    assert parse_call(numbers, write_call(("a", "5"), ("x", "y")), tokenizer) is None
    assert parse_call(numbers, write_call(("x", "5")), tokenizer) is None
    assert parse_call(numbers, write_call(("a", "5"), ("a", "6")), tokenizer) is None
    closed = tool({"a": TEXT})
    assert parse_call(closed, write_call(("x", "5")), tokenizer) is None
    assert parse_call(closed, write_call(("x", "5")), tokenizer, additional_properties=True) == {"x": 5}


def test_the_first_of_a_repeated_unnamed_parameter_counts(tokenizer):
    anything = Tool("f", "", {"type": "object", "additionalProperties": True})
    assert parse_call(anything, write_call(("x", "5"), ("x", "6"), ("y", "7")), tokenizer) == {"x": 5, "y": 7}
