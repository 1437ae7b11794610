"""Test schemas as real generators write them: annotations are ignored, and objects are closed by default."""

import ipaddress
import json
import re
import uuid
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from served import scripted, serving
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.generation.constraints.constraint import Constraint, matches_schema
from localllm.generation.constraints.schemas import make_exact
from localllm.generation.tools.tool_call_format import GENERIC
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse
from tests.unit.generation.tools.test_tool_grammar import QWEN

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}, "v": {"type": "integer"}}}


def takes(schema: dict, value: object, is_open: bool = False) -> bool:
    return matches_schema(
        json.dumps(value), {**make_exact(schema, is_open), "x-guidance": {"lenient": False, "coerce_one_of": False}}
    )


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (A, [{"a": 1}], [{"a": 1, "x": 2}, {}]),
        ({"properties": {"a": {}}}, [{}, {"a": {"x": 1}}], [{"x": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        ({"type": "object"}, [{}, {"x": {"y": 1}}], []),
        ({}, [{"x": 1}, [{"y": 1}], 3], []),
        ({**A, "additionalProperties": True}, [{"a": 1, "x": 2}], []),
        ({**A, "additionalProperties": {"type": "string"}}, [{"a": 1, "x": "y"}], [{"a": 1, "x": 2}]),
        ({**A, "required": ["a", "z"]}, [{"a": 1, "z": [2]}], [{"a": 1}, {"a": 1, "z": 2, "y": 3}]),
        ({**A, "minProperties": 3}, [{"a": 1, "x": 2, "y": 3}], [{"a": 1}]),
        ({"patternProperties": {"^x": {"type": "integer"}}}, [{}, {"x1": 2}], [{"y": 2}, {"x": "y"}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "x": 2}]]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "x": 1}]),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, [{"a": 1, "b": 2, "x": 3}], []),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
        ({"properties": {"c": {}}, "required": ["c"], "anyOf": [A, B]}, [{"c": 1, "a": 1}, {"c": 1, "b": 1}],
         [{"c": 1, "a": 1, "b": 1}, {"c": 1, "a": 1, "x": 1}]),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"a": 1, "x": 2}]),
        ({"$ref": "#/$defs/A", "properties": {"c": {}}, "$defs": {"A": A}}, [{"c": 0, "a": 1}, {"a": 1}],
         [{"a": 1, "x": 2}]),
        ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, [{"next": {"v": 1}, "v": 2}], [{"next": {"x": 1}}, {"x": 1}]),
        ({"properties": {"n": {"allOf": [{"$ref": "#/$defs/A"}], "title": "N"}}, "$defs": {"A": A}}, [{"n": {"a": 1}}],
         [{"n": {"a": 1, "x": 2}}]),
        ({"allOf": [{"$ref": "#/$defs/C"}, B], "$defs": {"A": A, "C": {"allOf": [{"$ref": "#/$defs/A"}]}}},
         [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "x": 3}, {"a": 1}]),
        ({"allOf": [{"$ref": "#/$defs/N"}], "$defs": {"N": NODE}}, [{"next": {"v": 1}, "v": 2}], [{"next": {"x": 1}}]),
    ],
)  # fmt: skip
def test_objects_have_only_the_properties_of_their_schema(schema: dict, yes: list, no: list):
    assert [takes(schema, value) for value in yes] == [True] * len(yes)
    assert [takes(schema, value) for value in no] == [False] * len(no)


def test_additional_properties_leaves_objects_open():
    assert takes(A, {"a": 1, "x": 2}, is_open=True)


class Person:
    @staticmethod
    def model_json_schema() -> dict:
        return A


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048, chat_template=QWEN)


TEXT = '{"a":1,"x":2}'
NOTHING = [None, {}, {"properties": {}}, {"type": "object"}, {"properties": None, "required": None},
           {"type": "object", "properties": {}, "required": None}, {"type": None, "additionalProperties": False},
           {"type": "object", "description": "none"}]  # fmt: skip
CALLED = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
SCRIPT = {"more": TEXT, "call": CALLED % TEXT, "number": CALLED % 100.5}
ONE = {"a": 1}


def test_python_answers_have_only_the_properties_of_their_schema(path: Path):
    model = scripted(str(path), SCRIPT)
    asked, free = [{"role": "user", "content": "more"}], {"additional_properties": True}
    assert "".join(model.chat(asked, schema=A, **free)) == TEXT
    for schema, more in ((A, {}), (Person, {}), (Person, free)):
        assert json.loads("".join(model.chat(asked, 200, schema=schema, **more))).keys() == {"a"}


@pytest.fixture(scope="module")
def server(path: Path):
    with serving({"scripted": lambda: scripted(str(path), SCRIPT)}) as served:
        yield served


@pytest.mark.parametrize("is_open", [False, True])
def test_every_endpoint_closes_objects_unless_they_are_left_open(server, is_open: bool):
    more = {"additional_properties": True} if is_open else {}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": A}}
    texts = [server.chat("more", response_format=form, max_tokens=200, **more).json["choices"][0]["message"]["content"]]
    body = {"messages": [{"role": "user", "content": "more"}], "max_tokens": 200}
    config = {"format": {"type": "json_schema", "schema": A}}
    texts.append(server.post("/v1/messages", {**body, "output_config": config, **more}).json["content"][0]["text"])
    text = {"format": {"type": "json_schema", "name": "n", "schema": A}}
    reply = server.post("/v1/responses", {"input": "more", "text": text, "max_output_tokens": 200, **more}).json
    texts.append(reply["output"][0]["content"][0]["text"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": A}}]
    choice = server.chat("call", tools=tools, **more).json["choices"][0]
    texts.append(choice["message"]["tool_calls"][0]["function"]["arguments"])
    for text in texts:
        assert (text == TEXT) if is_open else (json.loads(text).keys() == {"a"})


@pytest.mark.parametrize("parameters", NOTHING)
@pytest.mark.parametrize("question", ["number", "call"])
def test_a_tool_without_parameters_takes_an_empty_object(server, parameters, question: str):
    """Refuse numbers and invented names."""
    function = {"name": "f", "parameters": parameters}
    choice = server.chat(question, tools=[{"type": "function", "function": function}]).json["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200}
    tools = [{"name": "f", "input_schema": parameters}]
    assert server.post("/v1/messages", {**body, "tools": tools}).json["content"][0]["input"] == {}


def test_tool_parameters_without_a_type_are_an_object(server):
    function = {"name": "f", "parameters": {"properties": A["properties"], "required": ["a"], "type": None}}
    message = server.chat("call", tools=[{"type": "function", "function": function}]).json["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]).keys() == {"a"}


def test_tool_parameters_that_are_no_object_are_refused():
    for wrong in ({"type": "array"}, {"type": ["string", "null"]}, [], "x"):
        with pytest.raises(UsageError, match="the parameters of f must be a schema of an object"):
            Tool("f", "", wrong)
    assert Tool("f", "", {"type": ["OBJECT", "null"], "properties": {"a": {}}}).parameters["type"] == "object"


def test_run_keeps_objects_closed_unless_additional_properties_are_allowed(path: Path, cli):
    for more, count in (([], {"a"}), (["--additional-properties"], {"a", "b", "c"})):
        schema = json.dumps({**A, "minProperties": 1, "maxProperties": 3})
        _, out, _ = cli("run", path, "-p", "x", "-j", schema, "-s", "3", "-n", "400", *more)
        assert json.loads(out).keys() <= count if not more else "a" in json.loads(out)


C = {"properties": {"x": {"$ref": "#/$defs/c", "properties": {"z": {}}}}}
ROUND = {"$defs": {"c": C, "a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}] * 30}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"allOf": [{"$ref": "#/$defs/b"}] * 30},
        {"propertyNames": {"$ref": "#/$defs/a"}}, {"items": {"$ref": "#/$defs/a"}, "uniqueItems": True},
        {"$ref": "#", "properties": {"x": {}}}, {"$ref": "#/$defs/c", "properties": {"y": {}}},
        {"allOf": [{"$ref": "#", "properties": {"x": {}}}] * 30},
        {"properties": [{}]}, {"allOf": [{"properties": [{}]}]}, {"anyOf": 5, "properties": {}}, {"allOf": {"a": 1}},
        {"properties": {"x": {}}, "required": [{}, 5]}, {"uniqueItems": True, "minItems": "x", "items": {"enum": [1]}},
        {"type": [{}], "properties": {"x": {"type": [5]}}}, {"$ref": 5, "properties": {"x": {}}}, {"enum": 5},
    ],
)  # fmt: skip
def test_circular_and_invalid_schemas_get_an_answer_or_one_line(server, schema: dict):
    """Never show the grammar in the error."""
    schema = {**schema, **ROUND, "type": schema.get("type", "object")}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    function = {"name": "f", "parameters": {**schema, "type": "object"}}
    for more in (
        {"response_format": form},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    ):
        reply = server.chat("call", max_tokens=5, **more)
        assert reply.status in (200, 400)
        if reply.status == 400:
            message = reply.json["error"]["message"]
            assert not any(word in message for word in ("%json", "x-guidance", "tool_0", "\n", "whitespace_pattern"))


def test_the_error_of_a_strict_tool_names_the_tool(server):
    function = {"name": "odd", "strict": True, "parameters": {"properties": {"a": {"type": "strin"}}}}
    message = server.chat("x", tools=[{"type": "function", "function": function}]).json["error"]["message"]
    assert message == "tools: odd: the schema cannot be used: Invalid type: strin"


LONG = 10**30
STRING = {"type": "string"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


class Color(Enum):
    RED = "red"
    BLUE = "blue"


CLASSES: list[Any] = [
    Path, pydantic.SecretStr, pydantic.SecretBytes, bytes, set[Color], frozenset[Literal["a", "b"]], set[bool],
    set[str], frozenset[int], set[tuple[int, str]],
    ipaddress.IPv4Network, ipaddress.IPv6Interface, pydantic.IPvAnyAddress, Decimal, re.Pattern, uuid.UUID, Any,
    dict[Color, int], dict[Literal["a"], int], pydantic.FilePath, pydantic.Base64Str, pydantic.Json,
    Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)], Annotated[int, pydantic.Field(lt=LONG, default=LONG)],
]  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES, ids=str)
def test_schemas_of_python_classes_are_accepted(kind: Any):
    Constraint.from_schema(pydantic.create_model("M", x=(kind, ...)))
    Constraint.from_schema(pydantic.create_model("M", x=(list[kind] | None, None)))


@pytest.mark.parametrize("name", ["password", "binary", "byte", "path", "uri-reference", "regex", "foo", "", 5, None])
def test_unknown_formats_are_ignored(name: object):
    for schema in ({"type": "string", "format": name}, {"type": ["string", "null"], "format": name}, {"format": name}):
        assert takes(schema, "a b") and takes({"items": schema, "type": "array"}, ["a b"])
    assert not takes({"type": "string", "format": "date"}, "a b")


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "array", "items": STRING, "uniqueItems": False}, [["a", "a"]], []),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["a"], ["a", "c"]],
         [["a", "a"], ["d"]]),
        ({"items": {"$ref": "#/$defs/B"}, "type": "array", "uniqueItems": True, "$defs": {"B": {"type": "boolean"}}},
         [[True, False], []], [[True, True]]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 1}, [[2]],
         [[], [1, 2]]),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2}, [[1, 3], [1, 2, 3]],
         [[], [3], [3, 3]]),
        ({"type": "array", "items": STRING, "uniqueItems": True, "maxItems": 1}, [["a"], []], [["a", "b"]]),
        ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, [{"a": "b"}], [{"a": 1}]),
        ({"type": ["STRING", "NULL"]}, ["a", None], [1]),
        ({"type": "object", "properties": None, "required": None}, [{}, {"a": 1}], []),
        ({"type": "string", "maxLength": None, "default": LONG}, ["a"], [1]),
        ({"const": None}, [None], [1]), ({"enum": ["a", None]}, ["a", None], [1]),
        ({"properties": {"a": True, "default": {"type": "integer"}}}, [{"a": [1], "default": 2}], [{"default": "x"}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
         [{"a": 1}, {"a": 1, "b": 2}, {}], [{"c": 1}, {"a": "x"}]),
        ({"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}, "additionalProperties": {"type": "integer"}},
         [{"x1": 1}, {}], [{"y": 1}, {"x1": "x"}]),
        ({"type": "object", "propertyNames": STRING}, [{"c": 1}], []),
        ({"type": "integer", "maximum": LONG}, [5, -5, 10**18], ["a"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [5, -5, 9 * 10**18], [10**19]),
        ({"type": "number", "minimum": -LONG, "exclusiveMaximum": LONG}, [5.5, -5], []),
        ({"type": "integer", "maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
        ({"type": "integer", "minimum": -(2**53) - 3, "maximum": 0}, [-(2**53) - 2], [-(2**53) - 4]),
        ({"const": LONG}, [LONG], [1]), ({"enum": [10**18, {"a": 10**20}]}, [10**18, {"a": 10**20}], [1]),
        ({"type": "array", "items": [{"type": "integer"}, STRING], "minItems": 2, "maxItems": 2}, [[1, "a"]],
         [[1], [1, 2], [1, "a", 3]]),
        ({"$schema": DRAFT_7, "items": [{"type": "integer"}], "additionalItems": STRING, "type": "array"},
         [[1], [], [1, "a"]], [["a"], [1, 2]]),
        ({"$schema": DRAFT_7, "type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["a", "b"], []],
         [["a", "a"]]),
        ({"properties": {"a": STRING}, "type": "object", "unevaluatedProperties": False}, [{"a": "x"}], [{"b": "x"}]),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
         [1.25], ["a"]),
        ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=[^)(?=]+\d)[\w(]{4,8}$"}, ["Abc1", "A1(b"],
         ["abc1", "Abcd", "A1"]),
    ],
)  # fmt: skip
def test_keywords_accept_and_refuse_the_right_values(schema: dict, yes: list, no: list):
    Constraint.from_schema(schema)
    assert [takes(schema, value) for value in yes] == [True] * len(yes)
    assert [takes(schema, value) for value in no] == [False] * len(no)


def test_true_and_an_empty_schema_allow_any_json_value():
    for schema in (True, "true", {}):
        assert Constraint.from_schema(schema).grammar == Constraint.from_schema({}).grammar


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "false allows no value"), ({"const": 2**53 + 1}, "const has a number that is not exact in 64 bits"),
        ({"enum": [-(2**63)]}, "enum has a number that is not exact"),
        ({"enum": [[{"a": -(2**63) + 1}]]}, "enum has a number that is not exact"),
        ({"const": 10**400}, "const has a number that is not"), ({"const": float("inf")}, "const has a number"),
        ({"type": "integer", "minimum": LONG}, "minimum is beyond 64 bits"),
        ({"type": "integer", "multipleOf": LONG}, f"{LONG} is beyond 64 bits"),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}, "uniqueItems leaves fewer"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, '"propertyNames" is not supported'),
        ({"propertyNames": {"pattern": "x"}, "properties": {"a": {}}}, '"propertyNames" is not supported'),
        ({"type": "array", "contains": STRING}, '"contains" is not supported'), ({"not": {}}, '"not" is not supported'),
        ({"if": {}}, '"if" is not supported'), ({"dependentRequired": {}}, '"dependentRequired" is not supported'),
        ({"$ref": "https://x.org/y"}, "https://x.org/y is another document"), ({"type": "text"}, "Invalid type: text"),
        ({"pattern": "^(?=a)b|c$"}, "look-around"), ({"pattern": "^(?=a(?!b)).$"}, "look-around"),
        ({"pattern": "^(?=a"}, "regular expression is invalid"), ({"anyOf": [{"pattern": "(?<=a)"}]}, "look-around"),
        ({"required": "x"}, "Expected array for 'required'"), ({"properties": []}, "properties must be an object"),
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused_by_name(schema: object, reason: str):
    with pytest.raises(UsageError) as error:
        Constraint.from_schema(schema)
    message = str(error.value)
    assert reason in message and "\n" not in message
    assert not any(word in message for word in ("%json", "%llguidance", "start:", "whitespace_pattern", "grammars"))


def test_tool_calls_ignore_unsupported_keywords_of_their_parameters(tokenizer):
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": STRING, "contains": {}}}}
    matcher = ToolGrammar(ToolUse([Tool("f", "", odd)], "f"), GENERIC, tokenizer).make_matcher(tokenizer.vocab_size)
    assert matcher.accept_text('{"name": "f", "arguments": {"a": ["x"]}}')
    worst = {"type": "object", "properties": {"a": {"not": {}, "const": -(2**63)}}}
    matcher = ToolGrammar(ToolUse([Tool("f", "", worst)], "f"), GENERIC, tokenizer).make_matcher(tokenizer.vocab_size)
    assert matcher.accept_text('{"name": "f", "arguments": {"a": ["x"]}}')
    with pytest.raises(UsageError, match="const has a number that is not exact"):
        ToolGrammar(ToolUse([Tool("f", "", worst, strict=True)], "f"), GENERIC, tokenizer)


def test_run_answers_by_rewritten_schemas(tiny_path: Path, cli, refused):
    letters = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    password = {"type": "string", "format": "password", "maxLength": 3}
    schema = {"type": "object", "properties": {"p": password, "s": letters}, "required": ["p", "s"]}
    code, out, err = cli("run", tiny_path, "-p", "x", "-s", "1", "-n", "300", "-j", json.dumps(schema))
    assert (code, err) == (0, "") and json.loads(out)["s"] in ([], ["a"], ["b"], ["a", "b"])
    refused(["run", tiny_path, "-p", "x", "-j", '{"type": "array", "contains": {}}'], '"contains" is not supported')


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path):
    from localllm import api

    return api.open_tokenizer(tiny_path)
