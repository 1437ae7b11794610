"""Sampling: from one row of logits to the next token, in llama.cpp's default order.

    allowed -> logit bias -> penalties -> dry -> top_n_sigma -> top_k -> typical -> top_p -> min_p -> xtc -> temperature
        -> adaptive_p -> draw

A step is a function from candidates to candidates, and the chain is a list of the steps that are on. After top_k, the
steps have few candidates left to work on.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from localllm.engine.image_tokens import without_images
from localllm.errors import UsageError
from localllm.generation.sampling import steps
from localllm.generation.sampling.candidates import Breakers, Candidates, History
from localllm.generation.sampling.options import CompleteOptions, SamplingOptions
from localllm.generation.sampling.steps import draw, logit_bias, only

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


XTC_CHANCE = np.array([-1])  # in place of a token id: the key of xtc's random number


@dataclass
class State:
    """The state of a sampler: the tokens so far, and the choice of the next one.

    Attributes:
        random: generates the keys.  vocab: vocabulary size.
        history: the latest tokens.  breakers: DRY's sequence breakers.
        mu: state of mirostat, in bits.  mean: state of adaptive_p, weighted mean of the tokens' probabilities.
        key: seed of the next token's noise, 64 bits.
        tokenizer: gives infill the texts of tokens and the end tokens.
        allowed: the mask of a constraint for the next token, bool [vocab], or None.
        watched: candidates from which mirostat or adaptive_p takes the probability of the drawn token.
        drawn: the token that was drawn.  repeats: whether the next token is drawn with the key of the last one.
    """

    random: Random
    vocab: int
    history: History
    breakers: Breakers
    mu: float
    mean: float
    tokenizer: "Tokenizer | None" = None
    key: int = 0
    allowed: np.ndarray | None = None
    watched: Candidates | None = None
    drawn: int | None = None
    repeats: bool = False

    @classmethod
    def first(
        cls, options: CompleteOptions, names: list[str], random: Random, vocab: int, tokenizer: "Tokenizer | None"
    ) -> Self:
        """Create the state before any token; names: names of the steps in the chain."""
        windows = [options.repeat_last_n] * ("penalties" in names) + [options.dry_penalty_last_n] * ("dry" in names)
        history = History(-1 if -1 in windows else max(windows, default=0))
        breakers = Breakers(options.dry_sequence_breakers if "dry" in names else (), tokenizer)
        speller = tokenizer if "infill" in names else None
        return cls(random, vocab, history, breakers, 2 * options.mirostat_tau, options.adaptive_target, speller)

    def copy(self) -> "State":
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.random, twin.history, twin.breakers = copy.copy(self.random), self.history.copy(), self.breakers.copy()
        return twin

    def learn(self, options: CompleteOptions, token: int) -> None:
        """Append a token; update mirostat or adaptive_p if it is the one that was drawn."""
        self.history.append(token)
        self.breakers.push(token)
        if self.watched and token == self.drawn:
            probability = self.watched.probability(token)
            if options.mirostat:
                self.mu = steps.learnt_mu(self.mu, probability, options.mirostat_tau, options.mirostat_eta)
            else:
                self.mean += (1 - options.adaptive_decay) * (probability - self.mean)
        self.watched = None


Apply = Callable[[Candidates, CompleteOptions, State], Candidates]


class SamplerStep(NamedTuple):
    """A step: its function, whether options turn it on, and whether it always keeps the most likely token."""

    apply: Apply
    is_on: Callable[[CompleteOptions], bool]
    keeps_best: bool = False


def penalties(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    recent, amounts = state.history.last(options.repeat_last_n), (options.presence_penalty, options.frequency_penalty)
    return steps.penalties(candidates, recent, options.repeat_penalty, *amounts)


def dry(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    recent, growth = state.history.last(options.dry_penalty_last_n), (options.dry_multiplier, options.dry_base)
    return steps.dry(candidates, recent, state.breakers, *growth, options.dry_allowed_length)


def xtc(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    chance = float(steps.uniform(XTC_CHANCE, state.key)[0])
    return steps.xtc(candidates, options.xtc_probability, options.xtc_threshold, chance)


def temperature(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    if options.dynatemp_range == 0 or options.mirostat:
        return steps.temperature(candidates, options.temperature)
    return steps.dynamic_temperature(candidates, options.temperature, options.dynatemp_range, options.dynatemp_exponent)


def adaptive_p(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    state.watched = candidates
    return steps.adaptive_p(candidates, min(max(2 * options.adaptive_target - state.mean, 0.0), 1.0))


def infill(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    """Apply infill; it may choose the EOS token unless options or a constraint forbid it."""
    assert state.tokenizer
    ends, bytes_of = state.tokenizer.end_ids, state.tokenizer.token_bytes
    eos: int | None = state.tokenizer.eos_id if state.tokenizer.eos_id in ends else min(ends, default=None)
    if eos is not None:
        is_barred = options.ignore_eos or options.logit_bias.get(eos) == -np.inf
        if is_barred or (state.allowed is not None and not state.allowed[eos]):
            eos = None
    return steps.infill(candidates, lambda token: bytes_of(token, special=False), ends, eos)


def mirostat(candidates: Candidates, options: CompleteOptions, state: State) -> Candidates:
    first = options.mirostat == 1
    candidates_left = (
        steps.mirostat_1(candidates, state.mu, state.vocab) if first else steps.mirostat_2(candidates, state.mu)
    )
    state.watched = candidates_left
    return candidates_left


STEPS: dict[str, SamplerStep] = {
    "penalties": SamplerStep(
        penalties,
        lambda options: (
            options.repeat_last_n != 0
            and (options.repeat_penalty, options.presence_penalty, options.frequency_penalty) != (1, 0, 0)
        ),
    ),
    "dry": SamplerStep(dry, lambda options: options.dry_multiplier > 0 and options.dry_penalty_last_n != 0),
    "top_n_sigma": SamplerStep(
        lambda candidates, options, state: steps.top_n_sigma(candidates, options.top_n_sigma),
        lambda options: options.top_n_sigma > 0,
        keeps_best=True,
    ),
    "top_k": SamplerStep(
        lambda candidates, options, state: steps.top_k(candidates, options.top_k),
        lambda options: options.top_k > 0,
        keeps_best=True,
    ),
    "typical": SamplerStep(
        lambda candidates, options, state: steps.typical(candidates, options.typical),
        lambda options: options.typical < 1,
    ),
    "top_p": SamplerStep(
        lambda candidates, options, state: steps.top_p(candidates, options.top_p),
        lambda options: options.top_p < 1,
        keeps_best=True,
    ),
    "min_p": SamplerStep(
        lambda candidates, options, state: steps.min_p(candidates, options.min_p),
        lambda options: options.min_p > 0,
        keeps_best=True,
    ),
    "xtc": SamplerStep(xtc, lambda options: options.xtc_probability > 0 and options.xtc_threshold <= 0.5),
    "temperature": SamplerStep(temperature, lambda options: options.temperature != 1 or options.dynatemp_range > 0),
    "adaptive_p": SamplerStep(adaptive_p, lambda options: options.adaptive_target >= 0, keeps_best=True),
    "infill": SamplerStep(infill, lambda options: True),
    "mirostat": SamplerStep(mirostat, lambda options: options.mirostat > 0, keeps_best=True),
    "likeliest": SamplerStep(lambda candidates, options, state: steps.likeliest(candidates), lambda options: True),
}

# The options that only one step has; windows and the like have no effect without them.
OPTIONS = {
    "penalties": ("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typical": ("typical",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("temperature", "dynatemp_range"),
}


def chain(options: CompleteOptions) -> list[str]:
    """Return the names of the steps that have an effect with these options, in order.

    As in llama.cpp, mirostat replaces all steps but temperature, and adaptive_p always comes last, because it learns
    from the token that is drawn. At temperature 0, two kinds of steps have no effect and are left out: those after
    temperature, and earlier ones that always keep the most likely token.
    """
    if options.mirostat:
        names = [name for name in ("temperature", "mirostat") if STEPS[name].is_on(options)]
    else:
        names = [name for name in options.samplers if name != "adaptive_p" and STEPS[name].is_on(options)]
        names += ["adaptive_p"] * ("adaptive_p" in options.samplers and STEPS["adaptive_p"].is_on(options))
    if "temperature" in names and options.temperature <= 0 and (options.mirostat or options.dynatemp_range == 0):
        steps_before = names[: names.index("temperature")]
        names = [*(name for name in steps_before if not STEPS[name].keeps_best), "likeliest"]
    return names


def unused_options(options: SamplingOptions, names: Iterable[str]) -> list[str]:
    """Return those of the named options whose step is on, but not among the samplers or replaced by mirostat."""
    complete = options.complete
    used = {"temperature"} if complete.mirostat else {*complete.samplers, "adaptive_p"}
    steps_unused = [step for step in OPTIONS if step not in used and STEPS[step].is_on(complete)]
    return [name for name in names if any(name in OPTIONS[step] for step in steps_unused)]


class Sampler:
    """Samples one token after the other. The same seed, options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions, vocab: int, tokenizer: "Tokenizer | None" = None):
        """Check the options against the vocabulary.

        vocab: vocabulary size; logits beyond it are padding. tokenizer: only needed for DRY's breakers, infill and
        ignore_eos. Raises UsageError for a bias of a token that does not exist.
        """
        self.options = complete = options.complete
        self.vocab = vocab
        self.seed = random.SystemRandom().getrandbits(32) if complete.seed is None else complete.seed
        names = chain(complete)
        self._chain, self._ids = [STEPS[name].apply for name in names], ids_below(vocab)
        self._biases = biases_of(complete, vocab, tokenizer)
        self._state = State.first(complete, names, random.Random(self.seed), vocab, tokenizer)
        self._learns = bool({"penalties", "dry", "mirostat", "adaptive_p"}.intersection(names))

    def copy(self, vocab: int | None = None) -> "Sampler":
        """Return an independent sampler in the same state; vocab: a smaller vocabulary size for it."""
        twin = copy.copy(self)
        twin._state = self._state.copy()
        if vocab is not None and vocab < self.vocab:
            twin.vocab, twin._ids, twin._state.vocab = vocab, self._ids[:vocab], vocab
        return twin

    def undrawn(self) -> "Sampler":
        """Return a copy as it was before the token that was drawn and not accepted yet."""
        twin = self.copy()
        twin._state.repeats = True
        return twin

    def restore(self, snapshot: "Sampler") -> None:
        """Go back to the state of a copy; the copy stays independent."""
        self._state = snapshot._state.copy()

    def read(self, prompt: Sequence[int]) -> None:
        """Append a prompt, without its images, to the history that penalties use."""
        prompt, limit = without_images(prompt), self._state.history.most
        for token in prompt if limit < 0 else prompt[len(prompt) - min(limit, len(prompt)) :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Append a token of the prompt or the answer to the history."""
        if self._learns:
            self._state.learn(self.options, token)

    def sample(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """Sample the next token's id from `distribution`."""
        state = self._state
        if not state.repeats:
            state.key = state.random.getrandbits(64)  # exactly one for each token, whatever the logits
        state.repeats = False
        candidates = self._left(logits, allowed)
        token = int(candidates.ids[candidates.best]) if len(candidates.ids) == 1 else draw(candidates, state.key)
        state.drawn = token
        return token

    def distribution(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute the distribution of the next token: ids int64 [n] and probabilities float64 [n].

        logits: float32 [vocab] or longer.  allowed: bool [vocab] or longer, the mask of a constraint; None: all.
        Greedy: one token with probability 1. Raises LocalllmError if no token is allowed or the logits are NaN.
        """
        twin = self.copy()
        twin._state.key = twin._state.random.getrandbits(64)
        candidates = twin._left(logits, allowed)
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
    """Return the ids from 0 on, int64 [vocab], read-only; shared, because each array takes 0.4 to 2 MB."""
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
    """Return n samplers after the prompt, with consecutive seeds from that of the options or a random one."""
    first = Sampler(options, vocab, tokenizer)
    further = [Sampler(replace(options, seed=first.seed + number), vocab, tokenizer) for number in range(1, n)]
    for sampler in (first, *further):
        sampler.read(prompt)
    return [first, *further]
