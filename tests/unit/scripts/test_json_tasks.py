"""Test the judging of the forty JSON questions."""

import json
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from json_tasks import JsonTask, is_right, read_json_tasks

from localllm.generation.constraints.constraint import Constraint

TASKS = read_json_tasks()


def take_one_choice(expected):
    """Return an expected value with one choice of each long list of choices."""
    if isinstance(expected, list):
        return [
            take_one_choice({"any": each["any"][i:]} if is_choice(each) else each) for i, each in enumerate(expected)
        ]
    if is_choice(expected):
        return take_one_choice(expected["any"][0])
    if isinstance(expected, dict):
        return {name: take_one_choice(each) for name, each in expected.items()}
    return expected


def is_choice(expected) -> bool:
    return isinstance(expected, dict) and [*expected] == ["any"] and len(expected["any"]) > 3


def take_first_choices(expected):
    """Replace each short list of choices by its first."""
    if isinstance(expected, dict) and [*expected] == ["any"]:
        return take_first_choices(expected["any"][0])
    if isinstance(expected, dict):
        return {name: take_first_choices(each) for name, each in expected.items()}
    return [take_first_choices(each) for each in expected] if isinstance(expected, list) else expected


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_expected_values_are_judged_right_and_fit_the_schema(task):
    import jsonschema

    value = take_first_choices(take_one_choice(task.expect))
    jsonschema.validate(value, task.schema)
    assert is_right(task, json.dumps(value))
    assert Constraint.from_schema(task.schema)


def test_wrong_answers_are_judged_wrong():
    task = JsonTask("id", "?", {}, {"name": {"any": ["Rome", "Roma"]}, "sizes": [1, 2], "flag": True})
    right = {"name": " rome. ", "sizes": [1, 2.0], "flag": True, "more": 1}
    assert is_right(task, json.dumps(right))
    for change in ({"name": "Paris"}, {"sizes": [2, 1]}, {"sizes": [1]}, {"flag": 1}, {"name": None}, {"sizes": "12"}):
        assert not is_right(task, json.dumps(right | change))
    assert not is_right(task, "{") and not is_right(task, "[]")
    assert not is_right(JsonTask("id", "?", {}, [{"any": [1, 2]}, {"any": [1, 2]}]), "[1, 1]")
