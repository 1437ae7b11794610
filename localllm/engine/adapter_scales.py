"""Track the scales of a model's adapters along the tokens of a sequence."""

from collections.abc import Sequence

import numpy as np

from localllm.kernels.table import MAX_ADAPTERS

Scales = tuple[float, ...]  # of each adapter; those that are missing at the end are 0


class AdapterScales:
    """The scales of adapters for each token of a sequence, which change at some positions.

    Before the first change all are 0.

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
        """Use these scales from a position on."""
        self.changes = [change for change in self.changes if change[0] < position]
        if self.get(position) != (new := strip_trailing_zeros(scales)):
            self.changes.append((position, new))

    def get(self, position: int) -> Scales:
        """Return the scales of the token at a position."""
        return next((scales for start, scales in reversed(self.changes) if start <= position), ())

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on; the latest scales apply to the next ones."""
        if self.changes:
            self.set(length, self.changes[-1][1])

    def drop_range(self, keep: int, count: int) -> None:
        """Drop `count` tokens after the first `keep`, and move later ones to their positions."""
        self.changes = [
            (start if start <= keep else max(keep, start - count), scales) for start, scales in self.changes
        ]

    def expand(self, begin: int, count: int) -> np.ndarray:
        """Return the scales of `count` tokens from `begin` on, float32 [count, MAX_ADAPTERS]."""
        rows = np.zeros((count, MAX_ADAPTERS), np.float32)
        for start, scales in self.changes:
            rows[max(start - begin, 0) :] = 0
            rows[max(start - begin, 0) :, : len(scales)] = scales
        return rows

    def find_common_length(self, other: "AdapterScales", length: int) -> int:
        """Return how many of the first `length` tokens have the same scales in both."""
        starts = sorted({0, *(start for start, _ in (*self.changes, *other.changes) if start < length)})
        return next((start for start in starts if self.get(start) != other.get(start)), length)

    def encode_range(self, begin: int, end: int) -> bytes:
        """Return bytes that are equal exactly if the scales of tokens [begin, end) are; b"" if all are 0."""
        changes = [
            (0, self.get(begin)),
            *((start - begin, each) for start, each in self.changes if begin < start < end),
        ]
        return repr(changes).encode() if any(scales for _, scales in changes) else b""


def strip_trailing_zeros(scales: Sequence[float]) -> Scales:
    """Return the scales as floats, without zeros at the end."""
    numbers = [float(scale) for scale in scales]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
