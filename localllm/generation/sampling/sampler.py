"""Sampling: from one row of logits to the next token, in llama.cpp's default order.

    allowed -> logit bias -> penalties -> dry -> top_n_sigma -> top_k -> typical -> top_p -> min_p -> xtc -> temperature
        -> adaptive_p -> draw

A step is a function from candidates to candidates and may be anywhere in the chain, which is only their order; steps
that are off are not in it. As soon as top_k has ranked and cut the candidates, the other steps work on few.
"""

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from localllm.engine.image_tokens import without_images
from localllm.errors import UsageError
from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.chain import STEPS, State, chain
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.sampling.steps import draw, logit_bias, only

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


class Sampler:
    """Chooses one token after the other. The same seed, options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions, vocab: int, tokenizer: "Tokenizer | None" = None):
        """Check the options against the vocabulary.

        vocab: how many tokens exist; logits beyond are padding and never chosen. tokenizer: tells which tokens contain
        a dry breaker and which end an answer; needed for these options only.

        Raises UsageError for a bias of a token that does not exist.
        """
        self.options = chosen = options.complete
        self.vocab = vocab
        self.seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
        names = chain(chosen)
        self._chain, self._ids = [STEPS[name].apply for name in names], ids_below(vocab)
        self._biases = biases_of(chosen, vocab, tokenizer)
        self._state = State.first(chosen, names, random.Random(self.seed), vocab, tokenizer)
        self._learns = bool({"penalties", "dry", "mirostat", "adaptive_p"}.intersection(names))

    def copy(self, vocab: int | None = None) -> "Sampler":
        """Return an independent sampler that would choose the same; vocab: if fewer tokens exist for it."""
        twin = copy.copy(self)
        twin._state = self._state.copy()
        if vocab is not None and vocab < self.vocab:
            twin.vocab, twin._ids, twin._state.vocab = vocab, self._ids[:vocab], vocab
        return twin

    def restore(self, earlier: "Sampler") -> None:
        """Go back to where a copy was made, which goes on by itself."""
        self._state = earlier._state.copy()

    def read(self, prompt: Sequence[int]) -> None:
        """Set the prompt, which penalties look back on, but not on its images."""
        prompt, most = without_images(prompt), self._state.history.most
        for token in prompt if most < 0 else prompt[len(prompt) - min(most, len(prompt)) :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Append a token to the history, of the prompt or sampled."""
        if self._learns:
            self._state.learn(self.options, token)

    def sample(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """Sample the next token's id from `distribution`."""
        state = self._state
        state.key = state.random.getrandbits(64)  # one for each token, so that a copy that sees other logits keeps step
        candidates = self._left(logits, allowed)
        token = int(candidates.ids[candidates.best]) if len(candidates.ids) == 1 else draw(candidates, state.key)
        state.drawn = token
        return token

    def distribution(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute the distribution of the next token: ids int64 [n] and probabilities float64 [n].

        logits: float32 [vocab] or longer. Greedy: one token with probability 1.

        allowed: bool [vocab] or longer, the mask of a grammar, or None for all. Raises LocalllmError if no token is
        allowed or if the logits are not numbers.
        """
        looking = self.copy()
        looking._state.key = looking._state.random.getrandbits(64)
        candidates = looking._left(logits, allowed)
        return candidates.ids, candidates.probabilities()

    def _left(self, logits: np.ndarray, allowed: np.ndarray | None) -> Candidates:
        """Apply the chain and return the remaining candidates."""
        candidates = Candidates(self._ids, logits[: self.vocab])
        if allowed is not None:
            candidates = only(candidates, allowed[: self.vocab])
        self._state.allowed = allowed
        if self._biases:
            candidates = logit_bias(candidates, *self._biases)
        for step in self._chain:
            candidates = step(candidates, self.options, self._state)
        return candidates


@lru_cache(2)
def ids_below(vocab: int) -> np.ndarray:
    """Return all ids in order, int64 [vocab], read-only. An array for each of a server's answers was 0.4 to 2 MB."""
    ids = np.arange(vocab)
    ids.flags.writeable = False
    return ids


def biases_of(
    options: SamplingOptions, vocab: int, tokenizer: "Tokenizer | None"
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return tokens int64 [n] and the biases of their logits, float64 [n]; None if there are none.

    Raises UsageError.
    """
    biases = dict(options.logit_bias or {})
    for token in biases:
        if token >= vocab:
            raise UsageError(f"logit_bias: token {token} does not exist: the vocabulary has {vocab} tokens")
    if options.ignore_eos:
        assert tokenizer
        biases |= dict.fromkeys(tokenizer.end_ids, -math.inf)
    return (np.array(list(biases)), np.array(list(biases.values()), np.float64)) if biases else None


def log_total(logits: np.ndarray) -> float:
    """Compute log sum exp of logits float32 [vocab], to be subtracted for log probabilities."""
    largest = float(logits.max())
    return largest + math.log(np.exp(logits.astype(np.float64) - largest).sum())


def make_samplers(
    options: SamplingOptions, prompt: list[int], vocab: int, n: int, tokenizer: "Tokenizer | None" = None
) -> list[Sampler]:
    """Return n samplers that know the prompt, with seeds that count up from the options' one or a random one."""
    first = Sampler(options, vocab, tokenizer)
    others = [Sampler(replace(options, seed=first.seed + number), vocab, tokenizer) for number in range(1, n)]
    for sampler in (first, *others):
        sampler.read(prompt)
    return [first, *others]
