"""Find the lines of a long text that matter to a question, by reading it once.

The model goes through the text as if it had written after each line whether it belongs to the answer, and always "no".
How much more likely "yes" would have been there than after the lines around it is the line's score. Nothing is
generated: a line costs its own tokens and some four more. Figures: docs/decisions/relevant-lines.md.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.errors import ContextError
from localllm.generation.arguments import gather_options

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.engine.sequence import Sequence as Tokens

ASK = "{question}\n\nGo through the text line by line. After each line say whether it belongs to the answer: yes or no."
YES, NO = " => yes\n", " => no\n"
LONG = 400  # characters of a line that is not cut
PART = 2048  # most tokens of a part: the "no" of earlier lines counts for less, and attention stays cheap
LINES, WARM = 112, 16  # most lines of a part; those before it, without which its first ones would seem to matter
LANES = 8  # parts that are read at once, a line of each in a run
AROUND = 16  # lines before and after one, with whose median it is compared
SHARE = 0.4  # of the best line's score, which others have to have
PICKED = 1024  # most tokens of the lines that are picked
SENTENCE = re.compile(r"(?<=[.!?;])\s+")


class Part(NamedTuple):
    """Lines that are read one after the other.

    Attributes:
        before: numbers of lines whose scores do not count.  own: those whose scores do.
    """

    before: range
    own: range


class Verdicts(NamedTuple):
    """The tokens of the two verdicts that may follow a line.

    Attributes:
        common: tokens of both.  yes, no: the first one that differs.  rest: what follows `common`, of "no".
    """

    common: list[int]
    yes: int
    no: int
    rest: list[int]

    @classmethod
    def of(cls, yes: list[int], no: list[int]) -> "Verdicts":
        """Compare the two."""
        same = next(at for at, (one, other) in enumerate(zip(yes, no, strict=False)) if one != other)
        return cls(no[:same], yes[same], no[same], no[same:])


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank; long ones in sentences, or in pieces of as many characters."""
    lines = list[str]()
    for line in text.splitlines():
        for piece in [line] if len(line) <= LONG else SENTENCE.split(line):
            lines += [piece[start : start + LONG] for start in range(0, len(piece), LONG)]
    return [line for line in lines if line.strip()]


def score_lines(
    model: "Model", question: str, lines: Sequence[str], show: Callable[[int, int], Any] = lambda done, count: None
) -> list[float]:
    """Return how much more likely each line is to matter than those around it, as a difference of log-odds.

    show: called with the number of lines read, and of all. Raises ContextError, MemoryLimitError.
    """
    encode, engine = model.tokenizer.encode, model.engine
    verdicts = Verdicts.of(encode(YES, bos=False), encode(NO, bos=False))
    ids = [[*encode(line, bos=False), *verdicts.common] for line in lines]
    messages = [{"role": "user", "content": ASK.format(question=question)}]
    asked = model.session.encode_chat(messages, gather_options(None, (), {"think": "off"}))
    room = min(PART, model.context - len(asked) - len(verdicts.rest))
    parts = [*parts_of([len(line) + len(verdicts.rest) for line in ids], room)]
    odds = [0.0] * len(lines)
    with closing(engine.sequence()) as begun:
        begun.append(asked)
        for first in range(0, len(parts), LANES):
            some = parts[first : first + LANES]
            with ExitStack() as stack:
                lanes = [stack.enter_context(closing(begun.fork())) for _ in some]
                for number, row in read_parts(engine, lanes, some, ids, verdicts):
                    odds[number] = float(row[verdicts.yes] - row[verdicts.no])
            show(some[-1].own.stop, len(lines))
    return contrasts(odds)


def parts_of(lengths: Sequence[int], room: int) -> Iterator[Part]:
    """Yield parts of lines; lengths: tokens of each line; room: for a part. Raises ContextError for a longer line."""
    start = 0
    while start < len(lengths):
        before = range(max(0, start - WARM), start) if start else range(min(WARM, len(lengths)))
        while before and sum(lengths[at] for at in before) > room // 4:
            before = before[1:]
        left = room - sum(lengths[at] for at in before)
        end = start
        while end < min(len(lengths), start + LINES) and lengths[end] <= left:
            left -= lengths[end]
            end += 1
        if end == start:
            raise ContextError(f"a line of {lengths[start]} tokens does not fit: take a larger context with -c N")
        yield Part(before, range(start, end))
        start = end


def read_parts(
    engine: Any, lanes: "Sequence[Tokens]", parts: Sequence[Part], ids: Sequence[list[int]], verdicts: Verdicts
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each of the parts' own lines with the logits after it, float32 [vocab]."""
    orders = [[*part.before, *part.own] for part in parts]
    for step in range(max(map(len, orders))):
        there = [number for number, order in enumerate(orders) if step < len(order)]
        rest = verdicts.rest if step else []
        reading = [(lanes[number], [*rest, *ids[orders[number][step]]]) for number in there]
        for number, rows in zip(there, engine.run(reading, "last", False), strict=True):
            if step >= len(parts[number].before):
                yield orders[number][step], rows[-1]


def contrasts(odds: Sequence[float]) -> list[float]:
    """Return how far each number is above the median of those around it."""
    around = ([*odds[max(0, at - AROUND) : at], *odds[at + 1 : at + 1 + AROUND]] for at in range(len(odds)))
    return [one - median(others or [one]) for one, others in zip(odds, around, strict=True)]


def pick_lines(lines: Sequence[str], scores: Sequence[float], room: int, count: Callable[[str], int]) -> list[int]:
    """Return the numbers of the lines that matter most, in their order; room: in tokens, as `count` counts them."""
    left, picked, least = min(room, PICKED), list[int](), SHARE * max(scores)
    for number in sorted(range(len(lines)), key=lambda number: -scores[number]):
        tokens = count(lines[number]) + 1
        if scores[number] < least or tokens > left:
            break
        picked.append(number)
        left -= tokens
    return sorted(picked)
