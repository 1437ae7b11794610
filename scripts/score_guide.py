"""Score the built-in model on the 60 questions of guide_questions.toml, which are not in its training text.

    python scripts/score_guide.py [model.gguf]

Each question is asked alone, with greedy decoding, through localllm's Python API. An answer is right when every
pattern in `needs` occurs in it and none in `forbids` does (regular expressions, case ignored). Prints each question,
answer and verdict, then the total; the exit code is 1 when fewer than 54 are right, or when a question also occurs in
the training text.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import guide_text

GUIDE = Path(__file__).parent.parent / "localllm" / "data" / "guide.gguf"
QUESTIONS = Path(__file__).parent / "guide_questions.toml"
REQUIRED = 54


@dataclass(frozen=True)
class Check:
    """One question and what a right answer contains and must not contain."""

    question: str
    needs: tuple[str, ...]
    forbids: tuple[str, ...] = ()

    def accepts(self, answer: str) -> bool:
        """Whether the answer meets the criterion."""
        found = all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.needs)
        return found and not any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.forbids)


def checks() -> list[Check]:
    """Those of guide_questions.toml."""
    entries = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"]
    return [Check(each["ask"], tuple(each["needs"]), tuple(each.get("forbids", ()))) for each in entries]


def leaked(questions: set[str]) -> list[str]:
    """The questions that occur, normalized, in `questions`, the normalized ones of the training text."""
    return [check.question for check in checks() if guide_text.normalize(check.question) in questions]


def score(answer: Callable[[str], str]) -> int:
    """Ask all questions; print question, answer and verdict; return how many answers are right."""
    right = 0
    for check in checks():
        text = answer(check.question).strip()
        accepted = check.accepts(text)
        right += accepted
        print(f"{'right' if accepted else 'WRONG'}  {check.question}\n       {text}\n")
    print(f"{right} of {len(checks())} right, {REQUIRED} required")
    return right


def main(path: Path) -> int:
    """Check the questions against the training text, score the model at `path`, return the exit code."""
    import localllm

    leaks = leaked(guide_text.training_questions())
    for question in leaks:
        print(f"also in the training text: {question}", file=sys.stderr)

    with localllm.open(path) as model:

        def answer(question: str) -> str:
            return "".join(model.chat([{"role": "user", "content": question}], max_tokens=80, temperature=0))

        return int(score(answer) < REQUIRED or bool(leaks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else GUIDE))
