"""Group lines that differ in times, ids and numbers only, as a log's do, so that a few of each group are read.

Parsers of logs (Drain: He et al., ICWS 2017) mask words, too; here words stay, since a fault may be one. So do numbers
that are few, that stand out, or that the question names.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import log1p
from statistics import quantiles
from typing import NamedTuple

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
FEW = 8  # values of a field up to which each is read
FENCE = 3.0  # interquartile ranges beyond the quartiles: Tukey's "far out"
EXTREME = 8  # most values far out, on each side, of a field
MANY = 8  # lines of a template from which those with its smallest and largest numbers are read, too


class Template(NamedTuple):
    """Lines that are the same but for times, ids and numbers.

    Attributes:
        lines: their numbers.  samples: the numbers of those that stand for them, the first line among them.
    """

    lines: list[int]
    samples: list[int]


def templates_of(lines: Sequence[str], question: str = "") -> list[Template]:
    """Group lines by template, each line in one; question: what it names is never masked."""
    named = {*HAS_DIGIT.findall(question)}
    shapes = defaultdict[str, list[tuple[int, tuple[str, ...]]]](list)
    for number, line in enumerate(lines):
        shape, values = mask(line, named)
        shapes[shape].append((number, values))
    templates = [each for shape, members in shapes.items() for each in divided(members)]
    return sorted(templates, key=lambda template: template.lines[0])


def mask(line: str, named: set[str]) -> tuple[str, tuple[str, ...]]:
    """Return a line without its variable parts, and its numbers; one without words is not masked."""
    numbers = list[str]()

    def replaced(match: re.Match[str]) -> str:
        if match[0] in named:
            return match[0]
        if match.lastgroup == "number":
            numbers.append(match[0])
        return f"\0{match.lastgroup}\0"

    shape = VARIABLE.sub(replaced, line)
    has_words = any(letter.isalpha() for part in shape.split("\0")[::2] for letter in part)
    return (shape, tuple(numbers)) if has_words else (line, ())


def divided(members: Sequence[tuple[int, tuple[str, ...]]]) -> Iterator[Template]:
    """Yield lines of one shape as templates, by the values of their numbers that are to be read."""
    fields = [*zip(*(values for _, values in members), strict=True)]
    shown = [values_to_show(field) for field in fields]
    groups = defaultdict[tuple[str | None, ...], list[tuple[int, tuple[str, ...]]]](list)
    for number, values in members:
        key = tuple(value if value in some else None for value, some in zip(values, shown, strict=True))
        groups[key].append((number, values))
    for key, some in groups.items():
        samples = {some[0][0]}
        for at in [at for at, value in enumerate(key) if value is None and len(some) >= MANY]:
            samples |= {best(some, key=lambda member: float(member[1][at]))[0] for best in (min, max)}
        yield Template([number for number, _ in some], sorted(samples))


def values_to_show(field: Sequence[str]) -> set[str]:
    """Return the values of a number at one place of a template that are read by themselves: few, or far out."""
    counts = Counter(field)
    if len(counts) <= FEW:
        return {*counts}
    below, above = far_out([float(value) for value in field], float)
    low, high = far_out([log1p(float(value)) for value in field], lambda value: log1p(float(value)))
    ordered = sorted(counts, key=float)
    smallest = [value for value in ordered if below(value) and low(value)][:EXTREME]
    largest = [value for value in ordered if above(value) and high(value)][-EXTREME:]
    return {*smallest, *largest}


def far_out(numbers: Sequence[float], scale: Callable[[str], float]) -> tuple[Callable[[str], bool], ...]:
    """Return whether a value is far below, and whether it is far above the quartiles of some numbers.

    scale: makes a number of a value. Amounts that are spread evenly are skewed as logarithms, times are without: what
    stands out does so on both scales.
    """
    low, _, high = quantiles(numbers, n=4)
    reach = FENCE * (high - low)
    return lambda value: scale(value) < low - reach, lambda value: scale(value) > high + reach


def without_time(line: str) -> str:
    """Return a line without the time that it begins with: many tokens, which tell it from no other one."""
    match = VARIABLE.match(line)
    rest = line[match.end() :].lstrip() if match and match.lastgroup == "time" else ""
    return rest if any(letter.isalpha() for letter in rest) else line
