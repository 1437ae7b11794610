"""The scales of a model's low-rank adapters for the tokens of a sequence."""

from collections.abc import Sequence

import numpy as np

from localllm.kernels.table import MAX_ADAPTERS

Scales = tuple[float, ...]  # of each adapter; those that are missing at the end are 0


class AdapterScales:
    """Scales that may change from a position on; before the first change all are 0.

    Attributes:
        changes: (position, scales from there on), in order.
    """

    def __init__(self, changes: Sequence[tuple[int, Scales]] = ()):
        self.changes = list(changes)

    @classmethod
    def uniform(cls, scales: Scales) -> "AdapterScales":
        """Return the same scales for all tokens."""
        return cls([(0, scales)] if any(scales) else [])

    def set(self, position: int, scales: Sequence[float]) -> None:
        """Use these scales for the tokens from a position on."""
        self.changes = [change for change in self.changes if change[0] < position]
        if self.at(position) != (new := trim_zeros(scales)):
            self.changes.append((position, new))

    def at(self, position: int) -> Scales:
        """Return the scales of the token at a position."""
        return next((scales for start, scales in reversed(self.changes) if start <= position), ())

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; the latest scales stay in use."""
        if self.changes:
            self.set(length, self.changes[-1][1])

    def drop_range(self, keep: int, count: int) -> None:
        """Forget `count` tokens after the first `keep`; later tokens move to their positions."""
        self.changes = [
            (start if start <= keep else max(keep, start - count), scales) for start, scales in self.changes
        ]

    def expand(self, begin: int, count: int) -> np.ndarray:
        """Return the scales of tokens, float32 [count, MAX_ADAPTERS]."""
        rows = np.zeros((count, MAX_ADAPTERS), np.float32)
        for start, scales in self.changes:
            rows[max(start - begin, 0) :] = 0
            rows[max(start - begin, 0) :, : len(scales)] = scales
        return rows

    def common_length(self, other: "AdapterScales", length: int) -> int:
        """Return how many of the first `length` tokens have the same scales in both."""
        starts = sorted({0, *(start for start, _ in (*self.changes, *other.changes) if start < length)})
        return next((start for start in starts if self.at(start) != other.at(start)), length)

    def key(self, begin: int, end: int) -> bytes:
        """Return bytes that are equal if and only if the scales of tokens [begin, end) are; none for scales of 0."""
        changes = [(0, self.at(begin)), *((start - begin, each) for start, each in self.changes if begin < start < end)]
        return repr(changes).encode() if any(scales for _, scales in changes) else b""


def trim_zeros(scales: Sequence[float]) -> Scales:
    """Return scales as numbers, without zeros at the end."""
    numbers = [float(scale) for scale in scales]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
