"""Choose drafts that save time in speculative decoding (Leviathan et al. 2023, arXiv 2211.17192).

Proposers draft tokens, the model reads a draft in one step, and the sampler draws at every position as it would without
a draft: a draft token is accepted if the same token is drawn. So the text is the same, in fewer steps. This module
estimates from measured costs and acceptance rates which draft, and how much of it, is worth its time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from localllm.generation.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localllm.generation.answer_state import AnswerState


MAX_DRAFT_TOKENS = 15  # maximum length of a draft, in tokens
# Initial cost of a step by its number of tokens, relative to one token (Zen 4, 1.2 B model, 2 threads).
USUAL_COSTS = {1: 1.0, 2: 1.3, 4: 1.8, 8: 3.2, 16: 5.5}
GAIN = 1.05  # minimum expected speedup of a draft
SURE = 16  # the highest trust
# Initial acceptance rate by trust, from answers of SmolLM2 with and without copied text.
FIRST_CHANCES = [*(trust / (trust + 2) for trust in range(SURE)), 0.95]
UNLIKELY = 0.05  # a draft ends where the probability that all its tokens are accepted is below this
ACCEPTANCE_DECAY = 0.95  # decay of older results in acceptance rates
IDLE_DECAY = 0.995  # decay of a low acceptance rate in a step without a draft, so that drafts are tried again
FREE = 0.01  # draft tokens that cost less than this share of a step are always computed, to measure their acceptance
TRIALS = 4  # drafts before their cost is trusted: the first run of a model takes longer
# The budget for losses by drafts: a share of the steps so far, plus START steps; gains count up to CREDIT steps.
LOSS, START, CREDIT = 0.02, 2.0, 3.0


class DraftToken(NamedTuple):
    """A token of a draft.

    Attributes:
        trust: likelihood, from 0 to SURE, that it is accepted; tokens of equal trust share an acceptance rate.
    """

    token: int
    trust: int


class Proposer(Protocol):
    """Drafts the next tokens of a sequence."""

    @property
    def account(self) -> "SpeculationBudget | None":
        """The budget that all drafts of this type share; None if each answer has its own."""
        ...

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens; a proposer that only searches the text may keep them."""

    def propose(self) -> Iterator[DraftToken] | None:
        """Return the tokens of a draft, computed as they are iterated over; None without a draft."""
        ...


class StepCostModel:
    """The measured cost of a decode step by its number of tokens, relative to a step of one token.

    Attributes:
        is_measured: whether a step was measured.
    """

    is_measured = False

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._relative = list[float]()  # costs by token count; empty: to be computed
        self._seconds_of_one = math.inf

    def record(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        if tokens <= MAX_DRAFT_TOKENS + 1:
            self._seconds[tokens] = smooth(self._seconds.get(tokens), seconds)
            self._seconds_of_one = self._seconds.get(1) or self._estimate_one()
            self._relative.clear()
            self.is_measured = True

    def estimate_cost(self, tokens: int) -> float:
        """Return the cost of a step, relative to a step of one token."""
        if not self._relative:  # interpolated linearly between known numbers of tokens
            known = {tokens: seconds / self._seconds_of_one for tokens, seconds in self._seconds.items()}
            self._relative = interpolate(USUAL_COSTS | known)
        return self._relative[tokens]

    def relate_seconds(self, seconds: float) -> float:
        """Return a duration relative to a step of one token."""
        return seconds / self._seconds_of_one

    def share_with_batch(self, other_sequences: int) -> "StepCostModel | BatchedStepCost":
        """Return the cost model for one of several answers.

        other_sequences: number of tokens of the other answers in the step.
        """
        return BatchedStepCost(self, other_sequences) if other_sequences else self

    def estimate_tokens(self, expected: float) -> float:
        """Return the expected number of tokens that a step generates, relative to a step without a draft.

        expected: that of this answer.
        """
        return expected

    def _estimate_one(self) -> float:
        """Estimate the seconds of a step of one token from longer steps and USUAL_COSTS."""
        usual = interpolate(USUAL_COSTS)
        return min(seconds / usual[tokens] for tokens, seconds in self._seconds.items())


class BatchedStepCost:
    """The cost of a decode step shared with other answers, relative to one token of this answer."""

    def __init__(self, costs: StepCostModel, other_sequences: int):
        self._costs, self._other_sequences = costs, other_sequences
        self._cost_of_one = costs.estimate_cost(other_sequences + 1)

    def estimate_cost(self, tokens: int) -> float:
        """Return the cost of a step with this number of tokens of this answer, relative to one token."""
        return self._costs.estimate_cost(tokens + self._other_sequences) / self._cost_of_one

    def relate_seconds(self, seconds: float) -> float:
        """Return a duration relative to a step with one token of this answer."""
        return self._costs.relate_seconds(seconds) / self._cost_of_one

    def estimate_tokens(self, expected: float) -> float:
        """Return the expected number of tokens that a step generates, relative to a step without a draft.

        expected: that of this answer; each of the others gets one token.
        """
        return (expected + self._other_sequences) / (1 + self._other_sequences)


def interpolate(measured: Mapping[int, float]) -> list[float]:
    """Interpolate costs linearly; return them by number of tokens, from 0 on.

    measured: costs by number of tokens, including that of 1 token.
    """
    costs = [0.0, measured[1]]
    for first, last in pairwise(sorted(measured)):
        step = (measured[last] - measured[first]) / (last - first)
        costs += [measured[first] + step * (tokens - first) for tokens in range(first + 1, last + 1)]
    return costs


Costs = StepCostModel | BatchedStepCost


def smooth(previous: float | None, seconds: float) -> float:
    """Return a smoothed duration: the minimum so far, slowly rising.

    Other programs can only make steps slower.
    """
    return seconds if previous is None else min(seconds, 0.8 * previous + 0.2 * seconds)


class AcceptanceHistory:
    """The recent acceptance rate of draft tokens.

    Attributes:
        chances: by trust, the probability that a draft token is accepted if all tokens before it were.
        usual: this probability over all draft tokens.
    """

    def __init__(self) -> None:
        self._right, self._seen = [0.0] * (SURE + 1), [0.0] * (SURE + 1)
        self.chances, self.usual = list(FIRST_CHANCES), 0.7

    def record(self, trust: int, was_right: bool) -> None:
        """Record whether a draft token of a level of trust was accepted."""
        self._right[trust] = ACCEPTANCE_DECAY * self._right[trust] + was_right
        self._seen[trust] = ACCEPTANCE_DECAY * self._seen[trust] + 1
        self.chances[trust] = (self._right[trust] + 2 * FIRST_CHANCES[trust]) / (self._seen[trust] + 2)
        self.usual = ACCEPTANCE_DECAY * self.usual + (1 - ACCEPTANCE_DECAY) * was_right

    def raise_idle_rate(self) -> None:
        """Raise a low acceptance rate a little in a step without a draft, so that drafts are tried again."""
        self.usual = IDLE_DECAY * self.usual + (1 - IDLE_DECAY)


class SpeculationBudget:
    """The cost and acceptance rate of one type of drafts, and the time that they may lose.

    It serves one answer or many.

    Attributes:
        experience: acceptance history.
        seconds: duration of computing one draft token; None if it is not known.
        trials: number of draft tokens to compute before the duration is trusted.
        steps: number of steps so far.
    """

    def __init__(self) -> None:
        self.experience, self.trials = AcceptanceHistory(), TRIALS
        self.seconds: float | None = None
        self._lost_steps, self.steps = 0.0, 0

    def record(self, seconds: float) -> None:
        """Record the duration of computing one draft token."""
        self.seconds, self.trials = smooth(self.seconds, seconds), self.trials - 1

    def charge(self, steps: float) -> None:
        """Charge the time of `steps` one-token steps to the budget; a negative number credits it."""
        self._lost_steps = max(self._lost_steps + steps, -CREDIT)

    @property
    def allows_loss(self) -> bool:
        """Return whether the budget allows more drafts, which may cost slightly more than they gain."""
        return self._lost_steps <= LOSS * self.steps + START


class DraftPlan(NamedTuple):
    """A draft, and the expected number of tokens per duration of a one-token step."""

    draft: list[int]
    rate: float


NO_DRAFT = DraftPlan([], 0.0)


class DraftPlanner:
    """A proposer with the cost and acceptance rate of its drafts."""

    def __init__(self, proposer: Proposer):
        self._proposer, self._account = proposer, proposer.account or SpeculationBudget()
        self._guesses: list[DraftToken] = []  # those computed for the current step
        self._planned, self._worth = 0, 0.0  # number of them in the draft, and gain of an accepted one

    def plan(self, limit: int, costs: Costs, least: float) -> DraftPlan:
        """Return the draft of at most `limit` tokens with the best rate.

        It is empty if that rate is not above `least`.
        """
        guesses = self._proposer.propose()
        if guesses is None:
            return NO_DRAFT
        chance, expected, account, cost = 1.0, [1.0], self._account, 0.0
        while len(self._guesses) < limit and chance > UNLIKELY and self._may_pay(expected, chance, limit, costs, least):
            started = perf_counter()
            guess = next(guesses, None)
            if guess is None:
                break
            seconds = perf_counter() - started
            account.record(seconds)
            cost += seconds
            self._guesses.append(guess)
            chance *= account.experience.chances[guess.trust]
            expected.append(expected[-1] + chance)
        if not self._guesses:
            return NO_DRAFT
        account.charge(min(costs.relate_seconds(cost), START))  # limited: the first draft may include compilation
        length, rate = self._choose_length(expected, costs)
        least /= 1 + len(self._guesses) * self._estimate_cost(
            costs
        )  # the time of computed draft tokens is spent already
        if rate <= least or not account.allows_loss:
            return NO_DRAFT
        account.charge(costs.estimate_cost(length + 1) - 1)
        self._planned, self._worth = length, costs.estimate_tokens(2.0) - costs.estimate_tokens(1.0)
        return DraftPlan([guess.token for guess in self._guesses[:length]], rate)

    def _choose_length(self, expected: list[float], costs: Costs) -> tuple[int, float]:
        """Return the length of the draft with the best expected rate, and the rate.

        expected: expected number of accepted tokens by length.
        """
        cost = (len(expected) - 1) * self._estimate_cost(costs)
        rates = [
            costs.estimate_tokens(tokens) / (costs.estimate_cost(length + 1) + cost)
            for length, tokens in enumerate(expected)
        ]
        rate = max(rates)
        return rates.index(rate), rate

    def _may_pay(self, expected: list[float], chance: float, limit: int, costs: Costs, least: float) -> bool:
        """Return whether more draft tokens may raise the rate, or are free, or have not been measured yet."""
        each = self._estimate_cost(costs)
        if each < FREE:
            return True
        if not self._account.allows_loss:
            return False
        if self._account.trials > 0:
            return True
        tokens, least = expected[-1], max(least, self._choose_length(expected, costs)[1])
        for length in range(len(expected), limit + 1):
            chance *= self._account.experience.usual
            tokens += chance
            if costs.estimate_tokens(tokens) > least * (costs.estimate_cost(length + 1) + length * each):
                return True
        return False

    def _estimate_cost(self, costs: Costs) -> float:
        """Return the cost of a draft token, relative to a step of one token."""
        return costs.relate_seconds(self._account.seconds or 0.0)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens, and record which of the latest draft tokens were right, whether they were used or not."""
        account, right = self._account, 0
        for guess, token in zip(self._guesses, tokens, strict=False):
            account.experience.record(guess.trust, guess.token == token)
            if guess.token != token:
                break
            right += 1
        if self._guesses:
            account.charge(-self._worth * min(right, self._planned))
            self._guesses, self._planned = [], 0
        else:
            account.experience.raise_idle_rate()
            account.seconds = account.seconds and IDLE_DECAY * account.seconds
        account.steps += 1
        self._proposer.push(tokens)

    def rewind(self, count: int) -> None:
        """Remove the last tokens, without recording anything about the latest draft."""
        self._guesses, self._planned = [], 0
        self._proposer.rewind(count)


class DraftSelector:
    """Drafts for one answer, each from the proposer with the best expected rate."""

    def __init__(self, proposers: Iterable[Proposer], costs: StepCostModel | None = None):
        """Combine proposers.

        proposers: have all tokens so far; those without cost come first. costs: shared cost model; None: a new one.
        """
        self._sources, self._costs = [DraftPlanner(proposer) for proposer in proposers], costs or StepCostModel()
        self.record = self._costs.record

    def draft(self, limit: int, other_sequences: int = 0) -> list[int]:
        """Return a draft of at most `limit` tokens, which is often empty.

        other_sequences: number of tokens of the other answers in the step. The first step has no draft, so that its
        duration is the baseline.
        """
        best = DraftPlan([], GAIN)
        if not self._costs.is_measured or other_sequences >= MAX_DRAFT_TOKENS:
            return []
        costs = self._costs.share_with_batch(other_sequences)
        for source in self._sources:
            plan = source.plan(min(limit, MAX_DRAFT_TOKENS - other_sequences), costs, best.rate)
            best = plan if plan.draft else best
        return best.draft

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens, and record which draft tokens were right."""
        for source in self._sources:
            source.push(tokens)

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens, which were undone."""
        for source in self._sources:
            source.rewind(count)


class Drafter(ABC):
    """A source of drafts for many answers, such as a draft model."""

    @abstractmethod
    def open_proposer(
        self, tokens: Sequence[int], sampler: Sampler, end_ids: frozenset[int], guide: "AnswerState | None" = None
    ) -> AbstractContextManager[Proposer]:
        """Open a proposer of drafts for an answer.

        tokens: tokens of the prompt and the answer so far. sampler, guide: those of the answer. end_ids: tokens that
        end it.
        """

    @abstractmethod
    def collect(self) -> None:
        """Take back the sequences of finished answers."""
