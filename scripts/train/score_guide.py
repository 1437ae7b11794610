"""Score the built-in model on questions that are not in its training text.

    python scripts/train/score_guide.py [--questions FILE] [model.gguf]

guide_questions.toml has 60, of which 54 have to be right; guide_questions_second.toml has 30 more, which were written
later, before any answer was looked at. Each question is asked alone, with greedy decoding, through localllm's Python
API. An answer is right when every pattern in `needs` occurs in it and none in `forbids` does (regular expressions, case
ignored). Prints each question, answer and verdict, then the total; the exit code is 1 when fewer than nine tenths are
right, or when a question or a near copy of it (other fillers, another order) is in the training text.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import guide_text

GUIDE = Path(__file__).resolve().parents[2] / "localllm" / "data" / "guide.gguf"
QUESTIONS = Path(__file__).parent / "guide_questions.toml"
REQUIRED = 0.9


@dataclass(frozen=True)
class Check:
    """One question and what a right answer contains and must not contain."""

    question: str
    needs: tuple[str, ...]
    forbids: tuple[str, ...] = ()

    def accepts(self, answer: str) -> bool:
        """Return whether the answer meets the criterion."""
        found = all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.needs)
        return found and not any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.forbids)


def checks(path: Path = QUESTIONS) -> list[Check]:
    """Those of a file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
    return [Check(each["ask"], tuple(each["needs"]), tuple(each.get("forbids", ()))) for each in entries]


def leaked(questions: Iterable[str], asked: list[Check]) -> list[str]:
    """Those of `questions`, the training text's, that are one of `asked` or near it."""
    cores = {guide_text.core(check.question) for check in asked}
    return [question for question in questions if guide_text.core(question) in cores]


def score(answer: Callable[[str], str], asked: list[Check]) -> int:
    """Ask all questions; print question, answer and verdict; return how many answers are right."""
    right = 0
    for check in asked:
        text = answer(check.question).strip()
        accepted = check.accepts(text)
        right += accepted
        print(f"{'right' if accepted else 'WRONG'}  {check.question}\n       {text}\n")
    print(f"{right} of {len(asked)} right, {REQUIRED * len(asked):.0f} required")
    return right


def main() -> int:
    """Look for the questions in the training text, score the model, return the exit code."""
    import localllm

    parser = argparse.ArgumentParser(description="Score the built-in model.")
    parser.add_argument("model", type=Path, nargs="?", default=GUIDE)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    arguments = parser.parse_args()
    asked = checks(arguments.questions)
    leaks = leaked(guide_text.training_questions(), asked)
    for question in leaks:
        print(f"also in the training text: {question}", file=sys.stderr)

    with localllm.open(arguments.model) as model:

        def answer(question: str) -> str:
            return "".join(model.chat([{"role": "user", "content": question}], max_tokens=80, temperature=0))

        return int(score(answer, asked) < REQUIRED * len(asked) or bool(leaks))


if __name__ == "__main__":
    sys.exit(main())
