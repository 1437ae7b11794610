"""The sampler chain: its steps, the options that turn each on, and the state that they share."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from localllm.generation.sampling import steps
from localllm.generation.sampling.candidates import Breakers, Candidates, History
from localllm.generation.sampling.options import CompleteOptions

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
        drawn: the token that was drawn.
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

    @classmethod
    def first(
        cls, options: CompleteOptions, names: list[str], random: Random, vocab: int, tokenizer: "Tokenizer | None"
    ) -> Self:
        """Create the state before any token; names: of the steps in the chain."""
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
    kept = steps.mirostat_1(candidates, state.mu, state.vocab) if first else steps.mirostat_2(candidates, state.mu)
    state.watched = kept
    return kept


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


def chain(options: CompleteOptions) -> list[str]:
    """Return the names of the steps that have an effect with these options, in order.

    As in llama.cpp, mirostat replaces all steps but temperature, and adaptive_p always comes last, because it learns
    from the token that is drawn. A temperature of 0 makes the steps after it superfluous, and those before it that keep
    the most likely token.
    """
    if options.mirostat:
        names = [name for name in ("temperature", "mirostat") if STEPS[name].is_on(options)]
    else:
        names = [name for name in options.samplers if name != "adaptive_p" and STEPS[name].is_on(options)]
        names += ["adaptive_p"] * ("adaptive_p" in options.samplers and STEPS["adaptive_p"].is_on(options))
    if "temperature" in names and options.temperature <= 0 and (options.mirostat or options.dynatemp_range == 0):
        before = names[: names.index("temperature")]
        names = [*(name for name in before if not STEPS[name].keeps_best), "likeliest"]
    return names
