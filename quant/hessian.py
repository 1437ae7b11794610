"""Compute GPTQ's Hessian (second moments of a matrix's inputs), and choose its damping by cross-validation."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np

from localllm.quant.block_codes import dequantize
from localllm.quant.gptq import GptqEncoder, compute_cost

DAMPINGS = (0.1, 0.3, 0.5, 1.0)  # candidates; 1.0 means no error feedback
SAMPLE_ROWS = 64  # rows of a matrix for comparing dampings
OUTLIER_FACTOR = 4  # inputs with a squared norm above this many medians are scaled down
PANEL_COLUMNS = 128  # columns of moments that a thread computes at a time
MAX_CACHED_COLUMNS = 2048  # up to this many columns the encoders of several dampings stay in memory


class Hessian:
    """Second moments of the inputs, separately for two halves of the documents.

    Each half validates what was chosen on the other.

    Attributes:
        counts: number of rows of each half.
        halves: means over those rows, float32 [columns, columns] each.
    """

    def __init__(self, pieces: Sequence[np.ndarray], columns: int, threads: int = 1, is_read: bool = False):
        """Compute the moments of the inputs of each document, float32 [rows, columns], possibly empty.

        is_read: rows of the matrix are also used as activations, as those of an embedding are, so that errors of single
        weights count as much as errors of outputs.
        """
        half = len(pieces) // 2
        both = (pieces[:half], pieces[half:])
        self.counts = [sum(map(len, some)) for some in both]
        self.halves = [compute_moments(some, columns, threads) for some in both]
        if is_read:
            for moments in self.halves:
                add_weight_errors(moments)
        self._threads = threads
        self._known: dict[tuple[int, float], GptqEncoder] = {}  # encoders by (half, damping)

    def build_encoder(self, name: str, sample: np.ndarray) -> GptqEncoder:
        """Build the encoder of a matrix in a format.

        sample: some of its rows, float32 [rows, columns], by which the damping is chosen.
        """
        return self._build_encoder(2, self.choose_damping(name, sample))

    def choose_damping(self, name: str, sample: np.ndarray) -> float:
        """Return the damping with the least error in sample rows, when each half is validated on the other."""
        if min(self.counts) == 0:
            return DAMPINGS[-1]

        def validate(damping: float, half: int) -> float:
            errors = dequantize(name, self._build_encoder(half, damping).encode(name, sample))
            return compute_cost(sample - errors, self.halves[1 - half])

        with ThreadPoolExecutor(self._threads if self._is_small else 1) as pool:
            costs = list(pool.map(validate, *zip(*product(DAMPINGS, (0, 1)), strict=True)))
        return DAMPINGS[int(np.argmin(np.reshape(costs, (-1, 2)).sum(axis=1)))]

    @property
    def _is_small(self) -> bool:
        """Return whether the encoders of several dampings stay in memory."""
        return len(self.halves[0]) <= MAX_CACHED_COLUMNS

    def _build_encoder(self, half: int, damping: float) -> GptqEncoder:
        """Build an encoder from half 0, half 1, or both (2)."""
        if (half, damping) in self._known:
            return self._known[half, damping]
        moments = self.halves[half] if half < 2 else self._average_halves()
        encoder = GptqEncoder(moments, damping, self._threads)
        if self._is_small:
            self._known[half, damping] = encoder
        return encoder

    def _average_halves(self) -> np.ndarray:
        """Return the moments over all rows, float32 [columns, columns]."""
        one, other = (np.float32(count / max(sum(self.counts), 1)) for count in self.counts)
        whole = self.halves[0] * one
        whole += self.halves[1] * other
        return whole


def add_weight_errors(moments: np.ndarray) -> None:
    """Add the mean of the diagonal to the diagonal, in place, so that errors of single weights count, too."""
    np.einsum("ii->i", moments)[:] += np.diagonal(moments).mean()


def compute_moments(pieces: Sequence[np.ndarray], columns: int, threads: int = 1) -> np.ndarray:
    """Return the mean of x x^T over all rows x, with outliers scaled down: float32 [columns, columns].

    For a few tokens, above all the first one of a document, some layers' inputs are a thousand times as large as for
    others (Sun et al. 2024, arXiv 2402.17762). A norm after these layers scales them down again, so they must not
    outweigh all others in the mean: a row's squared norm counts as at most OUTLIER_FACTOR times the median. Sums are in
    float64; a result too large for float32 becomes infinite.
    """
    parts, count = compute_outlier_factors(pieces), max(sum(map(len, pieces)), 1)
    means = np.empty((columns, columns), np.float32)

    def sum_panel(first: int) -> None:
        panel, later = slice(first, first + PANEL_COLUMNS), slice(first, columns)
        sums = np.zeros((len(range(columns)[panel]), columns - first))
        with np.errstate(over="ignore", invalid="ignore"):
            for piece, part in zip(pieces, parts, strict=True):
                sums += (piece[:, panel] if part is None else piece[:, panel] * part).T @ piece[:, later]
            means[panel, later] = sums / count
        means[later, panel] = means[panel, later].T

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(sum_panel, range(0, columns, PANEL_COLUMNS)))
    return means


def compute_outlier_factors(pieces: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Return for each document the factors that scale the moments of outlier rows down, float32 [rows, 1].

    None if no row is scaled.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [np.einsum("ij,ij->i", piece, piece) for piece in pieces]
    most = OUTLIER_FACTOR * np.median(np.concatenate(squares)) if sum(map(len, squares)) else 0
    return [
        (most / np.maximum(square, most))[:, None] if most > 0 and (square > most).any() else None for square in squares
    ]


def limit_outliers(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the inputs of each document, with rows scaled to at most OUTLIER_FACTOR times the median squared norm.

    Shape: float32 [rows, columns].
    """
    for piece, part in zip(pieces, compute_outlier_factors(pieces), strict=True):
        yield piece if part is None else piece * np.sqrt(part)
