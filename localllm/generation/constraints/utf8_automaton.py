"""Automata that match one character of a set, byte by byte in UTF-8."""

from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]
DEAD, READ = 0, 1  # states: no character of the set matches, or one is complete
_LENGTHS = ((0, 0x7F, 0x00), (0x80, 0x7FF, 0xC0), (0x800, 0xFFFF, 0xE0), (0x10000, 0x10FFFF, 0xF0))
_SURROGATES = (0xD800, 0xDFFF)


class Utf8Automata:
    """The states of all sets of characters; `steps[state]` maps a byte to the next state, unless that is DEAD."""

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = [{}, {}]
        self._states: dict[tuple[int, Ranges], int] = {}
        self.start_of = cache(self._add_start)  # of ranges

    def _add_start(self, ranges: Ranges) -> int:
        """Make the start state of a set of ranges; DEAD for an empty set."""
        steps: dict[int, int] = {}
        merged = _normalize(ranges)
        for continuations, (low, high, lead) in enumerate(_LENGTHS):
            inside = _intersect(merged, low, high)
            steps |= self._split_range(inside, continuations, lead)
        return self._add(steps)

    def _split_range(self, ranges: Ranges, continuations: int, lead: int) -> dict[int, int]:
        """Map the first byte (`lead` plus the highest bits) of characters of 1 + `continuations` bytes to states."""
        size, steps = 64**continuations, dict[int, int]()
        for block in {block for first, last in ranges for block in range(first // size, last // size + 1)}:
            remainders = tuple((a - block * size, b - block * size)
                         for a, b in _intersect(ranges, block * size, (block + 1) * size - 1))  # fmt: skip
            steps[lead + block] = self._add_rest(continuations, remainders)
        return steps

    def _add_rest(self, continuations: int, ranges: Ranges) -> int:
        """Make the state that expects this many continuation bytes."""
        if continuations == 0:
            return READ
        if (continuations, ranges) not in self._states:
            self._states[continuations, ranges] = self._add(self._split_range(ranges, continuations - 1, 0x80))
        return self._states[continuations, ranges]

    def _add(self, steps: dict[int, int]) -> int:
        if not steps:
            return DEAD
        self.steps.append(steps)
        return len(self.steps) - 1


def _intersect(ranges: Iterable[tuple[int, int]], low: int, high: int) -> Ranges:
    """Intersect ranges with [low, high]."""
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _normalize(ranges: Ranges) -> Ranges:
    """Sort and merge ranges, and remove surrogates, which UTF-8 cannot encode."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return _intersect(merged, 0, _SURROGATES[0] - 1) + _intersect(merged, _SURROGATES[1] + 1, 0x10FFFF)
