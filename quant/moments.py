"""What a matrix's inputs have in common, and how much of that to believe."""

from collections.abc import Sequence

import numpy as np

from localllm.quant.feedback import Feedback, cost
from localllm.quant.opened import decoded

DAMPINGS = (0.02, 0.1, 0.3, 1.0)  # tried; the last one is no feedback
SAMPLE = 64  # rows of a matrix that tell which one it is
KEEP = 2048  # columns up to which factors are kept for other matrices that meet the same


class Moments:
    """Second moments of inputs, in two halves: each says how well it goes for the other what was found with one."""

    def __init__(self, pieces: Sequence[np.ndarray], columns: int):
        """pieces: float32 [rows, columns], one per text; any may be empty."""
        half = len(pieces) // 2
        self.counts = [sum(map(len, pieces[:half])), sum(map(len, pieces[half:]))]
        self.halves = [summed(pieces[:half], columns), summed(pieces[half:], columns)]
        self._known: dict[tuple[int, float], Feedback] = {}

    def encode(self, name: str, weights: np.ndarray, threads: int) -> np.ndarray:
        """Finite weights, float32 [rows, columns], as blocks of a format, uint8 [rows, bytes of a row]."""
        return self._feedback(2, self.damping(name, weights, threads), threads).encode(name, weights)

    def damping(self, name: str, weights: np.ndarray, threads: int) -> float:
        """The one of DAMPINGS with which each half does best by the other."""
        if min(self.counts) == 0:
            return DAMPINGS[-1]
        rows = np.unique(np.linspace(0, len(weights) - 1, min(len(weights), SAMPLE)).astype(int))
        some = np.ascontiguousarray(weights[rows])
        costs = []
        for damping in DAMPINGS:
            both = 0.0
            for half in (0, 1):
                found = decoded(name, self._feedback(half, damping, threads).encode(name, some))
                both += cost(some - found, self.halves[1 - half] / self.counts[1 - half])
            costs.append(both)
        return DAMPINGS[int(np.argmin(costs))]

    def _feedback(self, half: int, damping: float, threads: int) -> Feedback:
        """By one half, or by both (2)."""
        if (half, damping) in self._known:
            return self._known[half, damping]
        sums = self.halves[0] + self.halves[1] if half == 2 else self.halves[half]
        count = sum(self.counts) if half == 2 else self.counts[half]
        made = Feedback(sums / max(count, 1), damping, threads)
        if len(sums) <= KEEP:
            self._known[half, damping] = made
        return made


def summed(pieces: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """The sum of x x^T over all rows x: float64 [columns, columns]; what is too large for a float32 is not finite."""
    sums = np.zeros((columns, columns))
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces:
            sums += piece.T @ piece
    return sums
