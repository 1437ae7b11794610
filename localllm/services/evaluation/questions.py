"""Evaluate models on questions with known answers. Implements `localllm eval`.

`map` answers the questions and graders grade the answers. Accuracies have Wilson intervals; two models on the same
questions are compared by McNemar's test.

A grader takes a question's record and the answer, and returns "" for a right answer, or the reason why it is wrong.
The fields of a record, by grader:

    exact    answer: the right string, or a list of right strings; ignore_case
    number   answer: the right number, compared with the last number in the answer; tolerance: absolute
    choice   answer: the right one of choices (by default A, B, C, D); the answer must name only this one
    likelihood, likelihood_per_byte
             answer: the right one of choices, or its index, from 0; nothing is generated, see likelihood.py
    regex    answer: a regular expression that must match anywhere in the answer
    json     schema: JSON schema of the answer, or of its only code block; answer: the right value
    program  test: Python code that runs after the answer's program, and raises if that is wrong; entry_point and
             prompt: a function's name and its beginning, as in HumanEval, whose tests define `check(function)`
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from itertools import combinations
from typing import Any

from localllm.arch import load_architecture
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.frozen import frozen
from localllm.services.evaluation.likelihood import LETTERS, select_likeliest
from localllm.services.evaluation.scores import compute_mcnemar_p_value, compute_wilson_interval
from localllm.services.records.lines import Record
from localllm.services.records.map import Result
from localllm.services.tools import confined_python
from localllm.services.tools.confined_python import run_confined

RecordFields = dict[str, Any]
Grader = Callable[[RecordFields, str], str]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
BLOCK = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
SHOWN = 60  # maximum characters of a quoted answer
_SHOWN = 300  # maximum characters quoted of a truncated answer
AT_ONCE = 2  # answers graded concurrently: the grader `program` starts processes


class QuestionSet:
    """Records with their graders.

    Attributes:
        graders: names of graders, by the record's id.  groups: values of the field "group", by the record's id.
    """

    def __init__(self, records: Sequence[Record], usual: str, name: str):
        """Check the records. Raises UsageError, which names the record.

        usual: the grader of records that name none.  name: the file's name.
        """
        self.records, self.graders, self.groups = records, dict[str | int, str](), dict[str | int, str]()
        for record in records:
            if record.error:
                raise UsageError(f"{name}: {record.error}")
            if not isinstance(record.input, dict):
                raise UsageError(f'{name}: record {record.id} must be a JSON object with a "prompt" and an "answer"')
            try:
                self.graders[record.id] = require_gradable(record.input, usual)
                if (group := record.input.get("group")) is not None:
                    self.groups[record.id] = str(group)
            except UsageError as error:
                raise UsageError(f"{name}: record {record.id!r}: {error}") from None
        if not records:
            raise UsageError(f"{name}: the file contains no questions")
        if "program" in self.graders.values() and (reason := confined_python.describe_obstacle()):
            raise UsageError(f"the grader program cannot run on this computer: {reason}")

    @property
    def scored(self) -> frozenset[str | int]:
        """The ids of the questions whose choices are scored by their likelihood."""
        return frozenset(id for id, grader in self.graders.items() if grader in LIKELIHOOD)

    def grade(self, results: Iterable[Result]) -> dict[str | int, str]:
        """Grade the answers: return by id the reason why one is wrong, "" if it is right."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(pool.map(self._grade, results))

    def _grade(self, result: Result) -> tuple[str | int, str]:
        id, record = result["id"], result["input"]
        assert isinstance(id, str | int) and isinstance(record, dict)  # as __init__ has checked
        if "error" in result:
            return id, str(result["error"]) + (f": {str(result['output'])[:_SHOWN]!r}" if "output" in result else "")
        if key := LIKELIHOOD.get(self.graders[id]):
            choices = result["choices"]
            assert isinstance(choices, list)
            return id, grade_likelihood(record, select_likeliest(choices, key))
        output = result["output"]
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return id, GRADERS[self.graders[id]](record, text)


@frozen
class Evaluation:
    """A model's graded answers.

    Attributes:
        model: the name that the user gave.  reasons: by the question's id, "" for a right answer.
        warnings: lines about the model that explain wrong answers.
        groups: the question's group by its id, for those that have one.
    """

    model: str
    reasons: Mapping[str | int, str]
    warnings: Sequence[str] = ()
    groups: Mapping[str | int, str] = field(default_factory=dict)

    @property
    def correct(self) -> int:
        return sum(not reason for reason in self.reasons.values())

    @property
    def total(self) -> int:
        return len(self.reasons)

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95 % confidence interval (Wilson)."""
        return compute_wilson_interval(self.correct, self.total)

    def split(self) -> "dict[str, Evaluation]":
        """Return the evaluation of each group, in the order in which groups first appear."""
        names = dict.fromkeys(self.groups[id] for id in self.reasons if id in self.groups)
        return {
            name: Evaluation(self.model, {id: why for id, why in self.reasons.items() if self.groups.get(id) == name})
            for name in names
        }

    def to_dict(self) -> dict[str, object]:
        groups = {
            name: {"correct": each.correct, "total": each.total, "interval": each.interval}
            for name, each in self.split().items()
        }
        return {
            "model": self.model, "correct": self.correct, "total": self.total,
            "accuracy": self.correct / self.total if self.total else None, "interval": self.interval,
            "warnings": [*self.warnings], **({"groups": groups} if groups else {}),
            "wrong": {str(id): reason for id, reason in self.reasons.items() if reason},
        }  # fmt: skip


def warn_missing_template(path: str, choice: str | None) -> str | None:
    """Return a warning for a chat model without a chat template, else None. Raises ModelError.

    choice: the template that the user chose, or None.
    """
    from localllm.text.templates import ChatTemplate
    from localllm.text.tokenizer import Tokenizer

    with GGUFFile.open(path) as file:
        if load_architecture(file)[1].start_token is not None:
            return None
        return ChatTemplate.from_tokenizer(Tokenizer.from_metadata(file.metadata), choice).warning


@frozen
class Comparison:
    """Two models on the questions that both answered.

    Attributes:
        only_first, only_second: count of questions that only this model answered right.  p: p-value of McNemar's test.
    """

    first: str
    second: str
    only_first: int
    only_second: int
    p: float


def compare_models(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    compared = []
    for this, against in combinations(evaluations, 2):
        both = [(this.reasons[id], against.reasons[id]) for id in this.reasons if id in against.reasons]
        only_first = sum(not first and bool(second) for first, second in both)
        only_second = sum(bool(first) and not second for first, second in both)
        compared.append(
            Comparison(
                this.model, against.model, only_first, only_second, compute_mcnemar_p_value(only_first, only_second)
            )
        )
    return compared


# ---- graders


def grade_exact(record: RecordFields, text: str) -> str:
    """Compare the answer with the expected ones, ignoring white space at both ends."""
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    folded: Callable[[str], str] = str.casefold if record.get("ignore_case") else str
    if folded(text.strip()) in (folded(answer.strip()) for answer in answers):
        return ""
    return f"expected {answers[0][:SHOWN]!r}, found {text.strip()[:SHOWN]!r}"


def grade_number(record: RecordFields, text: str) -> str:
    """Compare the last number in the answer with the expected one, ignoring commas."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return "no number"
    value = float(numbers[-1].replace(",", ""))
    expected = parse_number(record)
    tolerance = record.get("tolerance", 1e-9 * abs(expected))
    return "" if abs(value - expected) <= tolerance else f"expected {expected:g}, found {value:g}"


def parse_number(record: RecordFields) -> float:
    answer = record["answer"]
    try:
        return float(answer.replace(",", "") if isinstance(answer, str) else answer)
    except (TypeError, ValueError):
        raise UsageError(f'"answer" must be a number, not {answer!r}') from None


def grade_choice(record: RecordFields, text: str) -> str:
    """Compare the choice that the answer equals, or that alone occurs in it as a whole word."""
    choices, bare = record.get("choices", LETTERS), text.strip().strip(".*()\"'").casefold()
    named = [choice for choice in choices if choice.casefold() == bare]
    if not named:
        flags = {choice: re.NOFLAG if len(choice) == 1 else re.IGNORECASE for choice in choices}
        named = [each for each in choices if re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, flags[each])]
    if len(named) != 1:
        return "several choices" if named else "none of the choices"
    return "" if named[0] == record["answer"] else f"expected {record['answer']!r}, found {named[0]!r}"


def grade_likelihood(record: RecordFields, chosen: str) -> str:
    """Compare the likeliest choice with the right one, which may be given as its index."""
    answer = record["answer"]
    expected = answer if isinstance(answer, str) else record.get("choices", LETTERS)[answer]
    return "" if chosen == expected else f"expected {expected[:SHOWN]!r}, found {chosen[:SHOWN]!r}"


def grade_regex(record: RecordFields, text: str) -> str:
    return "" if re.search(record["answer"], text) else f"no match in {text.strip()[:SHOWN]!r}"


def grade_json(record: RecordFields, text: str) -> str:
    """Parse the answer, or its only code block, as JSON; check the schema and the value."""
    blocks = BLOCK.findall(text)
    try:
        value = json.loads(blocks[0] if len(blocks) == 1 else text)
    except (ValueError, RecursionError):
        return f"no JSON: {text.strip()[:SHOWN]!r}"
    if "schema" in record and (reason := check_schema(record["schema"], value)):
        return reason
    if "answer" in record and value != record["answer"]:
        return f"expected {json.dumps(record['answer'])[:SHOWN]}, found {json.dumps(value)[:SHOWN]}"
    return ""


def check_schema(schema: object, value: object) -> str:
    """Return why a value does not match a schema, or "". Raises UsageError for an invalid schema."""
    try:
        import jsonschema
    except ImportError:
        raise UsageError(
            "checking a schema needs the package jsonschema: pip install 'localllm[eval]', or pip install jsonschema"
        ) from None
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        return str(error.message)[:200]
    except jsonschema.SchemaError as error:
        raise UsageError(f'"schema" must be a JSON schema: {error.message}') from None
    return ""


def grade_program(record: RecordFields, text: str) -> str:
    """Run the program in a sandbox. Raises RuntimeError if this computer has none."""
    outcome = run_confined(assemble_program(record, text))
    return "" if outcome.passed else outcome.reason or "it fails"


def assemble_program(record: RecordFields, text: str) -> str:
    """Return the answer's program followed by its test.

    With an entry_point, the program is the code block that defines that function, or else the prompt and the first
    block.
    """
    blocks = BLOCK.findall(text) or [text]
    if not (entry_point := record.get("entry_point")):
        return f"{blocks[0]}\n\n{record['test']}\n"
    head, prompt = f"def {entry_point}(", record["prompt"]
    complete = [block for block in blocks if head in block]
    preamble = prompt.partition(head)[0]  # imports, and functions that this one uses
    code = f"{preamble}\n{complete[0]}" if complete else prompt + blocks[0]
    return f"{code}\n\n{record['test']}\n\ncheck({entry_point})\n"


GRADERS: dict[str, Grader] = {
    "exact": grade_exact, "number": grade_number, "choice": grade_choice, "regex": grade_regex, "json": grade_json,
    "program": grade_program, "likelihood": grade_likelihood, "likelihood_per_byte": grade_likelihood,
}  # fmt: skip
LIKELIHOOD = {"likelihood": "logprob", "likelihood_per_byte": "logprob_per_byte"}  # graders, and what they compare


def require_gradable(record: RecordFields, usual: str) -> str:
    """Return the name of a record's grader, by default `usual`. Raises UsageError for missing or invalid fields."""
    name = record.get("grader", usual)
    if not isinstance(name, str) or name not in GRADERS:
        raise UsageError(f'"grader" must be {", ".join([*GRADERS][:-1])} or {[*GRADERS][-1]}, not {name!r}')
    alternatives = {"json": ("schema", "answer"), "program": ("test",)}.get(name, ("answer",))
    if not any(field in record for field in alternatives):
        raise UsageError(f"the grader {name} needs the field {' or '.join(map(repr, alternatives))}")
    if name in CHECKS:
        CHECKS[name](record)
    if name == "program" and record.get("entry_point") and not isinstance(record.get("prompt"), str):
        raise UsageError('"entry_point" needs the field "prompt", the code that begins the function')
    return name


def require_strings(record: RecordFields) -> None:
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise UsageError(f'"answer" must be a string or a list of strings, not {record["answer"]!r}')


def require_choice(record: RecordFields) -> None:
    choices = record.get("choices", LETTERS)
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str) and choice for choice in choices):
        raise UsageError('"choices" must be a list of strings')
    if record["answer"] not in choices:
        raise UsageError(f'"answer" must be one of the choices, not {record["answer"]!r}')


def require_scored_choice(record: RecordFields) -> None:
    """Raise UsageError unless the answer is one of the choices or an index of them."""
    choices, answer = record.get("choices", LETTERS), record["answer"]
    is_list = isinstance(choices, list | tuple) and all(isinstance(choice, str) and choice for choice in choices)
    if not is_list or len(choices) < 2 or len({*choices}) < len(choices):
        raise UsageError('"choices" must be a list of two or more different strings')
    is_index = isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices)
    if not is_index and answer not in choices:
        raise UsageError(f'"answer" must be one of the choices or its index, from 0, not {answer!r}')
    if not isinstance(record.get("delimiter", ""), str):
        raise UsageError('"delimiter" must be a string, which stands between prompt and choice')


def require_regex(record: RecordFields) -> None:
    try:
        re.compile(record["answer"])
    except (re.error, TypeError) as error:
        raise UsageError(f'"answer" must be a regular expression: {error}') from None


CHECKS: dict[str, Callable[[RecordFields], object]] = {
    "exact": require_strings,
    "number": parse_number,
    "choice": require_choice,
    "likelihood": require_scored_choice,
    "likelihood_per_byte": require_scored_choice,
    "regex": require_regex,
}
