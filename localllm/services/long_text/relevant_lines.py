"""Find the lines of a long text that are relevant to a question, in one prefill.

The prompt asks the model to write after each line whether it belongs to the answer, and "no" is inserted after every
line. A line's score is how much likelier "yes" is there than after the surrounding lines. Nothing is generated: a line
costs its own tokens and about four more. Figures: docs/decisions/relevant-lines.md.

Lines that differ only in times, ids and numbers, as in logs, are grouped, and only a few of each group are read. Log
parsers (Drain: He et al., ICWS 2017) also mask words; this module keeps them, since a word may be the fault. Numbers
are kept if they have few values, are outliers, or occur in the question.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from math import log1p
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple

from localllm.errors import ContextError
from localllm.generation.model_methods import gather_options

if TYPE_CHECKING:
    import numpy as np

    from localllm.api import Model
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence as Tokens

ASK = "{question}\n\nGo through the text line by line. After each line say whether it belongs to the answer: yes or no."
YES, NO = " => yes\n", " => no\n"
LONG = 400  # characters; longer lines are split
SHORT = 60  # characters; shorter sentences are joined with the next one
WIDTHS = 40, 120  # minimum and maximum width of wrapped prose, in characters
WRAPPED = 0.95  # prose is wrapped if the next word would not fit at this share of its line breaks
PART = 2048  # maximum tokens of a segment: limits the influence of earlier "no"s and the cost of attention
LINES, WARM = 112, 16  # maximum lines of a segment; unscored lines before them, without which the first score too high
LANES = 8  # segments read concurrently, one line of each per run
AROUND = 16  # a line's score is relative to the median of this many lines before and after
SHARE = 0.4  # minimum score of a picked line, as a share of the best
PICKED = 1024  # maximum tokens of the picked lines
CLEAR = 0.8  # a sample with at least this share of the best score may have all lines of its template read
REREAD = 1000  # maximum lines read for that reason
LIKE_IT = "  [and {} more like this]"
SENTENCE = re.compile(r"(?<=[.!?;])\s+")
MONTHS = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
VARIABLE = re.compile(
    r"(?P<id>\b(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|0x[0-9a-f]+|(?:[0-9a-f]{2}:){5}[0-9a-f]{2}"
    r"|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,}|\d{1,3}(?:\.\d{1,3}){3})\b)"
    r"|(?P<time>\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?"
    rf"|\b{MONTHS} +\d{{1,2}}\b(?: +\d{{4}}\b)?(?: \d\d:\d\d:\d\d)?"
    rf"|\b\d{{1,2}}/{MONTHS}/\d{{4}}:\d\d:\d\d:\d\d(?: [+-]\d{{4}})?"
    r"|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?)"
    r"|(?P<number>\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
HAS_DIGIT = re.compile(r"[\w.:/-]*\d[\w.:/-]*\w|\d")
FEW = 8  # a number with at most this many distinct values is kept
FENCE = 3.0  # interquartile ranges beyond the quartiles: Tukey's "far out"
EXTREME = 8  # maximum outliers of a number on each side
MANY = 8  # in templates with at least this many lines, the smallest and largest numbers are samples


class LineTemplate(NamedTuple):
    """Lines that are equal except for times, ids and numbers.

    Attributes:
        lines: indices of the lines.  samples: indices of the lines that represent them, including the first.
    """

    lines: list[int]
    samples: list[int]


class LineSegment(NamedTuple):
    """Consecutive lines that are scored in one sequence.

    Attributes:
        before: indices of lines that are only context.  own: indices of the lines to score.
    """

    before: range
    own: range


class VerdictTokens(NamedTuple):
    """The tokens of the two verdicts, one of which follows each line.

    Attributes:
        common: leading tokens of both.  yes, no: the first token that differs.  rest: tokens of "no" after `common`.
    """

    common: list[int]
    yes: int
    no: int
    rest: list[int]

    @classmethod
    def from_verdicts(cls, yes: list[int], no: list[int]) -> "VerdictTokens":
        """Compare the token ids of the two verdicts."""
        common = next(
            at for at, (yes_token, no_token) in enumerate(zip(yes, no, strict=False)) if yes_token != no_token
        )
        return cls(no[:common], yes[common], no[common], no[common:])


def ignore_progress(done: int, count: int) -> None:
    """Do nothing: the default of `show`."""


def split_lines(text: str) -> list[str]:
    """Split a text into lines that are not blank; split wrapped prose and long lines into sentences."""
    lines = list[str]()
    for line in unwrap(text.splitlines()):
        for piece in [line] if len(line) <= LONG else SENTENCE.split(line):
            lines += [piece[start : start + LONG] for start in range(0, len(piece), LONG)]
    return [line for line in lines if line.strip()]


def unwrap(lines: Sequence[str]) -> Sequence[str]:
    """Join lines that are wrapped at a column, and split them into sentences; return other lines unchanged."""
    lengths = sorted(len(line) for line in lines if line.strip())
    width = lengths[len(lengths) * 99 // 100] if lengths else 0
    if not WIDTHS[0] <= width <= WIDTHS[1] or len(lengths) == len(lines):  # no paragraphs
        return lines
    pairs = [(one, following) for one, following in pairwise(lines) if one.strip() and following.strip()]
    full = sum(is_full(one, following, width) for one, following in pairs)
    in_sentences = sum(following.lstrip()[0].islower() for _, following in pairs)
    if full < WRAPPED * len(pairs) or 2 * in_sentences < len(pairs) or not pairs:
        return lines
    paragraphs = list[list[str]]([[lines[0]]])
    for one, following in pairwise(lines):
        if one.strip() and following.strip() and is_full(one, following, width):
            paragraphs[-1].append(following.strip())
        else:
            paragraphs.append([following])
    return [piece for each in paragraphs for piece in split_sentences(" ".join(each))]


def is_full(line: str, following: str, width: int) -> bool:
    """Return whether the first word of the following line would not fit at the end of `line`."""
    return len(line) + 1 + len(following.split(maxsplit=1)[0]) > width


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph into sentences; join short ones with the next."""
    pieces = [""]
    for sentence in SENTENCE.split(paragraph):
        if len(pieces[-1]) < SHORT:
            pieces[-1] = f"{pieces[-1]} {sentence}".strip()
        else:
            pieces.append(sentence)
    return pieces


def score_lines(
    model: "Model", question: str, lines: Sequence[str], show: Callable[[int, int], object] = ignore_progress
) -> list[float]:
    """Score each line's relevance compared to the surrounding lines, as a difference of log-odds.

    show: called with the count of lines read, and of all. Raises ContextError, MemoryLimitError.
    """
    encode, engine = model.tokenizer.encode, model.engine
    verdicts = VerdictTokens.from_verdicts(encode(YES, bos=False), encode(NO, bos=False))
    ids = [[*encode(line, bos=False), *verdicts.common] for line in lines]
    messages = [{"role": "user", "content": ASK.format(question=question)}]
    prompt_ids = model.session.encode_chat(messages, gather_options(None, (), {"think": "off"}))
    room = min(PART, model.context - len(prompt_ids) - len(verdicts.rest))
    parts = [*split_segments([len(line) + len(verdicts.rest) for line in ids], room)]
    odds = [0.0] * len(lines)
    with closing(engine.sequence()) as prompt:
        prompt.append(prompt_ids)
        for first in range(0, len(parts), LANES):
            some = parts[first : first + LANES]
            with ExitStack() as stack:
                lanes = [stack.enter_context(closing(prompt.fork())) for _ in some]
                for number, row in read_segments(engine, lanes, some, ids, verdicts):
                    odds[number] = float(row[verdicts.yes] - row[verdicts.no])
            show(some[-1].own.stop, len(lines))
    return subtract_medians(odds)


def split_segments(lengths: Sequence[int], room: int) -> Iterator[LineSegment]:
    """Group lines into segments.

    lengths: tokens of each line.  room: maximum tokens of a segment. Raises ContextError for a line that does not fit.
    """
    start = 0
    while start < len(lengths):
        warm_lines = range(max(0, start - WARM), start) if start else range(min(WARM, len(lengths)))
        while warm_lines and sum(lengths[at] for at in warm_lines) > room // 4:
            warm_lines = warm_lines[1:]
        remaining = room - sum(lengths[at] for at in warm_lines)
        end = start
        while end < min(len(lengths), start + LINES) and lengths[end] <= remaining:
            remaining -= lengths[end]
            end += 1
        if end == start:
            raise ContextError(
                f"a line of {lengths[start]} tokens does not fit the context: use a larger one with -c N"
            )
        yield LineSegment(warm_lines, range(start, end))
        start = end


def read_segments(
    engine: "Engine",
    lanes: "Sequence[Tokens]",
    parts: Sequence[LineSegment],
    ids: Sequence[list[int]],
    verdicts: VerdictTokens,
) -> Iterator[tuple[int, "np.ndarray"]]:
    """Read segments concurrently; yield each scored line's index with the logits after it, float32 [vocab].

    lanes: a sequence for each segment.  ids: the token ids of all lines.
    """
    orders = [[*part.before, *part.own] for part in parts]
    for step in range(max(map(len, orders))):
        running = [number for number, order in enumerate(orders) if step < len(order)]
        answer_ids = verdicts.rest if step else []
        inputs = [(lanes[number], [*answer_ids, *ids[orders[number][step]]]) for number in running]
        for number, rows in zip(running, engine.run(inputs, "last", False), strict=True):
            if step >= len(parts[number].before):
                yield orders[number][step], rows[-1]


def subtract_medians(odds: Sequence[float]) -> list[float]:
    """Subtract from each value the median of those around it."""
    around = ([*odds[max(0, at - AROUND) : at], *odds[at + 1 : at + 1 + AROUND]] for at in range(len(odds)))
    return [value - median(neighbours or [value]) for value, neighbours in zip(odds, around, strict=True)]


def find_lines(
    model: "Model", question: str, lines: Sequence[str], room: int, show: Callable[[int, int], object] = ignore_progress
) -> tuple[list[str], int]:
    """Return the lines most relevant to a question, in order, and how many lines were read.

    Lines that differ only in times, ids and numbers (a template) are sampled; all of them are read if the samples'
    scores differ. A line that represents others is followed by their count. room: in tokens. Raises ContextError,
    MemoryLimitError.
    """
    templates = group_by_template(lines, question)
    numbers = sorted(number for each in templates for number in each.samples)
    scores = score_selected(model, question, lines, numbers, show)
    mixed = find_mixed_templates(templates, scores)
    if mixed:
        numbers = sorted({*numbers, *(number for each in mixed for number in each.lines)})
        scores = score_selected(model, question, lines, numbers, show)
    unread = {each.lines[0]: len(each.lines) - len(each.samples) for each in templates if each not in mixed}
    texts = [lines[at] + (LIKE_IT.format(unread[at]) if unread.get(at) else "") for at in numbers]
    picked = pick_lines(texts, [scores[number] for number in numbers], room, model.session.count)
    return [texts[at] for at in picked], len(numbers)


def score_selected(
    model: "Model", question: str, lines: Sequence[str], numbers: Sequence[int], show: Callable[[int, int], object]
) -> dict[int, float]:
    """Return the scores of the selected lines by index; see score_lines."""
    texts = [strip_time(lines[number]) for number in numbers]
    return dict(zip(numbers, score_lines(model, question, texts, show), strict=True))


def find_mixed_templates(templates: Sequence[LineTemplate], scores: Mapping[int, float]) -> list[LineTemplate]:
    """Return templates with both relevant and irrelevant samples, at most REREAD lines in total."""
    best, remaining, mixed = max(scores.values(), default=0.0), REREAD, list[LineTemplate]()
    for each in sorted(templates, key=lambda each: -max(scores[at] for at in each.samples)):
        some = [scores[at] for at in each.samples]
        if max(some) >= CLEAR * best and min(some) < SHARE / 2 * best and len(each.lines) <= remaining:
            mixed.append(each)
            remaining -= len(each.lines)
    return mixed


def pick_lines(lines: Sequence[str], scores: Sequence[float], room: int, count: Callable[[str], int]) -> list[int]:
    """Return the indices of the best lines that fit, in order; room: in tokens.  count: counts tokens."""
    remaining, picked, least = min(room, PICKED), list[int](), SHARE * max(scores)
    for number in sorted(range(len(lines)), key=lambda number: -scores[number]):
        tokens = count(lines[number]) + 1
        if scores[number] < least or tokens > remaining:
            break
        picked.append(number)
        remaining -= tokens
    return sorted(picked)


# ---- templates: lines that differ only in times, ids and numbers


def group_by_template(lines: Sequence[str], question: str = "") -> list[LineTemplate]:
    """Group lines by template; do not mask times, ids and numbers that occur in the question."""
    named = {*HAS_DIGIT.findall(question)}
    shapes = defaultdict[str, list[tuple[int, tuple[str, ...]]]](list)
    for number, line in enumerate(lines):
        shape, values = mask_variables(line, named)
        shapes[shape].append((number, values))
    templates = [each for shape, members in shapes.items() for each in split_by_numbers(members)]
    return sorted(templates, key=lambda template: template.lines[0])


def mask_variables(line: str, named: set[str]) -> tuple[str, tuple[str, ...]]:
    """Mask a line's times, ids and numbers; return it and the numbers. A line without words is not masked."""
    numbers = list[str]()

    def mask_match(match: re.Match[str]) -> str:
        if match[0] in named:
            return match[0]
        if match.lastgroup == "number":
            numbers.append(match[0])
        return f"\0{match.lastgroup}\0"

    shape = VARIABLE.sub(mask_match, line)
    has_words = any(letter.isalpha() for part in shape.split("\0")[::2] for letter in part)
    return (shape, tuple(numbers)) if has_words else (line, ())


def split_by_numbers(members: Sequence[tuple[int, tuple[str, ...]]]) -> Iterator[LineTemplate]:
    """Split lines that differ only in numbers into templates, by the values that `select_exact_values` keeps."""
    fields = [*zip(*(values for _, values in members), strict=True)]
    kept_values = [select_exact_values(field) for field in fields]
    groups = defaultdict[tuple[str | None, ...], list[tuple[int, tuple[str, ...]]]](list)
    for number, values in members:
        key = tuple(value if value in some else None for value, some in zip(values, kept_values, strict=True))
        groups[key].append((number, values))
    for key, some in groups.items():
        samples = {some[0][0]}
        for at in [at for at, value in enumerate(key) if value is None and len(some) >= MANY]:
            samples |= {best(some, key=lambda member: float(member[1][at]))[0] for best in (min, max)}
        yield LineTemplate([number for number, _ in some], sorted(samples))


def select_exact_values(field: Sequence[str]) -> set[str]:
    """Return the values of a number that are not masked: all if at most FEW, else only the outliers.

    field: the number's value in each line.
    """
    counts = Counter(field)
    if len(counts) <= FEW:
        return {*counts}
    below, above = make_outlier_tests([float(value) for value in field], float)
    low, high = make_outlier_tests([log1p(float(value)) for value in field], lambda value: log1p(float(value)))
    ordered = sorted(counts, key=float)
    smallest = [value for value in ordered if below(value) and low(value)][:EXTREME]
    largest = [value for value in ordered if above(value) and high(value)][-EXTREME:]
    return {*smallest, *largest}


def make_outlier_tests(numbers: Sequence[float], scale: Callable[[str], float]) -> tuple[Callable[[str], bool], ...]:
    """Return two predicates of a value: whether it is far below, and far above the quartiles of some numbers.

    scale: converts a value to a number. Callers test on a linear and a logarithmic scale, and count a value that is an
    outlier on both: evenly spread amounts are skewed as logarithms, durations are skewed without.
    """
    low, _, high = quantiles(numbers, n=4)
    reach = FENCE * (high - low)
    return lambda value: scale(value) < low - reach, lambda value: scale(value) > high + reach


def strip_time(line: str) -> str:
    """Strip a leading time, which has many tokens and does not help to score the line."""
    match = VARIABLE.match(line)
    remaining = line[match.end() :].lstrip() if match and match.lastgroup == "time" else ""
    return remaining if any(letter.isalpha() for letter in remaining) else line
