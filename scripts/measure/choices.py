"""Measure how long 200 lines take to classify: by `choose_many`, and by generating with a regular expression.

    python scripts/measure choices MODEL

Both read each prompt once, and what all prompts begin with once: the table in docs/decisions/measurements.md shows how
much of the time that takes.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common import make_parser

import localllm

INSTRUCTION = "Classify the sentiment of the review as positive, negative or neutral. Answer with one word only."
SUBJECTS = ["The battery", "The screen", "This kettle", "The hotel room", "My new bicycle", "The film", "The soup"]
VERBS = [
    "works well", "broke after two days", "is fine for the price", "arrived late and scratched", "does what it says",
    "makes me smile every morning", "is far too loud", "disappointed the whole family", "feels cheap in the hand",
]  # fmt: skip
ENDS = ["and I would buy it again", "but the manual is unreadable", "so I sent it back", "which surprised me a little"]
SHORT = ["positive", "negative", "neutral"]
LONG = ["positive: the customer is content", "negative: the customer complains", "neutral: the customer describes"]


class RunCounter:
    """Counts the tokens that a model reads, the rows of logits that it computes, its runs and their seconds."""

    def __init__(self, model: localllm.Model):
        self.tokens = self.rows = self.runs = 0
        self.seconds = 0.0
        self._run, model.engine._run_batch = model.engine._run_batch, self._counted  # type: ignore[method-assign]

    def _counted(self, requests: list, readings: list, precise: bool, rows: list) -> None:
        began = time.perf_counter()
        self._run(requests, readings, precise, rows)
        self.seconds += time.perf_counter() - began
        self.runs += 1
        self.tokens += sum(len(reading.ids) for reading in readings)
        self.rows += sum(reading.wanted for reading in readings)


@contextmanager
def measured(model: localllm.Model, what: str) -> Iterator[None]:
    """Print a line of the table."""
    counter, began = RunCounter(model), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    del model.engine._run_batch  # the class's again
    engine = f"{counter.tokens} | {counter.rows} | {counter.runs} | {counter.seconds:.2f}"
    print(f"| {what} | {engine} | {counter.tokens / counter.seconds:.0f} | {seconds:.2f} |")


def main() -> None:
    given = make_parser(__doc__, "model").parse_args()
    every = itertools.cycle(f"{a} {b}, {c}." for a, b, c in itertools.product(SUBJECTS, VERBS, ENDS))
    lines = list(itertools.islice(every, 0, 200 * 5, 5))
    prompts = [[{"role": "user", "content": f"{INSTRUCTION}\n\nReview: {line}"}] for line in lines]
    print("| | tokens read | rows of logits | runs | s in runs | tokens/s | s |\n|---|--:|--:|--:|--:|--:|--:|")
    with localllm.open(given.model, threads=given.threads, cache=False) as model:
        "".join(model.chat(prompts[0], max_tokens=2))
        work: list[tuple[str, Callable[[list[str], bool], object]]] = [
            ("choices", lambda texts, precise: list(model.choose_many(prompts, texts, precise))),
            ("regex", lambda texts, precise: list(model.map(
                prompts, 32, precise=precise, temperature=0, regex="|".join(map(re.escape, texts))))),
        ]  # fmt: skip
        for (name, texts), precise in itertools.product((("short", SHORT), ("long", LONG)), (True, False)):
            for what, do in work:
                with measured(model, f"{what}, {name}, {16 if precise else 8} bits"):
                    do(texts, precise)
