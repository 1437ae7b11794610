"""Propose drafts from a source other than the text and the model itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from localllm.generation.sampling.sampler import Sampler
from localllm.generation.speculation.acceptance import Proposer

if TYPE_CHECKING:
    from localllm.generation.constraints.token_mask import AnswerState


class Drafter(ABC):
    """A source of drafts for many answers."""

    @abstractmethod
    def proposer(
        self, tokens: Sequence[int], sampler: Sampler, end_ids: frozenset[int], guide: "AnswerState | None" = None
    ) -> AbstractContextManager[Proposer]:
        """Open what proposes drafts for an answer that begins with these tokens."""

    @abstractmethod
    def collect(self) -> None:
        """Take back the sequences of answers that are finished."""
