"""The graders of `localllm eval`, which check an answer against its question's record.

A grader takes the record and the answer's text, and returns "" for a right answer, or why it is wrong. The fields of a
record, by grader:

    exact    answer: the right text, or a list of right texts; ignore_case
    number   answer: the right number, compared with the last number of the text; tolerance: absolute
    choice   answer: the right one of choices (by default A, B, C, D); the text must name only this one
    regex    answer: a regular expression that must match somewhere in the text
    json     schema: JSON schema of the text, or of its only code block; answer: the right value
    program  test: Python code that is run after the program in the text, and fails if that is wrong; entry_point and
             prompt: a function's name and its beginning, as in HumanEval, whose tests define `check(function)`
"""

import json
import re
from collections.abc import Callable
from typing import Any

from localllm.errors import UsageError
from localllm.services.tools.confined_python import run_confined

Record = dict[str, Any]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
BLOCK = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
LETTERS = "A", "B", "C", "D"
SHOWN = 60  # characters of a quoted text


def grade_exact(record: Record, text: str) -> str:
    """Compare the text with the answers, without white space at both ends."""
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    folded: Callable[[str], str] = str.casefold if record.get("ignore_case") else str
    if folded(text.strip()) in (folded(answer.strip()) for answer in answers):
        return ""
    return f"{text.strip()[:SHOWN]!r} instead of {answers[0][:SHOWN]!r}"


def grade_number(record: Record, text: str) -> str:
    """Compare the last number in the text with the answer; commas are ignored."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return "no number"
    value = float(numbers[-1].replace(",", ""))
    expected = number_of(record)
    tolerance = record.get("tolerance", 1e-9 * abs(expected))
    return "" if abs(value - expected) <= tolerance else f"{value:g} instead of {expected:g}"


def number_of(record: Record) -> float:
    """Return the answer of a record as a number. Raises UsageError."""
    answer = record["answer"]
    try:
        return float(answer.replace(",", "") if isinstance(answer, str) else answer)
    except (TypeError, ValueError):
        raise UsageError(f'"answer" should be a number, not {answer!r}') from None


def grade_choice(record: Record, text: str) -> str:
    """Compare the answer with the choice that the text equals, or the only one that it has as a whole word."""
    choices, bare = record.get("choices", LETTERS), text.strip().strip(".*()\"'").casefold()
    named = [choice for choice in choices if choice.casefold() == bare]
    if not named:
        flags = {choice: re.NOFLAG if len(choice) == 1 else re.IGNORECASE for choice in choices}
        named = [each for each in choices if re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, flags[each])]
    if len(named) != 1:
        return "several choices" if named else "none of the choices"
    return "" if named[0] == record["answer"] else f"{named[0]!r} instead of {record['answer']!r}"


def grade_regex(record: Record, text: str) -> str:
    """Search the text for the regular expression."""
    return "" if re.search(record["answer"], text) else f"no match in {text.strip()[:SHOWN]!r}"


def grade_json(record: Record, text: str) -> str:
    """Parse the text, or its only code block, as JSON; check the schema and the value."""
    blocks = BLOCK.findall(text)
    try:
        value = json.loads(blocks[0] if len(blocks) == 1 else text)
    except (ValueError, RecursionError):
        return f"no JSON: {text.strip()[:SHOWN]!r}"
    if "schema" in record and (reason := schema_error(record["schema"], value)):
        return reason
    if "answer" in record and value != record["answer"]:
        return f"{json.dumps(value)[:SHOWN]} instead of {json.dumps(record['answer'])[:SHOWN]}"
    return ""


def schema_error(schema: object, value: object) -> str:
    """Return why a value does not match a schema, or "". Raises UsageError for an invalid schema."""
    try:
        import jsonschema
    except ImportError:
        raise UsageError(
            "checking a schema needs a package: pip install 'localllm[eval]', or pip install jsonschema"
        ) from None
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        return str(error.message)[:200]
    except jsonschema.SchemaError as error:
        raise UsageError(f'"schema" is not a JSON schema: {error.message}') from None
    return ""


def grade_program(record: Record, text: str) -> str:
    """Run the program in a sandbox. Raises RuntimeError if there is none on this computer."""
    outcome = run_confined(program_of(record, text))
    return "" if outcome.passed else outcome.reason or "it fails"


def program_of(record: Record, text: str) -> str:
    """Return the program of an answer followed by its test.

    With an entry_point, it is the code block that defines that function, or else the prompt and the first block.
    """
    blocks = BLOCK.findall(text) or [text]
    if not (entry_point := record.get("entry_point")):
        return f"{blocks[0]}\n\n{record['test']}\n"
    head, prompt = f"def {entry_point}(", record["prompt"]
    complete = [block for block in blocks if head in block]
    preamble = prompt.partition(head)[0]  # imports, and functions that this one uses
    code = f"{preamble}\n{complete[0]}" if complete else prompt + blocks[0]
    return f"{code}\n\n{record['test']}\n\ncheck({entry_point})\n"


Grader = Callable[[Record, str], str]
GRADERS: dict[str, Grader] = {
    "exact": grade_exact,
    "number": grade_number,
    "choice": grade_choice,
    "regex": grade_regex,
    "json": grade_json,
    "program": grade_program,
}


def require_gradable(record: Record, usual: str) -> str:
    """Return the name of a record's grader, `usual` by default. Raises UsageError for missing or invalid fields."""
    name = record.get("grader", usual)
    if not isinstance(name, str) or name not in GRADERS:
        raise UsageError(f'"grader" should be {", ".join([*GRADERS][:-1])} or program, not {name!r}')
    alternatives = {"json": ("schema", "answer"), "program": ("test",)}.get(name, ("answer",))
    if not any(field in record for field in alternatives):
        raise UsageError(f"the grader {name} needs the field {' or '.join(map(repr, alternatives))}")
    if name in CHECKS:
        CHECKS[name](record)
    if name == "program" and record.get("entry_point") and not isinstance(record.get("prompt"), str):
        raise UsageError('"entry_point" needs the field "prompt", with the code that the function begins with')
    return name


def require_texts(record: Record) -> None:
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise UsageError(f'"answer" should be a text or a list of texts, not {record["answer"]!r}')


def require_choice(record: Record) -> None:
    choices = record.get("choices", LETTERS)
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str) and choice for choice in choices):
        raise UsageError('"choices" should be a list of texts')
    if record["answer"] not in choices:
        raise UsageError(f'"answer" should be one of the choices, not {record["answer"]!r}')


def require_regex(record: Record) -> None:
    try:
        re.compile(record["answer"])
    except (re.error, TypeError) as error:
        raise UsageError(f'"answer" should be a regular expression: {error}') from None


CHECKS: dict[str, Callable[[Record], object]] = {
    "exact": require_texts,
    "number": number_of,
    "choice": require_choice,
    "regex": require_regex,
}
