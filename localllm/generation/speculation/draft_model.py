"""Drafts by a smaller model with the same vocabulary, which the larger model verifies.

The small model samples with a copy of the large model's sampler and its random numbers. So both draw the same token
wherever their probabilities are similar, and the text is the same as without drafts.

The rejection rule of Leviathan et al. 2023 accepts 4 to 12 % more draft tokens and has the same distribution, but does
not give the same text for the same seed; docs/decisions/speculative-sampling.md compares other rules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from localllm.engine.draft_head import is_head
from localllm.errors import ConstraintError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.chunked_prefill import read_prompt
from localllm.generation.prefix_cache import PrefixCache, PrefixQuery
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.speculation.acceptance import SURE, Drafter, Guess, SpeculationBudget
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence as Tokens
    from localllm.generation.answer_state import AnswerState
    from localllm.generation.context_overflow import ShiftedSequence


PADDING = 128  # most tokens by which the vocabularies may differ at the end, as in llama.cpp: some are padded


class ModelDrafter(Drafter):
    """A draft model for other models; each answer has a sequence of its own."""

    def __init__(self, cache: PrefixCache, tokenizer: Tokenizer):
        self._cache, self._pieces, self._account = cache, tokenizer.pieces, SpeculationBudget()

    def require_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raise UsageError unless the vocabularies are the same, except at most PADDING tokens at the end."""
        ours, draft_pieces = self._pieces, tokenizer.pieces
        common = min(len(ours), len(draft_pieces))
        if ours[:common] != draft_pieces[:common]:
            token = next(i for i in range(common) if ours[i] != draft_pieces[i])
            difference = f"token {token} is {ours[token]!r} in the one and {draft_pieces[token]!r} in the other"
            raise UsageError(f"the draft model has a different vocabulary: {difference}")
        if abs(len(ours) - len(draft_pieces)) > PADDING:
            raise UsageError(
                f"the draft model has a different vocabulary: {len(ours)} tokens instead of {len(draft_pieces)}"
            )

    @contextmanager
    def proposer(
        self, tokens: Sequence[int], sampler: Sampler, end_ids: frozenset[int], guide: "AnswerState | None" = None
    ) -> Iterator["DraftModel"]:
        """Read the tokens so far, and return a proposer for what follows."""
        vocab = min(sampler.vocab, len(self._pieces))
        sequence = self._cache.begin(PrefixQuery(tokens)).sequence
        try:
            shared = next((i for i, token in enumerate(tokens) if token >= vocab), len(tokens))
            if len(sequence.tokens) < shared - 1 < self._cache.context:
                read_prompt(sequence, list(tokens[: shared - 1]), None)
            yield DraftModel(sequence, tokens, sampler, vocab, end_ids, guide, self._account)
        finally:
            self._cache.put_back(sequence)

    def collect(self) -> None:
        """Take back the sequences of finished answers."""
        self._cache.collect()


class DraftModel:
    """A proposer (see acceptance): drafts the tokens that a model would generate."""

    def __init__(
        self, sequence: "Tokens | ShiftedSequence", tokens: Sequence[int], sampler: Sampler, vocab: int,
        end_ids: frozenset[int], guide: "AnswerState | None" = None, account: SpeculationBudget | None = None,
    ):  # fmt: skip
        """Set up the draft model.

        sequence: sequence of the draft model, holds some of the tokens.  sampler, guide: of the target model, after
        these tokens.  vocab: number of tokens that both models have.  end_ids: tokens that end an answer.
        account: see Proposer.
        """
        self.account = account
        self._sequence, self._text, self._right = sequence, list(tokens), len(sequence.tokens)
        self._sampler, self._guide, self._vocab, self._end_ids = sampler, guide, vocab, end_ids
        self._readable = all(token < vocab for token in tokens)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._text += tokens
        self._readable = self._readable and all(token < self._vocab for token in tokens)

    def rewind(self, count: int) -> None:
        """Drop the last tokens of the text."""
        del self._text[len(self._text) - count :]
        self._right = min(self._right, len(self._text))

    def propose(self) -> Iterator[Guess]:
        """Yield draft tokens up to the end of the answer or the context, with one run of the model for each."""
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
                token = sampler.sample(logits, guide.allowed_mask(self._vocab) if guide else None)
            except ConstraintError:  # only tokens that the draft model lacks are allowed
                return
            yield Guess(token, trust(logits, token))
            if token in self._end_ids:
                return
            sampler.accept(token)
            if guide:
                guide.accept(token)
                if guide.has_ended:
                    return
            unread = [token]


ACCOUNTS = WeakKeyDictionary[object, SpeculationBudget]()  # by engine


def account_of(engine: object) -> SpeculationBudget:
    """Return the budget for drafts by the model's MTP layer or attached draft head."""
    return ACCOUNTS.setdefault(engine, SpeculationBudget())


def trust(logits: np.ndarray, token: int) -> int:
    """Return the probability of a token times SURE, rounded; logits: float32 [vocab]."""
    weights = np.exp(logits - logits.max())
    return round(SURE * float(weights[token] / weights.sum()))


TOKENS = "tokenizer.ggml.tokens"


def attach_draft_head(path: str, cache: PrefixCache, tokenizer: Tokenizer) -> bool:
    """Attach a file's draft head to the model; return whether it has one.

    Raises the errors of Engine.load_draft_head, and UsageError for a head whose vocabulary differs from this
    tokenizer's.
    """
    engine = cache.engine
    if path == engine.draft_head_path:
        return True
    file = GGUFFile.open(path)
    if not is_head(file):
        file.close()
        return False
    if file.metadata.get(TOKENS) is not None:
        try:
            ModelDrafter(cache, Tokenizer.from_metadata(file.metadata)).require_vocabulary(tokenizer)
        except ModelError as error:
            raise type(error)(f"{path}: {error}") from None
    engine.load_draft_head(file)
    return True
