"""Groups lines that differ only in times, ids and numbers, as in logs, so that only a few of each group are read.

Log parsers (Drain: He et al., ICWS 2017) mask words, too; here words are kept, since a word may be the fault. Numbers
are kept if they have few values, are outliers, or are in the question.
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
FEW = 8  # a number with at most this many different values is kept
FENCE = 3.0  # interquartile ranges beyond the quartiles: Tukey's "far out"
EXTREME = 8  # most outliers of a number on each side
MANY = 8  # in templates of at least this many lines, those with the smallest and largest numbers are samples


class Template(NamedTuple):
    """Lines that are equal except for times, ids and numbers.

    Attributes:
        lines: their line numbers.  samples: the line numbers of those that represent them, the first among them.
    """

    lines: list[int]
    samples: list[int]


def templates_of(lines: Sequence[str], question: str = "") -> list[Template]:
    """Group lines by template; times, ids and numbers that are in the question are not masked."""
    named = {*HAS_DIGIT.findall(question)}
    shapes = defaultdict[str, list[tuple[int, tuple[str, ...]]]](list)
    for number, line in enumerate(lines):
        shape, values = mask(line, named)
        shapes[shape].append((number, values))
    templates = [each for shape, members in shapes.items() for each in split_by_numbers(members)]
    return sorted(templates, key=lambda template: template.lines[0])


def mask(line: str, named: set[str]) -> tuple[str, tuple[str, ...]]:
    """Mask a line's times, ids and numbers; return it and the numbers. A line without words is not masked."""
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


def split_by_numbers(members: Sequence[tuple[int, tuple[str, ...]]]) -> Iterator[Template]:
    """Split lines that differ only in numbers into templates, by the numbers that `values_to_keep` returns."""
    fields = [*zip(*(values for _, values in members), strict=True)]
    kept_values = [values_to_keep(field) for field in fields]
    groups = defaultdict[tuple[str | None, ...], list[tuple[int, tuple[str, ...]]]](list)
    for number, values in members:
        key = tuple(value if value in some else None for value, some in zip(values, kept_values, strict=True))
        groups[key].append((number, values))
    for key, some in groups.items():
        samples = {some[0][0]}
        for at in [at for at, value in enumerate(key) if value is None and len(some) >= MANY]:
            samples |= {best(some, key=lambda member: float(member[1][at]))[0] for best in (min, max)}
        yield Template([number for number, _ in some], sorted(samples))


def values_to_keep(field: Sequence[str]) -> set[str]:
    """Return which values of a number are not masked: all if they are at most FEW, else only the outliers.

    field: the number's value in each line.
    """
    counts = Counter(field)
    if len(counts) <= FEW:
        return {*counts}
    below, above = outlier_tests([float(value) for value in field], float)
    low, high = outlier_tests([log1p(float(value)) for value in field], lambda value: log1p(float(value)))
    ordered = sorted(counts, key=float)
    smallest = [value for value in ordered if below(value) and low(value)][:EXTREME]
    largest = [value for value in ordered if above(value) and high(value)][-EXTREME:]
    return {*smallest, *largest}


def outlier_tests(numbers: Sequence[float], scale: Callable[[str], float]) -> tuple[Callable[[str], bool], ...]:
    """Return two predicates of a value: far below, and far above the quartiles of some numbers.

    scale: converts a value to a number. Callers test on a linear and a logarithmic scale, and count a value that is an
    outlier on both: evenly spread amounts are skewed as logarithms, durations are skewed without.
    """
    low, _, high = quantiles(numbers, n=4)
    reach = FENCE * (high - low)
    return lambda value: scale(value) < low - reach, lambda value: scale(value) > high + reach


def without_time(line: str) -> str:
    """Return a line without a leading time, which is many tokens and does not help to score it."""
    match = VARIABLE.match(line)
    remaining = line[match.end() :].lstrip() if match and match.lastgroup == "time" else ""
    return remaining if any(letter.isalpha() for letter in remaining) else line
