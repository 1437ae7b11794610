"""Test localllm eval: its table, JSON, comparisons, stored answers, and refused command lines."""

import csv
import json
from pathlib import Path

import pytest
from project import ROOT
from tiny_model import write_tiny_model

from localllm.services.evaluation.questions import QuestionSet
from localllm.services.evaluation.scores import compute_mcnemar_p_value, compute_wilson_interval
from localllm.services.records.lines import read_records
from localllm.services.tools.confined_python import describe_obstacle

SHORT = ("-n", 3)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "other.gguf", seed=1))


def outputs(cli, model: str, prompts: list[str]) -> list[str]:
    """Return the greedy answers of `map` in the same batch."""
    records = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    _, out, _ = cli("map", model, *SHORT, "--temp", 0, stdin=records.encode())
    return [json.loads(line)["output"] for line in out.splitlines()]


def write_questions(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_eval_compares_two_models(tiny: str, other: str, tmp_path, cli):
    prompts = ["hello", "world", "hello world", "rld"]
    first, second = outputs(cli, tiny, prompts), outputs(cli, other, prompts)
    assert all(one.strip() != two.strip() for one, two in zip(first, second, strict=True))
    answers = [first[0], first[1], second[2], "neither"]  # of the first: two, of the second: one
    questions = write_questions(
        tmp_path / "q.jsonl",
        *({"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)),
    )
    code, out, _ = cli("eval", tiny, other, questions, *SHORT, "--json", "-o", tmp_path / "a.jsonl")
    facts = json.loads(out)
    assert code == 0 and [(each["correct"], each["total"]) for each in facts["models"]] == [(2, 4), (1, 4)]
    assert [{*each["wrong"]} for each in facts["models"]] == [{"3", "4"}, {"1", "2", "4"}]
    assert facts["comparisons"] == [
        {"first": tiny, "second": other, "only_first": 2, "only_second": 1, "p": compute_mcnemar_p_value(2, 1)}
    ]
    kept = [json.loads(line) for line in (tmp_path / "a-tiny.jsonl").read_text().splitlines()]
    assert [row["output"] for row in kept] == first and (tmp_path / "a-other.jsonl").exists()
    code, out, stderr = cli("eval", tiny, other, questions, *SHORT, "-o", tmp_path / "a.jsonl")
    low, high = compute_wilson_interval(2, 4)
    assert f"{tiny} 2 4 50.0% {100 * low:.1f}% to {100 * high:.1f}%" in " ".join(out.split())
    assert out.endswith(f"{other}: 2 right only by the first, 1 only by the second, p = 1 (McNemar)\n")
    assert "a-tiny.jsonl already answers 4 of 4 questions" in stderr


def test_eval_continues_stored_answers(tiny: str, tmp_path, cli):
    questions = write_questions(tmp_path / "q.jsonl", *({"question": word, "answer": "x"} for word in ("a", "b", "c")))
    kept = tmp_path / "a.jsonl"
    assert cli("eval", tiny, questions, *SHORT, "-o", kept)[0] == 0
    lines = kept.read_text().splitlines(keepends=True)
    changed = json.loads(lines[0]) | {"output": "x"}
    kept.write_text(json.dumps(changed) + "\n" + lines[2][:20])  # the second is missing, the third torn
    code, out, stderr = cli("eval", tiny, questions, *SHORT, "-o", kept, "--json")
    assert code == 0 and json.loads(out)["models"][0]["correct"] == 1 and "already answers 1 of 3 questions" in stderr
    assert sorted(json.loads(line)["id"] for line in kept.read_text().splitlines()) == [1, 2, 3]
    code, _, error = cli("eval", tiny, questions, "-n", 4, "-o", kept)
    assert code == 2 and "answers by another set of options" in error
    code, out, _ = cli("eval", tiny, questions, *SHORT, "-o", kept, "--redo", "--json")
    assert json.loads(out)["models"][0]["correct"] == 0, "the changed answer is replaced"


def test_a_question_beyond_the_context_counts_as_wrong(tiny: str, tmp_path, cli):
    questions = write_questions(
        tmp_path / "q.jsonl",
        {"prompt": "hello " * 400, "answer": "x"},
        {"prompt": "a", "grader": "regex", "answer": ""},
    )
    code, out, error = cli("eval", tiny, questions, *SHORT, "-c", 64, "--json")
    facts = json.loads(out)["models"][0]
    assert code == 6 and (facts["correct"], facts["total"]) == (1, 2) and "context" in facts["wrong"]["1"]
    assert error.endswith("1 question had no answer and counted as wrong; --json lists the reasons\n")


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        ("", "", "q.jsonl: the file contains no questions"),
        ('{"prompt": "a"}', "", "q.jsonl: record 1: the grader exact needs the field 'answer'"),
        ('{"id": "x", "prompt": "a"}', "--grader number", "q.jsonl: record 'x': the grader number needs"),
        ('{"prompt": "a", "answer": "b"', "", "q.jsonl: line 1 is not JSON"),
        ("[1]", "", "q.jsonl: line 1 is not a JSON object"),
        ('{"prompt": "a", "answer": "b"}', "--redo", "--redo replaces the answers in the output file: add -o FILE"),
    ],
)
def test_eval_refuses_invalid_questions(tiny: str, tmp_path, lines: str, words: str, message: str, refused):
    (tmp_path / "q.jsonl").write_text(lines)
    refused(["eval", tiny, tmp_path / "q.jsonl", *words.split()], message)


def test_eval_needs_a_model_and_questions(tiny: str, cli):
    assert cli("eval", tiny) == (
        2, "", "localllm: error: give MODEL and QUESTIONS: localllm eval MODEL QUESTIONS.jsonl\n"
    )  # fmt: skip
    code, _, error = cli("eval", tiny, tiny, __file__, "-o", "a.jsonl")
    assert code == 2 and "two models have the same name" in error


@pytest.mark.skipif(bool(describe_obstacle()), reason="programs cannot be confined here")
def test_eval_answers_the_questions_of_the_docs():
    page = (ROOT / "docs" / "eval.md").read_text(encoding="utf-8")
    lines = page.split("```json\n")[1].split("```")[0]
    questions = QuestionSet(read_records(lines.encode(), "eval.jsonl"), "exact", "eval.jsonl")
    assert {*questions.graders.values()} == {
        "exact", "number", "choice", "regex", "json", "program", "likelihood",
    }  # fmt: skip
    answers = ["Paris", "144", "B", "Yes.", "red", '{"city": "Rome"}', "Madrid", "def double(x):\n    return 2 * x"]
    choices = [{"text": "Madrid", "logprob": -1.0}, {"text": "Rome", "logprob": -2.0}]
    results = [
        {"id": record.id, "input": record.input, "output": answer, "choices": choices}
        for record, answer in zip(questions.records, answers, strict=True)
    ]
    assert set(questions.grade(results).values()) == {""}


def test_groups_are_counted_apart(tiny: str, tmp_path: Path, cli):
    questions = [{"prompt": "a", "grader": "regex", "answer": answer, "group": group}
                 for answer, group in (("", "x"), ("^never$", "x"), ("", 7))]  # fmt: skip
    questions.append({"prompt": "a", "grader": "regex", "answer": "^never$"})
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in questions), encoding="utf-8")
    lines = cli("eval", tiny, path, "-n", "2")[1].splitlines()
    assert [line.split()[0:4] for line in lines[1:]] == [
        [tiny, "2", "4", "50.0%"], ["x", "1", "2", "50.0%"], ["7", "1", "1", "100.0%"],
    ]  # fmt: skip
    rows = [*csv.reader(cli("eval", tiny, path, "-n", "2", "--csv")[1].splitlines())]
    assert rows[0] == ["model", "group", "right", "of", "share", "low", "high"]
    assert [row[:5] for row in rows[1:]] == [
        [tiny, "", "2", "4", "0.5"], [tiny, "x", "1", "2", "0.5"], [tiny, "7", "1", "1", "1.0"],
    ]  # fmt: skip
    facts = json.loads(cli("eval", tiny, path, "-n", "2", "--json")[1])["models"][0]
    assert {name: (each["correct"], each["total"]) for name, each in facts["groups"].items()} == {
        "x": (1, 2), "7": (1, 1),
    }  # fmt: skip
    assert cli("eval", tiny, path, "--csv", "--json")[0] == 2
