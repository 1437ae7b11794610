"""From one row of logits to the next token: a chain of small steps, in llama.cpp's default order.

    allowed -> penalties -> top_k -> typical -> top_p -> min_p -> temperature -> draw

A step is a function from candidates to candidates and may be anywhere in the chain: CHAIN is only its order. As soon as
top_k has ranked and cut them, the other steps work on few.
"""

import copy
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from localllm.errors import NOT_NUMBERS, LocalllmError, UsageError

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
        """Those at the index, which is a slice, a mask or ascending."""
        return Candidates(self.ids[index], self.logits[index], self.ranked)

    def rank(self, count: int | None = None) -> "Candidates":
        """The `count` most likely (None: all) in order; of equals, the first as before. Raises as `best` does."""
        _ = self.best
        order = np.argsort(-self.logits, kind="stable")[:count]
        return Candidates(self.ids[order], self.logits[order], ranked=True)

    def change(self, logits: np.ndarray) -> "Candidates":
        """The same tokens with other logits."""
        changed = Candidates(self.ids, logits)
        return changed.rank() if self.ranked else changed

    def find(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the tokens int64 [m] are among the candidates, bool [m], and where these are, int64 [at most m]."""
        order = np.argsort(self.ids) if self.ranked else None
        places = np.minimum(np.searchsorted(self.ids, tokens, sorter=order), len(self.ids) - 1)
        places = places if order is None else order[places]
        found = self.ids[places] == tokens
        return found, places[found]

    def probabilities(self) -> np.ndarray:
        """The softmax of the logits, float64 [n]."""
        if len(self.ids) == 1:
            return np.ones(1)
        weights = np.exp(self.logits.astype(np.float64) - float(self.logits[self.best]))
        return weights / weights.sum()


class State(NamedTuple):
    """What a sampler changes from token to token."""

    random: random.Random
    recent: deque[int]


Step = Callable[[Candidates, SamplingOptions, State], Candidates]

STEPS: dict[str, Step] = {
    "penalties": lambda candidates, options, state: penalties(candidates, state.recent, options),
    "top_k": lambda candidates, options, state: top_k(candidates, options.top_k),
    "typical": lambda candidates, options, state: typical(candidates, options.typical),
    "top_p": lambda candidates, options, state: top_p(candidates, options.top_p),
    "min_p": lambda candidates, options, state: min_p(candidates, options.min_p),
    "temperature": lambda candidates, options, state: temperature(candidates, options.temperature),
    "likeliest": lambda candidates, options, state: likeliest(candidates),
}
CHAIN = ("penalties", "top_k", "typical", "top_p", "min_p", "temperature")
GREEDY_CHAIN = ("penalties", "likeliest")  # when the temperature is 0


class Sampler:
    """Chooses one token after the other. The same seed, options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions, vocab: int):
        """vocab: how many tokens exist; logits beyond are padding and never chosen."""
        self.options = options
        self.vocab = vocab
        self.seed = random.SystemRandom().getrandbits(32) if options.seed is None else int(options.seed)
        self._chain = [STEPS[name] for name in (CHAIN if options.temperature > 0 else GREEDY_CHAIN)]
        self._ids = np.arange(vocab)
        self._state = State(random.Random(self.seed), deque(maxlen=PENALTY_WINDOW))

    def copy(self, vocab: int | None = None) -> "Sampler":
        """A sampler that goes on by itself from here and would choose the same; vocab: if fewer tokens exist for it."""
        twin = copy.copy(self)
        twin._state = State(copy.copy(self._state.random), self._state.recent.copy())
        if vocab is not None and vocab < self.vocab:
            twin.vocab, twin._ids = vocab, self._ids[:vocab]
        return twin

    def accept(self, token: int) -> None:
        """Tell which token came, of the prompt or chosen: penalties count it."""
        self._state.recent.append(token)

    def sample(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """The next token's id, drawn from `distribution`."""
        candidates = self._left(logits, allowed)
        key = self._state.random.getrandbits(64)  # one for each token, so that a copy that sees other logits keeps step
        if len(candidates.ids) == 1:
            return int(candidates.ids[0])
        return draw(candidates, key)

    def distribution(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that can come next, ids int64 [n], and their probabilities, float64 [n], for logits float32
        [vocab] or longer. Greedy: one token with probability 1.

        allowed: bool [vocab] or longer, the tokens that a grammar lets come, or None for all. Raises LocalllmError if
        there is no such token or if the logits are not numbers.
        """
        candidates = self._left(logits, allowed)
        return candidates.ids, candidates.probabilities()

    def _left(self, logits: np.ndarray, allowed: np.ndarray | None) -> Candidates:
        """What the chain leaves."""
        candidates = Candidates(self._ids, logits[: self.vocab])
        if allowed is not None:
            candidates = only(candidates, allowed[: self.vocab])
        for step in self._chain:
            candidates = step(candidates, self.options, self._state)
        return candidates


def only(candidates: Candidates, allowed: np.ndarray) -> Candidates:
    """The candidates with a True in allowed, bool [n]. Raises LocalllmError if there is none."""
    if not allowed.any():
        raise LocalllmError("no token is allowed here")
    return candidates.keep(allowed)


def penalties(candidates: Candidates, recent: deque[int], options: SamplingOptions) -> Candidates:
    """Make recent tokens less likely.

    Repetition: Keskar et al. 2019 (CTRL), with llama.cpp's rule for negative logits; presence and frequency: OpenAI's.
    """
    off = options.repeat_penalty == 1 and options.presence_penalty == options.frequency_penalty == 0
    if off or not recent:
        return candidates
    counts = Counter(recent)
    tokens, times = np.array(list(counts)), np.array(list(counts.values()), np.float32)
    found, places = candidates.find(tokens)
    times = times[found]
    logits = candidates.logits.copy()
    old = logits[places]
    new = np.where(old <= 0, old * options.repeat_penalty, old / options.repeat_penalty)
    logits[places] = new - times * options.frequency_penalty - options.presence_penalty
    return candidates.change(logits)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """The k most likely tokens (0: all), ranked.

    At least k tokens reach the k-th largest of the maxima over 64 strided groups, so only those that do are sorted:
    0.06 ms for k = 40 of 128256, where np.argpartition takes 1.1 ms. All of them take 6.5 ms.
    """
    if candidates.ranked:
        return candidates.keep(slice(k or None))
    groups = len(candidates.ids) // 64
    if 0 < k < groups:
        maxima = candidates.logits[: groups * 64].reshape(64, groups).max(axis=0)
        less = candidates.logits < np.partition(maxima, -k)[-k]
        candidates = candidates.keep(np.flatnonzero(~less))  # and not >=, which would drop a NaN unseen
    return candidates.rank(k or None)


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens whose surprise is nearest to the expected one, until they have the probability p (Meister 2022)."""
    if p >= 1:
        return candidates
    probabilities = candidates.probabilities()
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    expected = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="right")) + 1
    return candidates.keep(np.sort(order[:count]))


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most likely tokens until they have the probability p: the nucleus (Holtzman et al. 2019)."""
    if p >= 1:
        return candidates
    candidates = candidates if candidates.ranked else candidates.rank()
    count = int(np.searchsorted(np.cumsum(candidates.probabilities()), p)) + 1
    return candidates.keep(slice(count))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens with at least p times the probability of the most likely one (Nguyen et al. 2024)."""
    if p <= 0:
        return candidates
    return candidates.keep(candidates.logits >= candidates.logits[candidates.best] + math.log(p))


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide the logits by t > 0: below 1 sharper, above 1 flatter."""
    logits = candidates.logits.astype(np.float64) - float(candidates.logits[candidates.best])
    return Candidates(candidates.ids, logits / t, candidates.ranked)


def likeliest(candidates: Candidates) -> Candidates:
    """Keep the most likely token; of equals, the one with the lowest id."""
    best = candidates.best
    return candidates.keep(slice(best, best + 1))


def draw(candidates: Candidates, key: int) -> int:
    """A token by its probability: the one with the largest sum of logit and Gumbel noise (the Gumbel-max trick).

    A token's noise depends on nothing but its id and the key, 64 bits. So two models whose probabilities are alike draw
    the same token most of the time, without knowing of each other (Daliri et al. 2024, arXiv 2408.07978).
    """
    _ = candidates.best
    noise = -np.log(-np.log(uniform(candidates.ids, key)))
    return int(candidates.ids[np.argmax(candidates.logits + noise)])


def uniform(ids: np.ndarray, key: int) -> np.ndarray:
    """A random number for each id int64 [n], float64 [n] between 0 and 1, from SplitMix64 (Steele et al. 2014)."""
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52
