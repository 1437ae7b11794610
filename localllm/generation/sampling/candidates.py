"""Store the candidates for the next token, which sampling steps filter, and the sampler's state."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from localllm.errors import NOT_NUMBERS, LocalllmError

if TYPE_CHECKING:
    from localllm.generation.sampling.options import CompleteOptions
    from localllm.text.tokenizer import Tokenizer


LARGEST = float(np.finfo(np.float32).max)
LARGEST_DOUBLE = 1e300  # differences of such numbers stay finite in float64
IMPOSSIBLE = 1e-300  # probabilities below count as 0
MAX_MU = 1e300  # bits; bound of mirostat's mu


class Candidates(NamedTuple):
    """The tokens that may come next: sorted by id or, if `ranked`, by descending likelihood."""

    ids: np.ndarray  # int64 [n]
    logits: np.ndarray  # float32 or float64 [n]
    ranked: bool = False

    @property
    def best(self) -> int:
        """The index of the largest logit, the first of several equal ones.

        NaN counts as the largest. Raises LocalllmError if the largest logit is not finite.
        """
        best = 0 if self.ranked else int(np.argmax(self.logits))
        if not math.isfinite(self.logits[best]):
            raise LocalllmError(NOT_NUMBERS)
        return best

    def keep(self, index: np.ndarray | slice) -> "Candidates":
        """Return the candidates at an index: a slice, a mask or ascending integers."""
        if isinstance(index, np.ndarray) and index.dtype == np.bool_:
            index = np.flatnonzero(index)  # indexing twice by a mask takes twice as long
        return Candidates(self.ids[index], self.logits[index], self.ranked)

    def rank(self, count: int | None = None) -> "Candidates":
        """Return the `count` most likely candidates (None: all), ranked; equally likely ones keep their order.

        Raises the errors of `best`.
        """
        _ = self.best
        order = np.argsort(-self.logits, kind="stable")[:count]
        return Candidates(self.ids[order], self.logits[order], ranked=True)

    def replace_logits(self, places: np.ndarray, logits: np.ndarray) -> "Candidates":
        """Return the candidates with new logits, float64 [m], at indices int64 [m]; finite logits stay finite."""
        moved, largest = self.logits.copy(), LARGEST if self.logits.dtype == np.float32 else LARGEST_DOUBLE
        moved[places] = np.where(np.isfinite(self.logits[places]), np.clip(logits, -largest, largest), logits)
        changed = Candidates(self.ids, moved)
        return changed.rank() if self.ranked else changed

    def find(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find tokens, int64 [m], among the candidates.

        Returns a mask of those that are candidates, bool [m], and their indices, int64 [at most m].
        """
        order = np.argsort(self.ids) if self.ranked else None
        places = np.minimum(np.searchsorted(self.ids, tokens, sorter=order), len(self.ids) - 1)
        places = places if order is None else order[places]
        is_candidate = self.ids[places] == tokens
        return is_candidate, places[is_candidate]

    def compute_probabilities(self) -> np.ndarray:
        """Compute the softmax of the logits, float64 [n]."""
        if len(self.ids) == 1:
            return np.ones(1)
        weights = np.exp(self.logits.astype(np.float64) - float(self.logits[self.best]))
        result: np.ndarray = weights / weights.sum()
        return result

    def compute_probability(self, token: int) -> float:
        """Return the probability of a token that is a candidate."""
        return float(self.compute_probabilities()[np.flatnonzero(self.ids == token)[0]])


INITIAL_CAPACITY = 256  # tokens


class TokenHistory:
    """The latest tokens of a sequence.

    Attributes:
        most: minimum number of tokens that are kept; -1: all.
    """

    def __init__(self, capacity: int):
        """Prepare to store tokens.

        capacity: number of tokens; -1: all, 0: none.
        """
        self.most, self._count = capacity, 0
        self._tokens = np.empty(INITIAL_CAPACITY if capacity else 0, np.int64)

    def append(self, token: int) -> None:
        if self.most == 0:
            return
        if self._count == len(self._tokens):
            latest = self.get_last(self.most)
            self._tokens = np.empty(2 * max(len(latest), INITIAL_CAPACITY), np.int64)
            self._tokens[: len(latest)] = latest
            self._count = len(latest)
        self._tokens[self._count] = token
        self._count += 1

    def get_last(self, count: int) -> np.ndarray:
        """Return the last `count` tokens (-1: all), or fewer, int64 [n]."""
        return self._tokens[0 if count < 0 else max(0, self._count - count) : self._count]

    def copy(self) -> "TokenHistory":
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._tokens = self._tokens[: self._count].copy()
        return twin


class SequenceBreakers:
    """Finds the sequence breakers of DRY in the text, however it is tokenized.

    Attributes:
        since: number of tokens since a breaker ended.
    """

    def __init__(self, texts: Sequence[str], tokenizer: "Tokenizer | None"):
        """Store the breakers.

        tokenizer: None if `texts` is empty.
        """
        self._texts, self._tokenizer = [text.encode() for text in texts], tokenizer
        self._longest = max(map(len, self._texts), default=1)
        self._tail, self.since = b"", 0  # the last bytes of the text; tokens since one of the texts ended

    def push(self, token: int) -> None:
        """Append a token, and update `since`."""
        data, old_tail = self._tail + self._get_bytes(token), len(self._tail)
        ended = any(data.find(text, max(0, old_tail - len(text) + 1)) >= 0 for text in self._texts)
        self.since = 0 if ended else self.since + 1
        self._tail = data[max(0, len(data) - self._longest + 1) :]

    def occur_in(self, token: int) -> bool:
        """Return whether the text of a token contains a breaker."""
        data = self._get_bytes(token)
        return any(text in data for text in self._texts)

    def _get_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a control token."""
        return self._tokenizer.token_bytes(token, special=True) if self._tokenizer and self._texts else b""

    def copy(self) -> "SequenceBreakers":
        return copy.copy(self)


def hash_uniform(ids: np.ndarray, key: int) -> np.ndarray:
    """Hash ids, int64 [n], to numbers between 0 and 1, float64 [n], with SplitMix64 (Steele et al. 2014)."""
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52


def update_mu(mu: float, probability: float, target: float, rate: float) -> float:
    """Return mirostat's mu after a token with this probability.

    target: surprise in bits. rate: learning rate.
    """
    error = -math.log2(max(probability, IMPOSSIBLE)) - target
    return min(max(mu - rate * error, -MAX_MU), MAX_MU)


@dataclass
class SamplerState:
    """The state of a sampler: the tokens so far, and what the choice of the next one depends on.

    Attributes:
        random: generates the keys.  vocab: size of the vocabulary.
        history: the latest tokens.  breakers: sequence breakers of DRY.
        mu: state of mirostat, in bits.
        mean: state of adaptive_p, the weighted mean of the probabilities of the tokens so far.
        key: seed of the next token's noise, 64 bits.
        tokenizer: provides the texts of tokens and the end tokens for infill.
        allowed: mask of a constraint for the next token, bool [vocab], or None.
        watched: candidates from which mirostat or adaptive_p takes the probability of the drawn token.
        drawn: the token that was drawn.  repeats: whether the next token is drawn with the key of the last one.
    """

    random: Random
    vocab: int
    history: TokenHistory
    breakers: SequenceBreakers
    mu: float
    mean: float
    tokenizer: "Tokenizer | None" = None
    key: int = 0
    allowed: np.ndarray | None = None
    watched: Candidates | None = None
    drawn: int | None = None
    repeats: bool = False

    @classmethod
    def create(
        cls, options: "CompleteOptions", names: list[str], random: Random, vocab: int, tokenizer: "Tokenizer | None"
    ) -> Self:
        """Return the state before the first token.

        names: names of the steps in the chain.
        """
        windows = [options.repeat_last_n] * ("penalties" in names) + [options.dry_penalty_last_n] * ("dry" in names)
        history = TokenHistory(-1 if -1 in windows else max(windows, default=0))
        breakers = SequenceBreakers(options.dry_sequence_breakers if "dry" in names else (), tokenizer)
        speller = tokenizer if "infill" in names else None
        return cls(random, vocab, history, breakers, 2 * options.mirostat_tau, options.adaptive_target, speller)

    def copy(self) -> "SamplerState":
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.random, twin.history, twin.breakers = copy.copy(self.random), self.history.copy(), self.breakers.copy()
        return twin

    def accept(self, options: "CompleteOptions", token: int) -> None:
        """Append a token; if it is the drawn one, update the state of mirostat or adaptive_p."""
        self.history.append(token)
        self.breakers.push(token)
        if self.watched and token == self.drawn:
            probability = self.watched.compute_probability(token)
            if options.mirostat:
                self.mu = update_mu(self.mu, probability, options.mirostat_tau, options.mirostat_eta)
            else:
                self.mean += (1 - options.adaptive_decay) * (probability - self.mean)
        self.watched = None
