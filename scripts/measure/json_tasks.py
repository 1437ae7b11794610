"""Read and grade forty questions with known JSON answers: tests/goldens/json_tasks.jsonl.

A line has id, prompt, schema and expect, the value that the answer's JSON must equal. Strings are compared without
regard to case, surrounding spaces and a final full stop; {"any": [...]} accepts one of several values. A list with
duplicates is wrong.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "json_tasks.jsonl"


class JsonTask(NamedTuple):
    """A question, its schema and the expected value."""

    id: str
    prompt: str
    schema: Any
    expect: Any


def read_json_tasks(path: Path = FILE) -> list[JsonTask]:
    """Read all questions in order."""
    return [JsonTask(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def is_right(task: JsonTask, answer: str) -> bool:
    """Return whether an answer's text is the expected JSON."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    if isinstance(value, list) and len({json.dumps(each) for each in value}) < len(value):
        return False  # no task asks for the same thing twice
    return is_equal(value, task.expect)


def is_equal(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected one, or one of several."""
    if isinstance(expected, dict) and [*expected] == ["any"]:
        return any(is_equal(value, each) for each in expected["any"])
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(is_equal(value.get(name), each) for name, each in expected.items())
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(is_equal(*pair) for pair in zip(value, expected, strict=True))
        )
    if isinstance(expected, str):
        return isinstance(value, str) and plain(value) == plain(expected)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def plain(text: str) -> str:
    return text.strip().removesuffix(".").casefold()
