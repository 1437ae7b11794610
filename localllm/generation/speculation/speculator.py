"""Drafts for the answers of a step, if they are few: a single answer or a small batch.

A step for few answers is limited by memory bandwidth, so draft tokens cost little; in larger batches rejected drafts
would slow down the other answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.image_tokens import has_images, without_images
from localllm.generation.answer_state import AnswerState
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.request import Completion
from localllm.generation.speculation.acceptance import SURE, Drafter, Guess, Guesses, Proposer, StepCostModel
from localllm.generation.speculation.draft_model import DraftModel, account_of
from localllm.generation.speculation.ngram import text_proposers

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.speculation.ngram import NgramCache

FEW = 4  # most answers and draft tokens beside an answer that gets a draft


class AnswerSpan(NamedTuple):
    """The tokens that a run reads for an answer; `draft` is at their end.

    Attributes:
        is_end: whether the answer's tokens are all read then, so that the next one can be drawn.
        kernel_tokens: see localllm.engine.runs.
    """

    completion: Completion
    ids: list[int]
    draft: Sequence[int] = ()
    is_end: bool = True
    kernel_tokens: int = 1


def span_of(completion: Completion, count: int, kernel_tokens: int) -> AnswerSpan:
    """Return the next `count` unread tokens of an answer and its prompt."""
    cached, ids = completion.computed_tokens, completion.ids
    return AnswerSpan(completion, ids[cached : cached + count], (), cached + count == len(ids), kernel_tokens)


def logits_for(work: list[AnswerSpan]) -> str:
    """Return which logits a run must compute: "all" of each span (for drafts), the "last", or "none"."""
    requested = "none"
    for span in work:
        if span.draft:
            return "all"
        if span.is_end:
            requested = "last"
    return requested


class ForcedTokensProposer:
    """A proposer: drafts the tokens that a constraint or the budget of reasoning forces."""

    account = None

    def __init__(self, guide: AnswerState):
        self._guide = guide

    def push(self, tokens: Sequence[int]) -> None:
        """Do nothing: the mask already knows the tokens."""

    def rewind(self, count: int) -> None:
        """Do nothing: the mask already knows."""

    def propose(self) -> Iterator[Guess]:
        return (Guess(token, SURE) for token in self._guide.expected_tokens())


class Speculator:
    """Makes the drafts for the answers of one scheduler, which share the measured costs of steps."""

    def __init__(self, engine: "Engine", ngrams: "NgramCache | None" = None, resources: ExitStack | None = None):
        """Set up; resources: keeps the resources of a single answer's drafter, such as a sequence; None in a batch."""
        self._engine, self._ngrams, self._resources, self._costs = engine, ngrams, resources, StepCostModel()

    def listen(self, completion: Completion, other_sequences: int = 0) -> None:
        """Let the draft head follow an answer's tokens from now on, if that may pay with this number of other answers.

        The head is an MTP layer of the model, or comes from another file. Raises UsageError for a single answer that
        requests "mtp" without one.
        """
        sequence, speculate = completion.sequence, completion.options.speculate
        if (
            sequence is None
            or isinstance(sequence, ShiftedSequence)
            or has_images(completion.ids)
            or other_sequences >= FEW
        ):
            return
        is_wanted = speculate in ("auto", "mtp") and self._engine.has_draft_head
        if (is_wanted or (speculate == "mtp" and self._resources)) and account_of(self._engine).may_lose:
            self._engine.attach_draft_head(sequence)
        elif sequence.listener and self._resources:
            sequence.detach_listener()

    def learn_cost(self, tokens: int, seconds: float) -> None:
        self._costs.record(tokens, seconds)

    def drafts(self, answers: list[Completion], other_sequences: int = 0) -> list[list[int]]:
        """Return a draft for each answer in a step with `other_sequences` more; all are empty in large batches."""
        drafts: list[list[int]] = []
        other_sequences += len(answers) - 1
        if other_sequences >= FEW:
            for completion in answers:
                completion.guesses = None
            return [[] for _ in answers]
        for completion in answers:
            draft: list[int] = []
            if completion.options.speculate != "off":
                completion.guesses = completion.guesses or self._start(completion)
                draft = completion.guesses.draft(most_guessed(completion), other_sequences)
            drafts.append(draft)
            other_sequences += len(draft)
        return drafts

    def _start(self, completion: Completion) -> Guesses:
        """Choose the proposers of an answer, those without cost first."""
        guide, sampler, tokens = completion.guide, completion.sampler, without_images(completion.ids)
        proposers: list[Proposer] = [ForcedTokensProposer(guide)] if guide.is_needed else []
        proposers += text_proposers(tokens, self._ngrams)
        speculate, end_ids = completion.options.speculate, completion.end_ids
        if isinstance(speculate, Drafter) and self._resources:
            proposers.append(self._resources.enter_context(speculate.proposer(tokens, sampler, end_ids, guide)))
        if (
            not self._resources or completion.number
        ):  # a batch that has become small: the head may not follow this answer yet
            self.listen(completion)
        sequence = None if has_images(completion.ids) else completion.sequence
        if sequence and (follower := sequence.listener):
            tokens_known, account = tokens[follower.begin :], account_of(self._engine)  # type: ignore[attr-defined]
            proposers.append(DraftModel(follower, tokens_known, sampler, sampler.vocab, end_ids, guide, account))  # type: ignore[arg-type]
        return Guesses(proposers, self._costs)


def most_guessed(completion: Completion) -> int:
    """Return the longest draft allowed: a full context must be shifted at the same token as without a draft."""
    remaining, sequence = completion.remaining_tokens - 1, completion.sequence
    return min(remaining, max(0, sequence.room - 1)) if isinstance(sequence, ShiftedSequence) else remaining
