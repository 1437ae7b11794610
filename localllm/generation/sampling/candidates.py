"""The tokens that may come next and their logits: what every step of sampling takes and gives."""

import math
from typing import NamedTuple

import numpy as np

from localllm.errors import NOT_NUMBERS, LocalllmError

LARGEST = float(np.finfo(np.float32).max)
LARGEST_DOUBLE = 1e300  # far enough from float64's largest for any difference


class Candidates(NamedTuple):
    """Tokens that may come next, in the order of their ids or, if `ranked`, with the most likely first."""

    ids: np.ndarray  # int64 [n]
    logits: np.ndarray  # float32 or float64 [n]
    ranked: bool = False

    @property
    def best(self) -> int:
        """The index of the largest logit; of equals the first. NaN counts as the largest, and is found here.

        Raises LocalllmError for logits that are not numbers.
        """
        best = 0 if self.ranked else int(np.argmax(self.logits))
        if not math.isfinite(self.logits[best]):
            raise LocalllmError(NOT_NUMBERS)
        return best

    def keep(self, index: np.ndarray | slice) -> "Candidates":
        """Keep the candidates at the index: a slice, a mask or ascending integers."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_:
            index = np.flatnonzero(index)  # a mask itself, twice, takes twice as long
        return Candidates(self.ids[index], self.logits[index], self.ranked)

    def rank(self, count: int | None = None) -> "Candidates":
        """Return the `count` most likely (None: all) in order; of equals, the first as before. Raises as `best`."""
        _ = self.best
        order = np.argsort(-self.logits, kind="stable")[:count]
        return Candidates(self.ids[order], self.logits[order], ranked=True)

    def move(self, places: np.ndarray, logits: np.ndarray) -> "Candidates":
        """Replace logits: float64 [m] at places int64 [m]; finite ones stay finite."""
        moved, largest = self.logits.copy(), LARGEST if self.logits.dtype == np.float32 else LARGEST_DOUBLE
        moved[places] = np.where(np.isfinite(self.logits[places]), np.clip(logits, -largest, largest), logits)
        changed = Candidates(self.ids, moved)
        return changed.rank() if self.ranked else changed

    def find(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find tokens int64 [m] among the candidates: bool [m], and the places of those found, int64 [at most m]."""
        order = np.argsort(self.ids) if self.ranked else None
        places = np.minimum(np.searchsorted(self.ids, tokens, sorter=order), len(self.ids) - 1)
        places = places if order is None else order[places]
        found = self.ids[places] == tokens
        return found, places[found]

    def probabilities(self) -> np.ndarray:
        """Compute the softmax of the logits, float64 [n]."""
        if len(self.ids) == 1:
            return np.ones(1)
        weights = np.exp(self.logits.astype(np.float64) - float(self.logits[self.best]))
        return weights / weights.sum()

    def probability(self, token: int) -> float:
        """Return the probability of one token."""
        return float(self.probabilities()[np.flatnonzero(self.ids == token)[0]])
