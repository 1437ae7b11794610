"""Evaluate models on questions with known answers. Implements `localllm eval`.

`map` answers, graders grade; shares have Wilson intervals, and two models on the same questions are compared by
McNemar's test.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.services.graders import GRADERS, require_gradable
from localllm.services.intervals import mcnemar, wilson_interval
from localllm.services.map import Result
from localllm.services.records import Record
from localllm.services.tools import confined_python

AT_ONCE = 2  # answers that are graded together: programs run in processes of their own


class Questions:
    """Records with their graders.

    Attributes:
        graders: by the record's id.
    """

    def __init__(self, records: Sequence[Record], usual: str, name: str):
        """Check the records. Raises UsageError, which names the record.

        usual: the grader of records that name none.  name: the file's.
        """
        self.records, self.graders = records, dict[str | int, str]()
        for record in records:
            if record.error:
                raise UsageError(f"{name}: {record.error}")
            if not isinstance(record.input, dict):
                raise UsageError(f'{name}: record {record.id} is not a JSON object with a "prompt" and an "answer"')
            try:
                self.graders[record.id] = require_gradable(record.input, usual)
            except UsageError as error:
                raise UsageError(f"{name}: record {record.id!r}: {error}") from None
        if not records:
            raise UsageError(f"{name}: there are no questions in this file")
        if "program" in self.graders.values() and (reason := confined_python.reason_against()):
            raise UsageError(f"the grader program cannot run here: {reason}")

    def grade(self, results: Iterable[Result]) -> dict[str | int, str]:
        """Return "" for each right answer, or why it is wrong, by id."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reasons = pool.map(lambda result: (result["id"], self._reason(result)), results)
            return dict(reasons)

    def _reason(self, result: Result) -> str:
        if "error" in result:
            return str(result["error"])
        text = result["output"] if isinstance(result["output"], str) else as_json(result["output"])
        return GRADERS[self.graders[result["id"]]](result["input"], text)


def as_json(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


@frozen
class Evaluation:
    """A model's answers, graded.

    Attributes:
        model: as it was named.  reasons: by the question's id, "" for a right answer.
    """

    model: str
    reasons: Mapping[str | int, str]

    @property
    def correct(self) -> int:
        return sum(not reason for reason in self.reasons.values())

    @property
    def total(self) -> int:
        return len(self.reasons)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 %."""
        return wilson_interval(self.correct, self.total)

    def facts(self) -> dict[str, Any]:
        """Return the figures for JSON; shares are from 0 to 1."""
        return {
            "model": self.model, "correct": self.correct, "total": self.total,
            "accuracy": self.correct / self.total if self.total else None, "interval": self.interval,
            "wrong": {str(id): reason for id, reason in self.reasons.items() if reason},
        }  # fmt: skip


@frozen
class Comparison:
    """Two models on the questions that both answered: how many only one got right, and the p-value (McNemar)."""

    first: str
    second: str
    only_first: int
    only_second: int
    p: float


def compare(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compare each pair of models."""
    compared = []
    for one, other in combinations(evaluations, 2):
        both = [(one.reasons[id], other.reasons[id]) for id in one.reasons if id in other.reasons]
        only_first = sum(not first and bool(second) for first, second in both)
        only_second = sum(bool(first) and not second for first, second in both)
        compared.append(Comparison(one.model, other.model, only_first, only_second, mcnemar(only_first, only_second)))
    return compared
