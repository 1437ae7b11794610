"""What a matrix's inputs have in common, and how much of that to believe."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np

from localllm.quant.block_codes import decoded
from localllm.quant.gptq import Feedback, cost

DAMPINGS = (0.1, 0.3, 0.5, 1.0)  # tried; the last one is no feedback
SAMPLE = 64  # rows of a matrix that tell which one it is
FAR = 4  # times the median: squares of inputs that count no more than that
PANEL = 128  # columns whose moments a thread sums at a time
KEEP = 2048  # columns up to which several of their squares are in memory at once, and kept for other matrices


class Hessian:
    """Second moments of inputs, in two halves: each says how well it goes for the other what was found with one.

    Attributes:
        counts: rows of each half.  halves: float32 [columns, columns], means over those rows.
    """

    def __init__(self, pieces: Sequence[np.ndarray], columns: int, threads: int = 1, is_read: bool = False):
        """pieces: float32 [rows, columns], one per text; any may be empty.

        is_read: rows of the matrix are activations, too, as those of an embedding: errors count in themselves as much
        as in what the matrix makes.
        """
        half = len(pieces) // 2
        both = (pieces[:half], pieces[half:])
        self.counts = [sum(map(len, some)) for some in both]
        self.halves = [mean_moments(some, columns, threads) for some in both]
        if is_read:
            for moments in self.halves:
                count_themselves(moments)
        self._threads = threads
        self._known: dict[tuple[int, float], Feedback] = {}

    def feedback(self, name: str, some: np.ndarray) -> Feedback:
        """What encodes a matrix in a format, by both halves; some: rows of it, float32 [rows, columns]."""
        return self._feedback(2, self.damping(name, some))

    def damping(self, name: str, some: np.ndarray) -> float:
        """The one of DAMPINGS with which each half does best by the other."""
        if min(self.counts) == 0:
            return DAMPINGS[-1]

        def tried(damping: float, half: int) -> float:
            found = decoded(name, self._feedback(half, damping).encode(name, some))
            return cost(some - found, self.halves[1 - half])

        with ThreadPoolExecutor(self._threads if self._is_small else 1) as pool:
            costs = list(pool.map(tried, *zip(*product(DAMPINGS, (0, 1)), strict=True)))
        return DAMPINGS[int(np.argmin(np.reshape(costs, (-1, 2)).sum(axis=1)))]

    @property
    def _is_small(self) -> bool:
        """Whether there is memory for several factors at once."""
        return len(self.halves[0]) <= KEEP

    def _feedback(self, half: int, damping: float) -> Feedback:
        """By one half, or by both (2)."""
        if (half, damping) in self._known:
            return self._known[half, damping]
        made = Feedback(self._whole() if half == 2 else self.halves[half], damping, self._threads)
        if self._is_small:
            self._known[half, damping] = made
        return made

    def _whole(self) -> np.ndarray:
        """The mean over all rows, float32."""
        one, other = (np.float32(count / max(sum(self.counts), 1)) for count in self.counts)
        whole = self.halves[0] * one
        whole += self.halves[1] * other
        return whole


def count_themselves(moments: np.ndarray) -> None:
    """Add to the moments of a matrix's inputs, in place, that errors count in themselves, too, as much on average."""
    np.einsum("ii->i", moments)[:] += np.diagonal(moments).mean()


def mean_moments(pieces: Sequence[np.ndarray], columns: int, threads: int = 1) -> np.ndarray:
    """The mean of x x^T over all rows x, the far too large ones made smaller: float32 [columns, columns].

    A few tokens, the first one of a text above all, make some layers' inputs a thousand times as large as others (Sun
    et al. 2024, arXiv 2402.17762). A norm behind makes them small again, and they must not decide for all: squares
    count as FAR times the median one at most. Summed in float64. What is too large for a float32 is not finite.
    """
    parts, count = squares_that_count(pieces), max(sum(map(len, pieces)), 1)
    means = np.empty((columns, columns), np.float32)

    def some(first: int) -> None:
        mine, behind = slice(first, first + PANEL), slice(first, columns)
        sums = np.zeros((len(range(columns)[mine]), columns - first))
        with np.errstate(over="ignore", invalid="ignore"):
            for piece, part in zip(pieces, parts, strict=True):
                sums += (piece[:, mine] if part is None else piece[:, mine] * part).T @ piece[:, behind]
            means[mine, behind] = sums / count
        means[behind, mine] = means[mine, behind].T

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(0, columns, PANEL)))
    return means


def squares_that_count(pieces: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Which part of the squares of each row, float32 [rows, 1]; None where it is all of all."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [np.einsum("ij,ij->i", piece, piece) for piece in pieces]
    most = FAR * np.median(np.concatenate(squares)) if sum(map(len, squares)) else 0
    return [
        (most / np.maximum(square, most))[:, None] if most > 0 and (square > most).any() else None for square in squares
    ]


def limited(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Rows, float32 [rows, columns] in each piece, none of which counts as more than FAR times the median one."""
    for piece, part in zip(pieces, squares_that_count(pieces), strict=True):
        yield piece if part is None else piece * np.sqrt(part)
