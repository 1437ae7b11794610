"""Evaluates models on questions with known answers. Implements `localllm eval`.

`map` answers the questions and graders grade the answers. Accuracies have Wilson intervals; two models on the same
questions are compared by McNemar's test.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

from localllm.arch import architecture
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.frozen import frozen
from localllm.services.graders import GRADERS, require_gradable
from localllm.services.intervals import mcnemar, wilson_interval
from localllm.services.map import Result
from localllm.services.records import Record
from localllm.services.tools import confined_python

_SHOWN = 300  # characters of an answer that was cut
AT_ONCE = 2  # answers graded concurrently: the grader `program` starts processes


class Questions:
    """Records with their graders.

    Attributes:
        graders: the names of graders by the record's id.
    """

    def __init__(self, records: Sequence[Record], usual: str, name: str):
        """Check the records. Raises UsageError, which names the record.

        usual: the grader of records that name none.  name: the file's name.
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
        """Return, by id, "" for each right answer, or why it is wrong."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(pool.map(self._grade, results))

    def _grade(self, result: Result) -> tuple[str | int, str]:
        id, record = result["id"], result["input"]
        assert isinstance(id, str | int) and isinstance(record, dict)  # as __init__ has checked
        if "error" in result:
            return id, str(result["error"]) + (f": {str(result['output'])[:_SHOWN]!r}" if "output" in result else "")
        output = result["output"]
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return id, GRADERS[self.graders[id]](record, text)


@frozen
class Evaluation:
    """A model's answers, graded.

    Attributes:
        model: the name that the user gave.  reasons: by the question's id, "" for a right answer.
        warnings: lines about the model that explain wrong answers.
    """

    model: str
    reasons: Mapping[str | int, str]
    warnings: Sequence[str] = ()

    @property
    def correct(self) -> int:
        return sum(not reason for reason in self.reasons.values())

    @property
    def total(self) -> int:
        return len(self.reasons)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the accuracy's 95 % confidence interval (Wilson)."""
        return wilson_interval(self.correct, self.total)

    def facts(self) -> dict[str, object]:
        """Return the figures for JSON; shares are from 0 to 1."""
        return {
            "model": self.model, "correct": self.correct, "total": self.total,
            "accuracy": self.correct / self.total if self.total else None, "interval": self.interval,
            "warnings": [*self.warnings],
            "wrong": {str(id): reason for id, reason in self.reasons.items() if reason},
        }  # fmt: skip


def template_warning(path: str, choice: str | None) -> str | None:
    """Return a warning if a model that chats has no chat template; choice: the user's, or None. Raises ModelError."""
    from localllm.text.templates import ChatTemplate
    from localllm.text.tokenizer import Tokenizer

    with GGUFFile.open(path) as file:
        if architecture(file)[1].start_token is not None:
            return None
        return ChatTemplate.of(Tokenizer.from_metadata(file.metadata), choice).warning


@frozen
class Comparison:
    """Two models on the questions that both answered.

    Attributes:
        only_first, only_second: questions that only this model got right.  p: the p-value of McNemar's test.
    """

    first: str
    second: str
    only_first: int
    only_second: int
    p: float


def compare(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compare each pair of models."""
    compared = []
    for this, against in combinations(evaluations, 2):
        both = [(this.reasons[id], against.reasons[id]) for id in this.reasons if id in against.reasons]
        only_first = sum(not first and bool(second) for first, second in both)
        only_second = sum(bool(first) and not second for first, second in both)
        compared.append(
            Comparison(this.model, against.model, only_first, only_second, mcnemar(only_first, only_second))
        )
    return compared
