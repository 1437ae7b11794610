"""Parse files of multiple-choice tasks in the three formats of llama-perplexity.

HellaSwag: six lines per task, the context, the index of the right ending, and four endings. Winogrande: CSV without a
header, one task per line: an id, a sentence with "_" in place of a name, two names, and which of them is right, 1 or 2.

The binary format is little-endian uint32: the number of tasks; the offset of each in the file; then the tasks. A task
is a question and two sets of answers; the second set may have several right answers and is not scored. A set is the
number of answers, the answers, and a label for each, 1 for a right one. A string is its length in bytes, then UTF-8.
"""

import struct
from collections.abc import Callable, Iterator, Sequence

from localllm.errors import UsageError
from localllm.files.text_file import decode_text
from localllm.frozen import frozen

ENDINGS = 4
MAX_ANSWERS = 100  # llama-perplexity refuses more


@frozen
class ChoiceTask:
    """A multiple-choice task: the model should give a right text the highest probability.

    Attributes:
        texts: the context with each answer.
        correct: indices of the right texts.
        stems: the beginning of each text up to the end of the answer; () if all texts end with the answer.
    """

    texts: tuple[str, ...]
    correct: frozenset[int]
    stems: tuple[str, ...] = ()


def parse_hellaswag(data: bytes, name: str) -> list[ChoiceTask]:
    """Parse tasks of six lines each. Raises UsageError that names the file and the line."""
    lines = split_lines(data, name)
    if len(lines) % (2 + ENDINGS):
        raise UsageError(
            f"{name}: a HellaSwag task must have six lines: context, label, 4 endings (found {len(lines)} lines in all)"
        )
    tasks = []
    for start in range(0, len(lines), 2 + ENDINGS):
        context, label, *endings = lines[start : start + 2 + ENDINGS]
        if label.strip() not in map(str, range(ENDINGS)):
            raise UsageError(f"{name}: line {start + 2} must be the label of a task, 0 to 3 (found {label[:60]!r})")
        tasks.append(ChoiceTask(tuple(f"{context} {ending}" for ending in endings), frozenset({int(label)})))
    return require_tasks(tasks, name)


def parse_winogrande(data: bytes, name: str) -> list[ChoiceTask]:
    """Parse one task per line of CSV. Raises UsageError that names the file and the line."""
    tasks = []
    for number, line in enumerate(split_lines(data, name), 1):
        _, sentence, first, second, answer = split_winogrande(line) or [""] * 5
        head, blank, tail = sentence.partition("_")
        if not blank or answer.strip() not in ("1", "2"):
            raise UsageError(
                f"{name}: line {number} must be a Winogrande task, NUMBER,SENTENCE WITH _,NAME,NAME,1 or 2, not "
                f"{line[:60]!r}"
            )
        stems = head + first, head + second
        tasks.append(ChoiceTask(tuple(stem + tail for stem in stems), frozenset({int(answer) - 1}), stems))
    return require_tasks(tasks, name)


def split_winogrande(line: str) -> list[str] | None:
    """Split a line at its first four commas outside quotes; None if it has fewer.

    The quotes around the sentence are removed; all others stay, also doubled ones, as in llama-perplexity.
    """
    commas, is_quoted = list[int](), False
    for at, character in enumerate(line):
        if character == '"':
            is_quoted = not is_quoted
        elif character == "," and not is_quoted and len(commas) < 4:
            commas.append(at)
    if len(commas) < 4:
        return None
    cells = [line[start + 1 : end] for start, end in zip([-1, *commas], [*commas, None], strict=True)]
    cells[1] = cells[1][1:-1] if cells[1].startswith('"') else cells[1]
    return cells


def split_lines(data: bytes, name: str) -> list[str]:
    """Return the lines of a text file without empty lines at the end. Raises UsageError."""
    return [line.removesuffix("\r") for line in decode_text(data, name).rstrip("\r\n").split("\n")]


def require_tasks(tasks: list[ChoiceTask], name: str) -> list[ChoiceTask]:
    """Return the tasks. Raises UsageError if the list is empty."""
    if not tasks:
        raise UsageError(f"{name}: the file must have at least one task")
    return tasks


# ---- binary files


class BinaryTaskFile(Sequence[ChoiceTask]):
    """A binary file of tasks: iteration follows the file's order, indexing its table of offsets."""

    def __init__(self, data: bytes, name: str):
        """Read the table of offsets. Raises UsageError if the file has no tasks.

        data: the whole file. name: its name in messages.
        """
        self._data, self._name, self._at = data, name, 0
        count = len(data) >= 4 and self._read_number("the number of tasks")
        if not count or 4 * count > len(data):
            raise UsageError(f"{name}: expected a file of multiple-choice tasks, as llama-perplexity reads them")
        self._positions = [self._read_number("the position of a task") for _ in range(count)]
        self._first = self._at

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[ChoiceTask]:
        """Yield all tasks in file order, ignoring the table of offsets. Raises UsageError."""
        self._at = self._first
        for number in range(len(self)):
            yield self._read_task(number)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        """Return the task at an offset of the table. Raises UsageError."""
        self._at = self._positions[number]
        return self._read_task(number)

    def _read_task(self, number: int) -> ChoiceTask:
        context = f"task {number + 1} of {len(self)}"
        question, (answers, labels), _ = (
            self._read_string(context),
            self._read_answers(context),
            self._read_answers(context),
        )
        if not question or not answers or not all(answers):
            raise UsageError(f"{self._name}: {context} has an empty question or answer")
        return ChoiceTask(
            tuple(f"{question} {answer}" for answer in answers),
            frozenset(place for place, label in enumerate(labels) if label == 1),
        )

    def _read_answers(self, context: str) -> tuple[list[str], list[int]]:
        count = self._read_number(context)
        if count > MAX_ANSWERS:
            raise UsageError(f"{self._name}: damaged at byte {self._at - 4}: {context} has {count} answers")
        return [self._read_string(context) for _ in range(count)], [self._read_number(context) for _ in range(count)]

    def _read_number(self, context: str) -> int:
        return int(struct.unpack("<I", self._read_bytes(4, context))[0])

    def _read_string(self, context: str) -> str:
        encoded = self._read_bytes(self._read_number(context), context)
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            place = self._at - len(encoded) + error.start
            raise UsageError(f"{self._name}: damaged at byte {place}: the text of {context} is not UTF-8") from None

    def _read_bytes(self, count: int, context: str) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise UsageError(f"{self._name}: cut off at byte {len(self._data)}, within {context}")
        return self._data[start : self._at]


Parser = Callable[[bytes, str], Sequence[ChoiceTask]]
PARSERS: dict[str, Parser] = {
    "hellaswag": parse_hellaswag,
    "winogrande": parse_winogrande,
    "multiple-choice": BinaryTaskFile,
}
