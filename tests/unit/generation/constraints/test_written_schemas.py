"""Schemas as real generators write them: what says nothing is no reason to refuse one, and nothing becomes another
number.
"""

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

from localllm.errors import UsageError
from localllm.generation.constraints.constraint import Constraint
from localllm.generation.tools.tool_call_format import GENERIC
from localllm.generation.tools.tool_grammar import Tool, ToolGrammar, ToolUse
from tests.unit.generation.constraints.test_closed_schemas import takes

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
def test_fields_of_classes(kind: Any):
    Constraint.of_schema(pydantic.create_model("M", x=(kind, ...)))
    Constraint.of_schema(pydantic.create_model("M", x=(list[kind] | None, None)))


@pytest.mark.parametrize("name", ["password", "binary", "byte", "path", "uri-reference", "regex", "foo", "", 5, None])
def test_other_formats_say_nothing(name: object):
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
def test_what_schemas_mean(schema: dict, yes: list, no: list):
    Constraint.of_schema(schema)
    assert [takes(schema, value) for value in yes] == [True] * len(yes)
    assert [takes(schema, value) for value in no] == [False] * len(no)


def test_any_json():
    for schema in (True, "true", {}):
        assert Constraint.of_schema(schema).grammar == Constraint.of_schema({}).grammar


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "false allows nothing"), ({"const": 2**53 + 1}, "const has a number that is not exact in 64 bits"),
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
def test_what_is_refused_is_refused_by_its_name(schema: object, reason: str):
    with pytest.raises(UsageError) as error:
        Constraint.of_schema(schema)
    told = str(error.value)
    assert reason in told and "\n" not in told
    assert not any(word in told for word in ("%json", "%llguidance", "start:", "whitespace_pattern", "grammars"))


def test_tools_are_held_as_far_as_it_goes_and_fall_over_no_number(tokenizer):
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": STRING, "contains": {}}}}
    matcher = ToolGrammar(ToolUse([Tool("f", "", odd)], "f"), GENERIC, tokenizer).matcher(tokenizer.vocab_size)
    assert matcher.accept_text('{"name": "f", "arguments": {"a": ["x"]}}')
    worst = {"type": "object", "properties": {"a": {"not": {}, "const": -(2**63)}}}
    matcher = ToolGrammar(ToolUse([Tool("f", "", worst)], "f"), GENERIC, tokenizer).matcher(tokenizer.vocab_size)
    assert matcher.accept_text('{"name": "f", "arguments": {"a": ["x"]}}')
    with pytest.raises(UsageError, match="const has a number that is not exact"):
        ToolGrammar(ToolUse([Tool("f", "", worst, strict=True)], "f"), GENERIC, tokenizer)


def test_run(tiny_path: Path, cli):
    letters = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    password = {"type": "string", "format": "password", "maxLength": 3}
    schema = {"type": "object", "properties": {"p": password, "s": letters}, "required": ["p", "s"]}
    code, out, err = cli("run", tiny_path, "-p", "x", "-s", "1", "-n", "300", "-j", json.dumps(schema))
    assert (code, err) == (0, "") and json.loads(out)["s"] in ([], ["a"], ["b"], ["a", "b"])
    code, out, err = cli("run", tiny_path, "-p", "x", "-j", '{"type": "array", "contains": {}}')
    assert (code, out) == (2, "") and '"contains" is not supported' in err


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path):
    from localllm import api

    return api.open_tokenizer(tiny_path)
