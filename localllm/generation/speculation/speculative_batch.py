"""Steps of a batch that take several tokens of an answer, guessed ahead: while few answers are made.

With few, a step's arithmetic has room left; with more, who guesses wrong would take the others' time.
"""

from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.image_tokens import has_images, texts_only
from localllm.generation.constraints.token_mask import ForcedTokensProposer
from localllm.generation.request import Completion
from localllm.generation.speculation.acceptance import Guesses, Proposer, StepCostModel
from localllm.generation.speculation.draft_model import DraftModel, account_of
from localllm.generation.speculation.ngram import from_text

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.speculation.ngram_cache import NgramCache

FEW = 4  # answers


class Draft(NamedTuple):
    """What may come next of an answer; often nothing."""

    answering: Completion
    tokens: list[int]


class BatchSpeculator:
    """Guesses for the answers of a batch, which know together what steps cost."""

    def __init__(self, engine: "Engine", end_ids: frozenset[int], written: "NgramCache | None" = None):
        self._engine, self._end_ids, self._written, self._costs = engine, end_ids, written, StepCostModel()
        self.took = self._costs.took

    def are_possible(self, answers: list[Completion]) -> bool:
        """Whether they are few, and one of them wants guesses."""
        return 0 < len(answers) <= FEW and any(wants_guesses(one) for one in answers)

    def listen(self, answering: Completion, others: int) -> None:
        """Have the model's layer that guesses, if there is one, read what this answer reads, beside so many others."""
        is_wanted = answering.request.task.options.speculate in ("auto", "mtp") and others < FEW
        is_wanted = is_wanted and account_of(self._engine).may_lose
        if answering.sequence and is_wanted and self._engine.has_guess_layer and not has_images(answering.ids):
            self._engine.listen(answering.sequence)

    def drafts(self, answers: list[Completion]) -> list[Draft]:
        """Of each answer what may come next, in one step for all."""
        found, others = list[Draft](), len(answers) - 1
        for answering in answers:
            tokens = self._guesses(answering).draft(answering.left - 1, others) if wants_guesses(answering) else []
            found.append(Draft(answering, tokens))
            others += len(tokens)
        return found

    def _guesses(self, answering: Completion) -> Guesses:
        if answering.guesses is None:
            proposers: list[Proposer] = [
                ForcedTokensProposer(answering.guide),
                *from_text(texts_only(answering.ids), self._written),
            ]
            self.listen(answering, 0)
            sequence = answering.sequence
            if sequence and (follower := sequence.listener):
                known, vocab = answering.ids[follower.begin :], answering.sampler.vocab  # type: ignore[attr-defined]
                account = account_of(self._engine)
                proposers.append(
                    DraftModel(follower, known, answering.sampler, vocab, self._end_ids, answering.guide, account)  # type: ignore[arg-type]
                )
            answering.guesses = Guesses(proposers, self._costs)
        return answering.guesses


def wants_guesses(answering: Completion) -> bool:
    return answering.request.task.options.speculate != "off"
