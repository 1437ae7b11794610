"""From one row of logits to the next token: a chain of small steps, in llama.cpp's default order.

    penalties -> top_k -> typical -> top_p -> min_p -> temperature -> draw

After the penalties, a step is a function over the candidates: ids int64 [n] and logits float32 [n], sorted with the
most likely first. It returns the candidates that it keeps, so all but the first work on few of them.
"""

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, fields

import numpy as np

from localllm.errors import LocalllmError, UsageError

Candidates = tuple[np.ndarray, np.ndarray]  # ids int64 [n], logits float32 [n]

PENALTY_WINDOW = 64  # how many of the last tokens the penalties look at


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose tokens. The defaults are llama.cpp's; a value that switches a step off is in brackets."""

    temperature: float = 0.8  # 0 or below: always the most likely token
    top_k: int = 40  # keep the k most likely [0]
    typical: float = 1.0  # keep the most typical tokens that together have this probability [1]
    top_p: float = 0.95  # keep the most likely tokens that together have this probability [1]
    min_p: float = 0.05  # keep tokens at least this probable, relative to the most likely one [0]
    repeat_penalty: float = 1.0  # divide (if negative multiply) logits of recent tokens [1]
    presence_penalty: float = 0.0  # subtract from the logits of recent tokens [0]
    frequency_penalty: float = 0.0  # subtract for each occurrence among the recent tokens [0]
    seed: int | None = None  # None: a random one

    def __post_init__(self) -> None:
        """Raises UsageError for values that make no sense."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"{field.name} should be a number, not {value!r}")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if value is not None and (value != int(value) or value < 0):
                raise UsageError(f"{name} should be a whole number, 0 or above, not {value}")
        for name in ("typical", "top_p"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} should be above 0 and at most 1, not {getattr(self, name)}")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p should be from 0 to 1, not {self.min_p}")
        if self.repeat_penalty <= 0:
            raise UsageError(f"repeat_penalty should be above 0, not {self.repeat_penalty}")


class Sampler:
    """Chooses one token after the other. The same seed, options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions, vocab: int):
        """vocab: how many tokens exist; logits beyond are padding and never chosen."""
        self.options = options
        self.vocab = vocab
        self.seed = random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)
        self._random = random.Random(self.seed)
        self._recent: deque[int] = deque(maxlen=PENALTY_WINDOW)

    def accept(self, token: int) -> None:
        """Tell which token came, of the prompt or chosen: penalties count it."""
        self._recent.append(token)

    def sample(self, logits: np.ndarray) -> int:
        """The next token's id for logits float32 [vocab]. Raises LocalllmError if they are not numbers."""
        options = self.options
        logits = penalties(logits[: self.vocab], self._recent, options)
        best = int(np.argmax(logits))  # the lowest id of equals; NaN counts as the largest
        if not math.isfinite(logits[best]):
            raise LocalllmError("the model computed logits that are not numbers; the file may be damaged")
        if options.temperature <= 0:
            return best
        candidates = top_k(logits, options.top_k)
        candidates = typical(*candidates, options.typical)
        candidates = top_p(*candidates, options.top_p)
        candidates = min_p(*candidates, options.min_p)
        ids, logits = temperature(*candidates, options.temperature)
        return draw(ids, logits, self._random.random())


def penalties(logits: np.ndarray, recent: deque[int], options: SamplingOptions) -> np.ndarray:
    """Make recent tokens less likely: logits float32 [vocab] in and, where something changes, a changed copy out.

    Repetition: Keskar et al. 2019 (CTRL), with llama.cpp's rule for negative logits; presence and frequency: OpenAI's.
    """
    off = options.repeat_penalty == 1 and options.presence_penalty == options.frequency_penalty == 0
    if off or not recent:
        return logits
    counts = Counter(recent)
    ids, times = np.array(list(counts)), np.array(list(counts.values()), np.float32)
    old = logits[ids]
    new = np.where(old <= 0, old * options.repeat_penalty, old / options.repeat_penalty)
    logits = logits.copy()
    logits[ids] = new - times * options.frequency_penalty - options.presence_penalty
    return logits


def top_k(logits: np.ndarray, k: int) -> Candidates:
    """The k most likely tokens (0: all), sorted, of logits float32 [vocab].

    At least k tokens reach the k-th largest of the maxima over 64 strided groups, so only those that do are sorted:
    0.06 ms for k = 40 of 128256, where np.argpartition takes 1.1 ms. All of them take 6.5 ms.
    """
    groups = len(logits) // 64
    if 0 < k < groups:
        maxima = logits[: groups * 64].reshape(64, groups).max(axis=0)
        ids = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    else:
        ids = np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")  # of equals, the lowest id first
    ids = ids[order[: k or None]]
    return ids, logits[ids]


def typical(ids: np.ndarray, logits: np.ndarray, p: float) -> Candidates:
    """Keep tokens whose surprise is nearest to the expected one, until they have the probability p (Meister 2022)."""
    if p >= 1:
        return ids, logits
    probabilities = softmax(logits)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    expected = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right")) + 1
    kept = np.sort(order[:count])  # most likely first again
    return ids[kept], logits[kept]


def top_p(ids: np.ndarray, logits: np.ndarray, p: float) -> Candidates:
    """Keep the most likely tokens until they have the probability p: the nucleus (Holtzman et al. 2019)."""
    if p >= 1:
        return ids, logits
    count = int(np.searchsorted(np.cumsum(softmax(logits)), p)) + 1
    return ids[:count], logits[:count]


def min_p(ids: np.ndarray, logits: np.ndarray, p: float) -> Candidates:
    """Keep tokens with at least p times the probability of the most likely one (Nguyen et al. 2024)."""
    if p <= 0:
        return ids, logits
    count = int(np.count_nonzero(logits >= logits[0] + math.log(p)))
    return ids[:count], logits[:count]


def temperature(ids: np.ndarray, logits: np.ndarray, t: float) -> Candidates:
    """Divide the logits by t > 0: below 1 sharper, above 1 flatter."""
    return ids, (logits.astype(np.float64) - float(logits[0])) / t


def draw(ids: np.ndarray, logits: np.ndarray, u: float) -> int:
    """The token at u, in [0, 1), of the candidates' cumulative probability."""
    cumulative = np.cumsum(softmax(logits))
    return int(ids[np.searchsorted(cumulative[:-1], u * cumulative[-1], side="right")])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities float64 [n] of logits [n], the largest of them first."""
    weights = np.exp(logits.astype(np.float64) - float(logits[0]))
    return weights / weights.sum()
