"""Test graders: right and wrong answers, and refused records."""

import pytest

from localllm.errors import UsageError
from localllm.services.evaluation.questions import GRADERS, QuestionSet, require_gradable
from localllm.services.records.lines import Record
from localllm.services.tools.confined_python import describe_obstacle

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
HUMAN_EVAL = {
    "prompt": "def half(x):\n", "entry_point": "half", "test": "def check(candidate):\n    assert candidate(4) == 2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("grader", "record", "right", "wrong"),
    [
        ("exact", {"answer": "Paris"}, ["Paris", " Paris\n"], ["paris", "Paris."]),
        ("exact", {"answer": ["Paris", "Lutetia"], "ignore_case": True}, ["PARIS", "lutetia"], ["Rome"]),
        ("number", {"answer": 1234.5}, ["It is 1,234.5.", "7, no: 1234.50"], ["1234", "none", "1234.5 or 7"]),
        ("number", {"answer": "-3", "tolerance": 0.5}, ["-3.25", "x = -2.5"], ["3", "-3.6"]),
        ("choice", {"answer": "B"}, ["B", "(b)", "The answer is B.", "**B**"], ["A", "A or B", "a big one", ""]),
        ("choice", {"answer": "yes", "choices": ["yes", "no"]}, ["Yes", "yes, it is"], ["No.", "yes and no", "maybe"]),
        ("regex", {"answer": r"^\d{3}$"}, ["123"], ["1234", "a 123"]),
        ("json", {"schema": SCHEMA}, ['{"a": 1}', 'Here:\n```json\n{"a": 1}\n```\n'], ['{"a": "1"}', "{}", "no"]),
        ("json", {"answer": {"a": [1, 2]}}, ['{"a":[1,2]}'], ['{"a": [2, 1]}', "[" * 100_000]),
    ],
)
def test_graders_tell_right_answers_from_wrong_ones(grader: str, record: dict, right: list[str], wrong: list[str]):
    assert require_gradable(record | {"grader": grader}, "exact") == grader
    assert [GRADERS[grader](record, text) for text in right] == [""] * len(right)
    assert all(GRADERS[grader](record, text) for text in wrong)


@pytest.mark.skipif(bool(describe_obstacle()), reason="programs cannot be confined here")
def test_programs_are_graded_by_running_their_tests():
    grade, double = GRADERS["program"], {"test": "assert double(4) == 8"}
    assert grade(double, "So:\n```python\ndef double(x):\n    return 2 * x\n```") == ""
    assert grade(double, "def double(x):\n    return x") == "AssertionError"
    assert grade(HUMAN_EVAL, "```python\n    return x / 2\n```") == "", "the prompt goes on"
    assert grade(HUMAN_EVAL, "```python\ndef half(x):\n    return x / 2\n```") == ""
    assert "not permitted" in grade(double, "import socket\nsocket.socket()")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"grader": "best"},
            '"grader" must be exact, number, choice, regex, json, program, likelihood or ',
        ),
        ({}, "the grader exact needs the field 'answer'"),
        ({"grader": "json"}, "the grader json needs the field 'schema' or 'answer'"),
        ({"grader": "program"}, "the grader program needs the field 'test'"),
        ({"grader": "program", "test": "", "entry_point": "f"}, '"entry_point" needs the field "prompt"'),
        ({"answer": 5}, '"answer" must be a string or a list of strings, not 5'),
        ({"answer": "five", "grader": "number"}, "\"answer\" must be a number, not 'five'"),
        ({"answer": "E", "grader": "choice"}, "\"answer\" must be one of the choices, not 'E'"),
        ({"answer": "E", "grader": "choice", "choices": "E"}, '"choices" must be a list of strings'),
        ({"answer": "(", "grader": "regex"}, '"answer" must be a regular expression: '),
    ],
)
def test_records_that_cannot_be_graded_are_refused(record: dict, message: str):
    with pytest.raises(UsageError) as error:
        require_gradable(record, "exact")
    assert str(error.value).startswith(message)


def test_an_invalid_json_schema_is_refused():
    with pytest.raises(UsageError, match='"schema" must be a JSON schema'):
        GRADERS["json"]({"schema": {"type": "text"}}, "1")


def test_a_wrong_cut_answer_is_quoted_in_its_reason():
    questions = QuestionSet([Record(1, {"prompt": "a", "answer": "b"})], "exact", "q.jsonl")
    result = {"id": 1, "error": "cut", "output": '{"a": ', "input": {"prompt": "a", "answer": "b"}}
    assert questions.grade([result]) == {1: "cut: '{\"a\": '"}
