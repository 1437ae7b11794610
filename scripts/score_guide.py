"""Score the built-in model on 30 questions that are not in its training text.

    python scripts/score_guide.py [model.gguf]

Each question is asked alone, with greedy decoding, through localllm's Python API. An answer is right when every
pattern in `needs` occurs in it and none in `forbids` does (regular expressions, case ignored). Prints each question,
answer and verdict, then the total; the exit code is 1 when fewer than 24 are right, or when a question also occurs in
the training text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import guide_text

GUIDE = Path(__file__).parent.parent / "localllm" / "data" / "guide.gguf"
REQUIRED = 24


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


TINY = (r"\btiny\b", r"bigger model")

CHECKS = (
    Check("I just installed this thing, what exactly is it good for?", ("GGUF", "your own computer"), ("download",)),
    Check("Where would I find models I can use with it?", ("download", r"hugging ?face"), ("safetensors",)),
    Check(
        "my laptop only has 8 gigs of ram, how can i tell whether a model fits?",
        ("inspect|size of the file", "memory|cache"),
    ),
    Check("Which quant should I grab if I'm unsure?", ("Q4_K_M", "good|start|choice|balance")),
    Check("is there a way to make the answers the same every time i run it?", (r"--seed|--temp 0",)),
    Check("How do I keep the model from writing a whole novel?", (r"-n\b", "token"), (r"(?<!\S)-c\b",)),
    Check("the reply breaks off in the middle of a sentence, why", (r"-n\b", "token")),
    Check("can it look at a text file and summarize it", (r"(?<!\S)-f\b|cat |pipe",), (r"--stats", "tiny")),
    Check("what happens when i hit ctrl+c while it's talking", ("ctrl-c", "stop", "answer")),
    Check("I'm done chatting, how do I get out of here?", (r"/exit|ctrl-d",)),
    Check("What does min-p actually do to the sampling?", ("min-p", "probab|likely"), (r"--top-p",)),
    Check("Does anything I type get sent to some server?", ("computer", "nothing|stays|never|not sent")),
    Check("Do I need an Nvidia card for this?", (r"\bno\b", "gpu", "processor|cpu")),
    Check("my script got return code 4 from localllm, what went wrong", ("prompt", "context"), ("memory",)),
    Check("Why did the first launch take so long?", ("compil", "first")),
    Check("Could you show me how to call it from a Python program?", ("import localllm", r"localllm\.open")),
    Check("how many cpu threads does it use unless i say otherwise", ("physical core",)),
    Check("I'd like the output in a form another program can parse", (r"--json",)),
    Check("what's actually inside one of those gguf files?", ("GGUF", "weights|tokenizer|vocabulary")),
    Check("How do I shrink an f16 model down to 4 bits?", ("localllm quantize", "Q4_K_M")),
    Check("forget what we talked about, I want a fresh start", (r"/clear",)),
    Check("How can I give the model a persona or standing instructions from the command line?", (r"(?<!\S)-sys\b",)),
    Check("and what is the kv cache for?", ("cache", "token|context"), ("kernel",)),
    Check("How can I measure how many tokens per second I get?", (r"localllm bench|--stats",)),
    Check("Good morning! Who am I talking to?", ("guide|built into localllm", "tiny|small")),
    Check("What's the capital of Portugal?", TINY),
    Check("write me a python function that sorts a list", TINY, ("import localllm",)),
    Check("Will it rain tomorrow?", ("weather|tiny", "cannot|can't|do not|don't|bigger model")),
    Check("Thanks a lot, you've been really helpful", ("welcome|glad|happy",), (r"--",)),
    Check("how do I stop it from wrapping my prompt in the chat template?", (r"--raw",)),
)


def leaked(questions: set[str]) -> list[str]:
    """The questions of CHECKS that occur, normalized, in `questions`, the normalized ones of the training text."""
    return [check.question for check in CHECKS if guide_text.normalize(check.question) in questions]


def score(answer: Callable[[str], str]) -> int:
    """Ask all questions; print question, answer and verdict; return how many answers are right."""
    right = 0
    for check in CHECKS:
        text = answer(check.question).strip()
        accepted = check.accepts(text)
        right += accepted
        print(f"{'right' if accepted else 'WRONG'}  {check.question}\n       {text}\n")
    print(f"{right} of {len(CHECKS)} right, {REQUIRED} required")
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
