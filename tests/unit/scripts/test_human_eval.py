"""Test how answers to HumanEval's tasks become programs."""

import gzip
import json
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from human_eval import Task, judge_all, read_tasks, text_of

from localllm.services.evaluation.questions import assemble_program
from localllm.services.tools.confined_python import describe_obstacle

PROMPT = 'import math\n\ndef helper(x):\n    return math.sqrt(x)\n\ndef root(x):\n    """The root."""\n'
TASK = Task("T/0", PROMPT, "root", "def check(candidate):\n    assert candidate(16) == 4")
WHOLE = "def root(x):\n    return helper(x)"
ANSWERS = {
    "a block": f"Here it is:\n```python\n{WHOLE}\n```\nIt works.",
    "a block that was cut": f"```python\n{WHOLE}",
    "the second block": f"Call it:\n```python\nroot(4)\n```\n```python\n{WHOLE}\n```",
    "code alone": WHOLE,
    "how it goes on": "    return helper(x)\n",
    "how it goes on, in a block": "```\n    return helper(x)\n```",
}


@pytest.mark.skipif(bool(describe_obstacle()), reason="programs cannot be confined here")
def test_answers_in_any_form_are_judged():
    tasks = [TASK._replace(task_id=name) for name in [*ANSWERS, "wrong", "not asked"]]
    outcomes = judge_all(tasks, ANSWERS | {"wrong": "```python\ndef root(x):\n    return x\n```"})
    assert {name: outcome.passed for name, outcome in outcomes.items()} == {name: name != "wrong" for name in outcomes}
    assert len(outcomes) == len(ANSWERS) + 1 and outcomes["wrong"].reason == "AssertionError"


def test_code_includes_what_precedes_the_function():
    assert assemble_program(TASK._asdict(), ANSWERS["a block"]).startswith("import math\n\ndef helper")


def test_code_is_taken_out_of_json():
    assert text_of(json.dumps({"code": WHOLE}), True) == WHOLE
    assert text_of('{"code": "def', True) == '{"code": "def'
    assert text_of("{}", False) == "{}"


def test_tasks_are_read_from_a_compressed_file(tmp_path):
    row = {**TASK._asdict(), "canonical_solution": "    return helper(x)"}
    with gzip.open(tmp_path / "tasks.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    assert read_tasks(tmp_path / "tasks.gz") == [TASK]
