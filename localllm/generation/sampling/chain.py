"""The chain of sampling: which steps there are, when each is on, and what they have to know of the text so far."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from localllm.generation.sampling import steps
from localllm.generation.sampling.candidates import Breakers, Candidates, History

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer

XTC_CHANCE = np.array([-1])  # the id, which is no token's, of the random number that says whether xtc excludes


@dataclass
class State:
    """The state of a sampler: the text so far, and the token that is about to be chosen.

    Attributes:
        random: where the keys come from.  vocab: how many tokens exist.
        history: of tokens.  breakers: of dry.
        mu: of mirostat, in bits.  mean: of adaptive_p, of the tokens' probabilities so far; newer ones count more.
        key: of the noise for the token, 64 bits.
        tokenizer: tells infill the texts of tokens and which end an answer.
        allowed: the mask of a grammar for the token, bool [vocab], or None.
        watched: candidates by whose probabilities mirostat or adaptive_p learns from it.  drawn: the token.
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
    def first(cls, options: Any, names: list[str], random: Random, vocab: int, tokenizer: "Tokenizer | None") -> Self:
        """Create the state before any text. options: complete; names: of the steps."""
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

    def learn(self, options: Any, token: int) -> None:
        """Append a token. Mirostat and adaptive_p only learn from tokens that were drawn."""
        self.history.append(token)
        self.breakers.push(token)
        if self.watched and token == self.drawn:
            probability = self.watched.probability(token)
            if options.mirostat:
                self.mu = steps.learnt_mu(self.mu, probability, options.mirostat_tau, options.mirostat_eta)
            else:
                self.mean += (1 - options.adaptive_decay) * (probability - self.mean)
        self.watched = None


Apply = Callable[[Candidates, Any, State], Candidates]  # Any: SamplingOptions that are complete


class SamplerStep(NamedTuple):
    """A step: what it does, when it is on, and whether it always keeps the most likely token."""

    apply: Apply
    is_on: Callable[[Any], bool]
    keeps_best: bool = False


def penalties(candidates: Candidates, options: Any, state: State) -> Candidates:
    recent, amounts = state.history.last(options.repeat_last_n), (options.presence_penalty, options.frequency_penalty)
    return steps.penalties(candidates, recent, options.repeat_penalty, *amounts)


def dry(candidates: Candidates, options: Any, state: State) -> Candidates:
    recent, growth = state.history.last(options.dry_penalty_last_n), (options.dry_multiplier, options.dry_base)
    return steps.dry(candidates, recent, state.breakers, *growth, options.dry_allowed_length)


def xtc(candidates: Candidates, options: Any, state: State) -> Candidates:
    chance = float(steps.uniform(XTC_CHANCE, state.key)[0])
    return steps.xtc(candidates, options.xtc_probability, options.xtc_threshold, chance)


def temperature(candidates: Candidates, options: Any, state: State) -> Candidates:
    if options.dynatemp_range == 0 or options.mirostat:
        return steps.temperature(candidates, options.temperature)
    return steps.dynamic_temperature(candidates, options.temperature, options.dynatemp_range, options.dynatemp_exponent)


def adaptive_p(candidates: Candidates, options: Any, state: State) -> Candidates:
    state.watched = candidates
    return steps.adaptive_p(candidates, min(max(2 * options.adaptive_target - state.mean, 0.0), 1.0))


def infill(candidates: Candidates, options: Any, state: State) -> Candidates:
    """Apply infill, which may end an answer unless something forbids it."""
    assert state.tokenizer
    ends, bytes_of = state.tokenizer.end_ids, state.tokenizer.token_bytes
    eos: int | None = state.tokenizer.eos_id if state.tokenizer.eos_id in ends else min(ends, default=None)
    is_barred = options.ignore_eos or options.logit_bias.get(eos) == -np.inf
    if is_barred or (eos is not None and state.allowed is not None and not state.allowed[eos]):
        eos = None
    return steps.infill(candidates, lambda token: bytes_of(token, special=False), ends, eos)


def mirostat(candidates: Candidates, options: Any, state: State) -> Candidates:
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


def chain(options: Any) -> list[str]:
    """Return the names of the steps that have an effect with these options, in their order.

    As in llama.cpp, mirostat leaves only the temperature in the chain; and adaptive_p, wherever it is named, comes
    last, because it learns from what is drawn. The result of a temperature of 0 is known without the steps before it
    that keep the most likely token, and without those after it.
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
