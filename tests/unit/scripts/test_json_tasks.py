"""Who answers the forty questions for JSON right."""

import json
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from json_tasks import JsonTask, is_right, read_json_tasks

from localllm.generation.constraints.constraint import Constraint

TASKS = read_json_tasks()


def one_value(expected):
    """A value that is expected: the first of several, another one in each place of a list."""
    if isinstance(expected, list):
        return [one_value({"any": each["any"][i:]} if is_choice(each) else each) for i, each in enumerate(expected)]
    if is_choice(expected):
        return one_value(expected["any"][0])
    if isinstance(expected, dict):
        return {name: one_value(each) for name, each in expected.items()}
    return expected


def is_choice(expected) -> bool:
    return isinstance(expected, dict) and [*expected] == ["any"] and len(expected["any"]) > 3


def settled(expected):
    """The same with the first of each few."""
    if isinstance(expected, dict) and [*expected] == ["any"]:
        return settled(expected["any"][0])
    if isinstance(expected, dict):
        return {name: settled(each) for name, each in expected.items()}
    return [settled(each) for each in expected] if isinstance(expected, list) else expected


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_what_is_expected_is_right(task):
    """And fits the schema."""
    import jsonschema

    value = settled(one_value(task.expect))
    jsonschema.validate(value, task.schema)
    assert is_right(task, json.dumps(value))
    assert Constraint.of_schema(task.schema)


def test_what_is_wrong():
    task = JsonTask("id", "?", {}, {"name": {"any": ["Rome", "Roma"]}, "sizes": [1, 2], "flag": True})
    right = {"name": " rome. ", "sizes": [1, 2.0], "flag": True, "more": 1}
    assert is_right(task, json.dumps(right))
    for change in ({"name": "Paris"}, {"sizes": [2, 1]}, {"sizes": [1]}, {"flag": 1}, {"name": None}, {"sizes": "12"}):
        assert not is_right(task, json.dumps(right | change))
    assert not is_right(task, "{") and not is_right(task, "[]")
    assert not is_right(JsonTask("id", "?", {}, [{"any": [1, 2]}, {"any": [1, 2]}]), "[1, 1]")
