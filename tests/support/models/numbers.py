"""Random numbers that are the same everywhere, for ever: raw integers of Philox, made floats by our own arithmetic.

NumPy promises the integers of its bit generators, but not what its distributions make of them.
"""

import hashlib

import numpy as np


class Numbers:
    """A stream of its own for every name, such that a tensor more or less changes no other one."""

    def __init__(self, *names: object):
        key = hashlib.sha256("/".join(map(str, names)).encode()).digest()[:16]
        self._bits = np.random.Philox(key=int.from_bytes(key, "little"))

    def integers(self, count: int, end: int) -> np.ndarray:
        """int64 [count], 0 <= x < end; end: at most 2**24."""
        return ((self._bits.random_raw(count) >> 40) * np.uint64(end) >> np.uint64(24)).astype(np.int64)

    def raw(self, count: int) -> np.ndarray:
        """uint8 [count]."""
        return self._bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """float32, low <= x <= high."""
        parts = self._bits.random_raw(int(np.prod(shape))) >> 40
        return (low + (high - low) * (parts * 2.0**-24)).astype(np.float32).reshape(shape)

    def normal(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        """float32: sums of four uniform numbers, as good as normal up to 3.4 deviations."""
        count = int(np.prod(shape))
        quarters = self._bits.random_raw(count).astype("<u8").view("<u2").reshape(count, 4)
        sums = quarters.sum(axis=1, dtype=np.int64) - 2 * 65535
        return (sums * (deviation / (65536 * 3**-0.5))).astype(np.float32).reshape(shape)

    def signs(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32, -1 or 1."""
        return (1 - 2 * self.integers(int(np.prod(shape)), 2)).astype(np.float32).reshape(shape)
