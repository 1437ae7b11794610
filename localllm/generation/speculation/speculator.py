"""Draft tokens for the answers of a step: a single answer or a small batch.

A step for few answers is limited by memory bandwidth, so draft tokens cost little; in larger batches rejected drafts
would slow down the other answers.

A draft model, which is smaller and has the same vocabulary, samples with a copy of the large model's sampler and its
random numbers. So both draw the same token wherever their probabilities are similar, and the text is the same as
without drafts. The rejection rule of Leviathan et al. 2023 accepts 4 to 12 % more draft tokens and has the same
distribution, but does not give the same text for the same seed; docs/decisions/speculative-sampling.md compares other
rules.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from localllm.engine.draft_head import is_draft_head
from localllm.engine.image_tokens import has_images, remove_images
from localllm.errors import ConstraintError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.answer_state import AnswerState
from localllm.generation.chunked_prefill import prefill_prompt
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.prefix_cache import PrefixCache, PrefixQuery
from localllm.generation.request import Completion
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.speculation.acceptance import (
    SURE,
    Drafter,
    DraftSelector,
    DraftToken,
    Proposer,
    SpeculationBudget,
    StepCostModel,
)
from localllm.generation.speculation.ngram import make_text_proposers
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence as Tokens
    from localllm.generation.answer_state import AnswerState
    from localllm.generation.context_overflow import ShiftedSequence
    from localllm.generation.speculation.ngram import NgramCache


MAX_PADDING = 128  # maximum of tokens by which vocabularies may differ at the end, as in llama.cpp: some are padded


class ModelDrafter(Drafter):
    """A draft model for other models; each answer has a sequence of its own."""

    def __init__(self, cache: PrefixCache, tokenizer: Tokenizer):
        self._cache, self._pieces, self._account = cache, tokenizer.pieces, SpeculationBudget()

    def require_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raise UsageError unless the vocabularies are equal, apart from at most MAX_PADDING tokens at the end."""
        pieces, model_pieces = self._pieces, tokenizer.pieces
        common = min(len(pieces), len(model_pieces))
        if pieces[:common] != model_pieces[:common]:
            token = next(i for i in range(common) if pieces[i] != model_pieces[i])
            difference = f"token {token} is {pieces[token]!r}, but {model_pieces[token]!r} in the model"
            raise UsageError(f"the draft model has a different vocabulary: {difference}")
        if abs(len(pieces) - len(model_pieces)) > MAX_PADDING:
            raise UsageError(
                f"the draft model has a different vocabulary: {len(pieces)} tokens, but the model has "
                f"{len(model_pieces)}"
            )

    @contextmanager
    def open_proposer(
        self, tokens: Sequence[int], sampler: Sampler, end_ids: frozenset[int], guide: "AnswerState | None" = None
    ) -> Iterator["DraftModelProposer"]:
        """Prefill the tokens so far, and return a proposer of those that follow."""
        vocab = min(sampler.vocab, len(self._pieces))
        sequence = self._cache.acquire_sequence(PrefixQuery(tokens)).sequence
        try:
            shared = next((i for i, token in enumerate(tokens) if token >= vocab), len(tokens))
            if len(sequence.tokens) < shared - 1 < self._cache.context:
                prefill_prompt(sequence, list(tokens[: shared - 1]), None)
            yield DraftModelProposer(sequence, tokens, sampler, vocab, end_ids, guide, self._account)
        finally:
            self._cache.queue_release(sequence)

    def collect(self) -> None:
        """Take back the sequences of finished answers."""
        self._cache.collect()


class DraftModelProposer:
    """Drafts the tokens that a smaller model generates."""

    def __init__(
        self, sequence: "Tokens | ShiftedSequence", tokens: Sequence[int], sampler: Sampler, vocab: int,
        end_ids: frozenset[int], guide: "AnswerState | None" = None, account: SpeculationBudget | None = None,
    ):  # fmt: skip
        """Set up the draft model.

        sequence: sequence of the draft model, which holds some of the tokens.
        sampler, guide: those of the target model, after these tokens.
        vocab: number of tokens that both models have.  end_ids: tokens that end an answer.  account: see Proposer.
        """
        self.account = account
        self._sequence, self._text, self._right = sequence, list(tokens), len(sequence.tokens)
        self._sampler, self._guide, self._vocab, self._end_ids = sampler, guide, vocab, end_ids
        self._readable = all(token < vocab for token in tokens)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._text += tokens
        self._readable = self._readable and all(token < self._vocab for token in tokens)

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens."""
        del self._text[len(self._text) - count :]
        self._right = min(self._right, len(self._text))

    def propose(self) -> Iterator[DraftToken]:
        """Yield draft tokens up to the end of the answer or the context, one for each run of the draft model."""
        read_tokens = self._sequence.tokens
        while (
            self._right < min(len(read_tokens), len(self._text) - 1)
            and read_tokens[self._right] == self._text[self._right]
        ):
            self._right += 1
        self._sequence.truncate(self._right)
        sampler, unread = self._sampler.copy(self._vocab), self._text[len(read_tokens) :]
        guide = self._guide and self._guide.copy()
        self._right = len(self._text)
        while self._readable and len(read_tokens) + len(unread) <= self._sequence.engine.context:
            logits = self._sequence.append(unread)[0, : self._vocab]
            try:
                token = sampler.sample(logits, guide.compute_allowed_mask(self._vocab) if guide else None)
            except ConstraintError:  # only tokens that the draft model lacks are allowed
                return
            yield DraftToken(token, compute_trust(logits, token))
            if token in self._end_ids:
                return
            sampler.accept(token)
            if guide:
                guide.accept(token)
                if guide.has_ended:
                    return
            unread = [token]


ACCOUNTS = WeakKeyDictionary[object, SpeculationBudget]()  # by engine


def get_head_budget(engine: object) -> SpeculationBudget:
    """Return the budget for drafts by the MTP layer or attached draft head of an engine's model."""
    return ACCOUNTS.setdefault(engine, SpeculationBudget())


def compute_trust(logits: np.ndarray, token: int) -> int:
    """Return the probability of a token, scaled to the range of trust from 0 to SURE and rounded.

    logits: float32 [vocab].
    """
    weights = np.exp(logits - logits.max())
    return round(SURE * float(weights[token] / weights.sum()))


TOKENS = "tokenizer.ggml.tokens"


def attach_draft_head(path: str, cache: PrefixCache, tokenizer: Tokenizer) -> bool:
    """Attach the draft head in a file to a model; return whether the file has one.

    Raises the errors of Engine.load_draft_head, and UsageError for a head whose vocabulary differs from that of the
    tokenizer.
    """
    engine = cache.engine
    if path == engine.draft_head_path:
        return True
    file = GGUFFile.open(path)
    if not is_draft_head(file):
        file.close()
        return False
    if file.metadata.get(TOKENS) is not None:
        try:
            ModelDrafter(cache, Tokenizer.from_metadata(file.metadata)).require_vocabulary(tokenizer)
        except ModelError as error:
            raise type(error)(f"{path}: {error}") from None
    engine.load_draft_head(file)
    return True


MAX_OTHERS = 4  # maximum of other answers and draft tokens in the step of an answer that gets a draft


class AnswerSpan(NamedTuple):
    """The tokens that a run appends for an answer; `draft` is their end.

    Attributes:
        is_end: whether all tokens of the answer are computed then, so that the next one can be drawn.
        kernel_tokens: token count that selects the kernels, see localllm.engine.runs.
    """

    completion: Completion
    ids: list[int]
    draft: Sequence[int] = ()
    is_end: bool = True
    kernel_tokens: int = 1


def make_span(completion: Completion, count: int, kernel_tokens: int) -> AnswerSpan:
    """Return the next `count` tokens of an answer that its sequence does not hold."""
    cached, ids = completion.computed_tokens, completion.ids
    return AnswerSpan(completion, ids[cached : cached + count], (), cached + count == len(ids), kernel_tokens)


class ForcedTokensProposer:
    """Drafts the tokens that a constraint or the reasoning budget forces."""

    account = None

    def __init__(self, guide: AnswerState):
        self._guide = guide

    def push(self, tokens: Sequence[int]) -> None:
        """Do nothing: the answer's state already has the tokens."""

    def rewind(self, count: int) -> None:
        """Do nothing: the answer's state is already rewound."""

    def propose(self) -> Iterator[DraftToken]:
        """Return the tokens that the state of the answer expects, with full trust."""
        return (DraftToken(token, SURE) for token in self._guide.get_expected_tokens())


class Speculator:
    """Drafts for the answers of one scheduler.

    Attributes:
        costs: measured costs of steps, which all answers share.
    """

    def __init__(self, engine: "Engine", ngrams: "NgramCache | None" = None, resources: ExitStack | None = None):
        """Store what drafts depend on.

        resources: closes the resources of a single answer's drafter, such as a sequence; None in a batch.
        """
        self._engine, self._ngrams, self._resources, self.costs = engine, ngrams, resources, StepCostModel()

    def listen(self, completion: Completion, other_sequences: int = 0) -> None:
        """Let the draft head follow the tokens of an answer from now on, if the batch is small enough.

        The head is an MTP layer of the model, or from another file. Raises UsageError for a single answer that requests
        "mtp" if the model has no such layer.
        """
        sequence, speculate = completion.sequence, completion.options.speculate
        if (
            sequence is None
            or isinstance(sequence, ShiftedSequence)
            or has_images(completion.ids)
            or other_sequences >= MAX_OTHERS
        ):
            return
        is_wanted = speculate in ("auto", "mtp") and self._engine.has_draft_head
        if (is_wanted or (speculate == "mtp" and self._resources)) and get_head_budget(self._engine).allows_loss:
            self._engine.attach_draft_head(sequence)
        elif sequence.listener and self._resources:
            sequence.detach_listener()

    def add_drafts(self, answers: list[Completion], other_sequences: int = 0) -> list[AnswerSpan]:
        """Return the newest token of each answer, followed by a draft if the batch is small.

        other_sequences: number of other answers in the step.
        """
        spans = list[AnswerSpan]()
        other_sequences += len(answers) - 1
        is_small = other_sequences < MAX_OTHERS
        for completion in answers:
            draft: list[int] = []
            if not is_small:
                completion.guesses = None
            elif completion.options.speculate != "off":
                completion.guesses = completion.guesses or self._choose_proposers(completion)
                draft = completion.guesses.draft(completion.max_draft_length, other_sequences)
            spans.append(AnswerSpan(completion, [completion.ids[-1], *draft], draft))
            other_sequences += len(draft)
        return spans

    def _choose_proposers(self, completion: Completion) -> DraftSelector:
        """Choose the proposers of an answer, those without cost first."""
        guide, sampler, tokens = completion.guide, completion.sampler, remove_images(completion.ids)
        proposers: list[Proposer] = [ForcedTokensProposer(guide)] if guide.is_needed else []
        proposers += make_text_proposers(tokens, self._ngrams)
        speculate, end_ids = completion.options.speculate, completion.end_ids
        if isinstance(speculate, Drafter) and self._resources:
            proposers.append(self._resources.enter_context(speculate.open_proposer(tokens, sampler, end_ids, guide)))
        if (
            not self._resources or completion.number
        ):  # a batch that has become small: the head may not follow this answer yet
            self.listen(completion)
        sequence = None if has_images(completion.ids) else completion.sequence
        if sequence and (follower := sequence.listener):
            tokens_known, account = tokens[follower.begin :], get_head_budget(self._engine)  # type: ignore[attr-defined]
            head: Any = follower
            proposers.append(DraftModelProposer(head, tokens_known, sampler, sampler.vocab, end_ids, guide, account))
        return DraftSelector(proposers, self.costs)
