"""Test the graders of eval that compare the log probabilities of choices."""

import json
from math import fsum
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.errors import UsageError
from localllm.services.evaluation.questions import require_gradable

CHOICES = ["Paris", "a village in the north", "Rome"]


def evaluate(cli: Any, tiny: str, folder: Path, *words: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask one question; return its record in the output, and the report's figures."""
    question = {"prompt": "The capital of France is", "choices": CHOICES, "answer": 0, **fields}
    (folder / "questions.jsonl").write_text(json.dumps({k: v for k, v in question.items() if v is not None}) + "\n")
    answers = folder / "answers.jsonl"
    code, out, err = cli("eval", tiny, str(folder / "questions.jsonl"), "-o", str(answers), "--json", *words)
    assert code == 0, err
    return json.loads(answers.read_text()), json.loads(out)["models"][0]


def test_a_choice_has_the_log_probabilities_of_its_tokens_after_the_prompt(cli, tiny: str, tmp_path: Path):
    record, report = evaluate(cli, tiny, tmp_path, "--grader", "likelihood")
    with localllm.open(tiny) as model:
        for choice in record["choices"]:
            scores = model.logprobs(f"The capital of France is {choice['text']}")
            tokens = [token.logprob for token in scores if token.end > len("The capital of France is")]
            assert choice["logprob"] == pytest.approx(fsum(tokens), abs=0.02)
            assert choice["logprob_per_byte"] == choice["logprob"] / len(choice["text"])
    likeliest = max(record["choices"], key=lambda choice: choice["logprob"])
    assert record["output"] == likeliest["text"] and report["correct"] == (likeliest["text"] == "Paris")


def test_graders_compare_sums_or_sums_per_byte_of_the_same_answers(cli, tiny: str, tmp_path: Path):
    chosen = {}
    for grader, key in (("likelihood", "logprob"), ("likelihood_per_byte", "logprob_per_byte")):
        right = [
            answer for answer in range(len(CHOICES))
            if evaluate(cli, tiny, tmp_path, "--redo", "--grader", grader, answer=answer)[1]["correct"]
        ]  # fmt: skip
        record, _ = evaluate(cli, tiny, tmp_path, "--redo", "--grader", grader)
        best = max(range(len(CHOICES)), key=lambda index: record["choices"][index][key])
        assert right == [best]
        chosen[grader] = best
    assert len({*chosen.values()}) == 2, "otherwise the test shows nothing"


def test_answers_are_graded_anew_by_the_other_norm_and_not_by_other_graders(cli, tiny: str, tmp_path: Path):
    first, _ = evaluate(cli, tiny, tmp_path, "--grader", "likelihood", answer="Rome")
    second, _ = evaluate(cli, tiny, tmp_path, "--grader", "likelihood_per_byte", answer="Rome")
    assert first == second
    code, _, err = cli(
        "eval", tiny, str(tmp_path / "questions.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "--grader", "choice"
    )
    assert code == 2 and "answers.jsonl" in err


def test_spaces_between_prompt_and_choice_are_counted_once(cli, tiny: str, tmp_path: Path):
    ways: list[dict[str, Any]] = [
        {}, {"prompt": "The capital of France is "}, {"choices": [f" {choice}" for choice in CHOICES]},
        {"delimiter": " "},
    ]  # fmt: skip
    scores = []
    for fields in ways:
        record, _ = evaluate(cli, tiny, tmp_path, "--redo", "--grader", "likelihood", **fields)
        scores.append([choice["logprob"] for choice in record["choices"]])
    assert scores == [scores[0]] * len(ways)
    record, _ = evaluate(cli, tiny, tmp_path, "--redo", "--grader", "likelihood", delimiter="")
    assert record["choices"][0]["logprob"] != scores[0][0]


def test_messages_go_through_the_chat_template(cli, tiny: str, tmp_path: Path):
    messages = [{"role": "user", "content": "Say yes or no."}]
    record, _ = evaluate(cli, tiny, tmp_path, prompt=None, messages=messages, grader="likelihood")
    with localllm.open(tiny) as model:
        expected = [choice.logprob for choice in model.choose(messages, CHOICES)]
    assert sorted(choice["logprob"] for choice in record["choices"]) == pytest.approx(sorted(expected), abs=0.02)


def test_a_file_may_mix_scored_and_answered_questions(cli, tiny: str, tmp_path: Path):
    lines = [{"prompt": "a", "answer": "(?s).*", "grader": "regex"}, {"prompt": "b", "answer": "A", "id": "x"}]
    (tmp_path / "mixed.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines * 1))
    code, out, err = cli("eval", tiny, str(tmp_path / "mixed.jsonl"), "--grader", "likelihood", "-n", "2", "--json")
    assert (code, json.loads(out)["models"][0]["total"]) == (0, 2), err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer": 3}, "one of the choices or its index, from 0, not 3"),
        ({"answer": True}, "not True"),
        ({"answer": "Madrid"}, "not 'Madrid'"),
        ({"choices": ["one"], "answer": "one"}, "two or more different strings"),
        ({"choices": ["a", "a"], "answer": "a"}, "two or more different strings"),
        ({"answer": 0, "delimiter": 1}, '"delimiter" must be a string'),
    ],
)
def test_invalid_questions_are_refused_with_the_field(fields: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        require_gradable({"prompt": "a", "choices": CHOICES, **fields}, "likelihood")
