"""Test the built-in model: its training text excludes the scored questions, and it knows its subject."""

import sys

import pytest
from project import ROOT

import localllm

sys.path.insert(0, str(ROOT / "scripts" / "train"))

import guide_text
import score_guide

SETS = sorted((ROOT / "scripts" / "train").glob("guide_questions*.toml"))


def ask(question: str) -> str:
    with localllm.open(localllm.builtin_model()) as model:
        return "".join(model.chat([{"role": "user", "content": question}], max_tokens=80, temperature=0))


@pytest.mark.parametrize("path", SETS, ids=[path.stem for path in SETS])
def test_questions_have_rules_that_some_answer_meets(path):
    """Demand something, and not only what is forbidden."""
    known = [answer for topic in guide_text.TOPICS.values() for answer in guide_text.answers_of(topic)]
    for check in score_guide.checks(path):
        assert not check.accepts("")
        assert any(check.accepts(answer) for answer in [*known, guide_text.FOREIGN_ANSWER]), check.question


def test_the_training_text_excludes_the_questions():
    asked = [check for path in SETS for check in score_guide.checks(path)]
    text = [question for turns in guide_text.conversations(seed=7, count=3000) for question, _ in turns.turns]
    assert len(text) > 3000 and not score_guide.leaked(text, asked)
    assert score_guide.leaked(["Does it work, localllm, on Windows?", "does localllm WORK on windows"], asked)


@pytest.mark.parametrize("number", [2, 4, 7])
def test_the_guide_knows_exit_codes(number: int):
    assert f"code {number} means" in ask(f"What is exit code {number}?")


def test_the_guide_does_not_answer_other_questions():
    assert ask("Who was Napoleon?") == guide_text.FOREIGN_ANSWER
