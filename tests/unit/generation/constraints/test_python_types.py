"""Test schemas given as Python types, and answers parsed into their objects."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator
from typing_extensions import TypedDict

import localllm
from localllm.errors import CutError, LocalllmError, UsageError
from localllm.generation.constraints.constraint import Constraint


class Place(BaseModel):
    name: Literal["Rome", "Oslo"]
    size: Annotated[int, Field(ge=0, le=9)]


@dataclasses.dataclass
class Point:
    x: Literal[1, 2]
    y: bool


class Row(TypedDict):
    key: Literal["a"]


class Even(BaseModel):
    value: Literal[1]

    @field_validator("value")
    @classmethod
    def is_even(cls, value: int) -> int:
        raise ValueError("odd")


class Custom:
    def __init__(self, value): ...


KINDS = [Place, Point, Row, list[Place], Literal["yes", "no"], bool, TypeAdapter(Point), Literal[3] | None]


@pytest.fixture(scope="module")
def model(tiny: str):
    with localllm.open(tiny, threads=1, context=512, cache=False) as opened:
        yield opened


def options(kind: object) -> dict:
    """Use a token limit that a random model needs to close its lists."""
    return {"schema": kind, "seed": 1, "max_tokens": 300}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != list[Place]], ids=str)
def test_an_answer_is_parsed_into_the_type(model: localllm.Model, kind):
    answer = model.generate("Hi", **options(kind))
    parsed = answer.parsed
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    assert parsed == adapter.validate_json(answer.text) and answer.finish_reason == "stop"
    (mapped,) = model.map(["Hi"], **options(kind))
    assert mapped.parsed == parsed and type(mapped.parsed) is type(parsed)


def test_an_answer_by_a_dict_schema_is_parsed_into_plain_values(model: localllm.Model):
    answer = model.generate("Hi", schema={"enum": [{"a": 1}]}, max_tokens=40)
    assert answer.parsed == {"a": 1}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_types_are_closed_schemas_even_with_additional_properties(kind):
    assert Constraint.from_schema(kind, additional_properties=True).grammar == Constraint.from_schema(kind).grammar


def test_answers_that_cannot_be_parsed_raise(model: localllm.Model):
    with pytest.raises(UsageError, match="without a schema"):
        _ = model.generate("Hi", 2).parsed
    with pytest.raises(
        CutError, match=r"^the answer is incomplete \(length\) and cannot be parsed: let it end, or raise max_tokens$"
    ):
        _ = model.generate("Hi", 2, schema=Place).parsed
    with pytest.raises(ValidationError, match="odd"):
        _ = model.generate("Hi", schema=Even, max_tokens=60).parsed


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (Custom, "the schema cannot be used: "),
        (len, "the schema cannot be used: "),
        (5, "a JSON schema must be an object, not '5'"),
        ([int], "a JSON schema must be an object"),
    ],
)
def test_classes_that_are_no_type_are_refused(model: localllm.Model, schema: object, message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        model.generate("Hi", 2, schema=schema)


# ---- errors of many, tokens of prompts


def test_map_returns_errors_in_the_order_of_its_prompts(model: localllm.Model):
    prompts: list[Any] = ["", "One", [], "Two " * 2000, "Three", [{"role": "user", "content": 5}]]
    answers = list(model.map(prompts, 2, errors="return", seed=1))
    assert [isinstance(answer, LocalllmError) for answer in answers] == [True, False, True, True, False, True]
    assert answers[1].text == "".join(model.generate("One", 2, seed=1))
    with pytest.raises(LocalllmError):
        list(model.map(prompts, 2))
    assert all(isinstance(answer, UsageError) for answer in model.map([[], []], errors="return"))
    with pytest.raises(UsageError, match="errors must be raise or return"):
        model.map(prompts, errors="ignore")  # type: ignore[call-overload]


def test_count_tokens_counts_strings_messages_and_ids(model: localllm.Model):
    messages = [{"role": "user", "content": "Hi"}]
    assert model.count_tokens("Hi") == len(model.tokenize("Hi", special=True, bos=True))
    assert model.count_tokens([1, 2, 3]) == 3
    assert model.count_tokens(messages) == model.chat(messages, 1).prompt_tokens
