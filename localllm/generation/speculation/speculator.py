"""Speculative decoding for few answers in one step: a single one, or those of a small batch.

A step for few answers has computing power to spare; in larger batches rejected drafts would slow down the others.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.image_tokens import has_images, without_images
from localllm.generation.constraints.token_mask import ForcedTokensProposer
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.request import Completion
from localllm.generation.speculation.acceptance import Guesses, Proposer, StepCostModel
from localllm.generation.speculation.draft_model import DraftModel, account_of
from localllm.generation.speculation.drafter import Drafter
from localllm.generation.speculation.ngram import from_text

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.speculation.ngram_cache import NgramCache

FEW = 4  # answers


class AnswerSpan(NamedTuple):
    """The tokens that a run reads for an answer, and the draft at their end.

    Attributes:
        is_end: whether all of the answer's tokens have been read then, so that the next one is drawn.
    """

    answering: Completion
    ids: list[int]
    draft: Sequence[int] = ()
    is_end: bool = True


def span_of(answering: Completion, count: int) -> AnswerSpan:
    """Return the next tokens of an answer that are to be read, or of its prompt."""
    held, ids = answering.computed_tokens, answering.ids
    return AnswerSpan(answering, ids[held : held + count], is_end=held + count == len(ids))


def logits_for(work: list[AnswerSpan]) -> str:
    """Return the indices of the logits that a run must return."""
    wanted = "none"
    for one in work:
        if one.draft:
            return "all"
        if one.is_end:
            wanted = "last"
    return wanted


class Speculator:
    """Drafts for the answers of one batch, which share their measurements of what a step costs."""

    def __init__(self, engine: "Engine", written: "NgramCache | None" = None, held: ExitStack | None = None):
        """Set up the speculator; held: what the drafter of a single answer needs, such as a draft model's sequence."""
        self._engine, self._written, self._held, self._costs = engine, written, held, StepCostModel()

    def listen(self, answering: Completion, others: int = 0) -> None:
        """Let the draft head read an answer's tokens from now on, if that may pay with so many other answers.

        The head is a layer of the model, or comes from another file. Raises UsageError for a single answer that
        requests "mtp" where there is no such layer.
        """
        sequence, speculate = answering.sequence, answering.options.speculate
        if sequence is None or isinstance(sequence, ShiftedSequence) or has_images(answering.ids) or others >= FEW:
            return
        is_wanted = speculate in ("auto", "mtp") and self._engine.has_draft_head
        if (is_wanted or (speculate == "mtp" and self._held)) and account_of(self._engine).may_lose:
            self._engine.attach_draft_head(sequence)
        elif sequence.listener and self._held:
            sequence.detach_listener()

    def learn_cost(self, tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        self._costs.record(tokens, seconds)

    def drafts(self, answers: list[Completion], others: int = 0) -> list[list[int]]:
        """Return a draft for each answer, in a step with `others` more answers; none in large batches."""
        drafts: list[list[int]] = []
        others += len(answers) - 1
        if others >= FEW:
            for answering in answers:
                answering.guesses = None
            return [[] for _ in answers]
        for answering in answers:
            draft: list[int] = []
            if wants_guesses(answering):
                answering.guesses = answering.guesses or self._start(answering)
                draft = answering.guesses.draft(most_guessed(answering), others)
            drafts.append(draft)
            others += len(draft)
        return drafts

    def _start(self, answering: Completion) -> Guesses:
        """Choose the proposers; those without cost come first."""
        guide, sampler, tokens = answering.guide, answering.sampler, without_images(answering.ids)
        proposers: list[Proposer] = [ForcedTokensProposer(guide)] if guide.is_needed else []
        proposers += from_text(tokens, self._written)
        speculate, end_ids = answering.options.speculate, answering.end_ids
        if isinstance(speculate, Drafter) and self._held:
            proposers.append(self._held.enter_context(speculate.proposer(tokens, sampler, end_ids, guide)))
        if not self._held or answering.number:  # few are left, of which some may not have been heard
            self.listen(answering)
        sequence = None if has_images(answering.ids) else answering.sequence
        if sequence and (follower := sequence.listener):
            known, account = tokens[follower.begin :], account_of(self._engine)  # type: ignore[attr-defined]
            proposers.append(DraftModel(follower, known, sampler, sampler.vocab, end_ids, guide, account))  # type: ignore[arg-type]
        return Guesses(proposers, self._costs)


def wants_guesses(answering: Completion) -> bool:
    return answering.options.speculate != "off"


def most_guessed(answering: Completion) -> int:
    """Return the longest draft allowed: a full context must shift where it would without a draft."""
    most, sequence = answering.remaining_tokens - 1, answering.sequence
    return min(most, max(0, sequence.room - 1)) if isinstance(sequence, ShiftedSequence) else most
