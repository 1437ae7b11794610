"""Parameters that have marks of their own, as Qwen3-Coder writes them: texts as they are, in any order, and others than
a schema names where it allows them.
"""

from typing import Any

import jsonschema
import pytest
import tiny_model

from localllm import api
from localllm.generation.tools.tool_call_format import ToolCallFormat
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse
from tests.unit.generation.tools.test_tool_grammar import CODER, LFM2, read


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return api.open_tokenizer(tiny_model.write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


TEXT = {"type": "string"}
MAYBE = {"anyOf": [TEXT, {"type": "null"}], "default": None}


def tool(properties: dict, required: list[str] | None = None, **more: Any) -> Tool:
    return Tool("f", "", {"type": "object", "properties": properties, "required": required or [], **more})


def coder(*given: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def arguments(tool: Tool, text: str, tokenizer, format: ToolCallFormat = CODER, **use: Any) -> dict | None:
    """What a call says; None if the model could not write it."""
    calls = ToolGrammar(ToolUse([tool], "required", **use), format, tokenizer)
    matcher = calls.matcher(tokenizer.vocab_size)
    if not matcher.accept_text(text) or not (matcher.is_complete or matcher.allowed_mask()[[*tokenizer.end_ids]].any()):
        return None
    said, [(name, found)] = read(calls.reader(), text)
    assert (said, name) == ("", "f")
    jsonschema.validate(found, dict(tool.parameters))
    return found


@pytest.mark.parametrize(
    ("schema", "said", "value"),
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
def test_values(tokenizer, schema: dict, said: str, value: object):
    one = tool({"x": schema}, ["x"], **{"$defs": {"t": TEXT}})
    assert arguments(one, coder(("x", said)), tokenizer) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": "a"}, "b"), ({"anyOf": [{"enum": ["a", "c"]}, {"type": "null"}]}, "b"), ({"type": "integer"}, "a"),
        ({"enum": ["a", 1]}, "2"), ({"type": ["integer", "null"]}, '"a"'), ({**TEXT, "maxLength": 2}, "abc"),
    ],
)  # fmt: skip
def test_values_that_are_none(tokenizer, schema: dict, said: str):
    assert arguments(tool({"x": schema}, ["x"]), coder(("x", said)), tokenizer) is None


THREE = {"a": TEXT, "b": {"type": "integer"}, "c": MAYBE}


@pytest.mark.parametrize("order", ["abc", "cba", "bca", "ab", "ba", "b", "cb"])
def test_any_order(tokenizer, order: str):
    """Each at most once, and those that are required always."""
    values = {"a": ("x y", "x y"), "b": ("5", 5), "c": ("null", None)}
    given = [(key, values[key][0]) for key in order]
    assert arguments(tool(THREE, ["b"]), coder(*given), tokenizer) == {key: values[key][1] for key in order}
    assert arguments(tool(THREE, ["b"]), coder(*given, given[0]), tokenizer) is None
    assert arguments(tool(THREE, ["b", "z"]), coder(*[each for each in given if each[0] != "b"]), tokenizer) is None


def test_words(tokenizer):
    """The same where texts are in quotes and others are not."""
    one = tool(THREE, ["b"])
    for inside, value in (('c="x", b=5', {"c": "x", "b": 5}), ("b=5, c=null", {"b": 5, "c": None})):
        assert arguments(one, f"<|tool_call_start|>[f({inside})]<|tool_call_end|>", tokenizer, LFM2) == value


def test_many_parameters_come_in_any_order(tokenizer):
    """The first of an optional one counts; what is required comes once."""
    many = tool({f"p{number}": TEXT for number in range(30)}, ["p3", "p20"])
    given = [(f"p{number}", "x") for number in (0, 3, 7, 20, 29)]
    assert arguments(many, coder(*given), tokenizer) == dict(given)
    assert arguments(many, coder(*reversed(given)), tokenizer) == dict(given)
    assert arguments(many, coder(*given, ("p29", "y")), tokenizer) == dict(given)
    assert arguments(many, coder(*given, ("p3", "y")), tokenizer) is None
    assert arguments(many, coder(("p0", "x"), ("p20", "x")), tokenizer) is None


def test_many_that_are_required_come_in_the_schemas_order(tokenizer):
    many = tool({f"p{number}": TEXT for number in range(9)}, [f"p{number}" for number in range(7)])
    given = [(f"p{number}", "x") for number in (0, 1, 2, 3, 4, 5, 6, 8)]
    assert arguments(many, coder(*given), tokenizer) == dict(given)
    assert arguments(many, coder(*reversed(given)), tokenizer) is None


def test_words_of_python(tokenizer):
    """As templates write booleans and nulls, where a schema allows these; a text is a text."""
    kinds = {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"]}, "c": TEXT, "d": {"enum": [True, 5]}}
    given = coder(("a", "True"), ("b", "None"), ("c", "True"), ("d", "True"))
    assert arguments(tool(kinds, []), given, tokenizer) == {"a": True, "b": None, "c": "True", "d": True}
    for odd in (("b", "True"), ("d", "False"), ("a", "None")):
        assert arguments(tool(kinds, []), coder(odd), tokenizer) is None


def test_parameters_that_a_schema_does_not_name(tokenizer):
    anything = Tool("f", "", {"type": "object", "additionalProperties": True})
    given = coder(("city", "New York"), ("days", "5"), ("where.to", '{"a": 1}'))
    assert arguments(anything, given, tokenizer) == {"city": "New York", "days": 5, "where.to": {"a": 1}}
    numbers = tool({"a": TEXT}, ["a"], additionalProperties={"type": "integer"})
    assert arguments(numbers, coder(("x", "5"), ("a", "5"), ("ab", "6")), tokenizer) == {"x": 5, "a": "5", "ab": 6}
    assert arguments(numbers, coder(("a", "5"), ("x", "y")), tokenizer) is None
    assert arguments(numbers, coder(("x", "5")), tokenizer) is None
    assert arguments(numbers, coder(("a", "5"), ("a", "6")), tokenizer) is None
    closed = tool({"a": TEXT})
    assert arguments(closed, coder(("x", "5")), tokenizer) is None
    assert arguments(closed, coder(("x", "5")), tokenizer, additional_properties=True) == {"x": 5}


def test_what_comes_twice_counts_once(tokenizer):
    anything = Tool("f", "", {"type": "object", "additionalProperties": True})
    assert arguments(anything, coder(("x", "5"), ("x", "6"), ("y", "7")), tokenizer) == {"x": 5, "y": 7}
