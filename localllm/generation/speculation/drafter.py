"""The interface of sources of drafts other than the text and the model itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from localllm.generation.sampling.sampler import Sampler
from localllm.generation.speculation.acceptance import Proposer

if TYPE_CHECKING:
    from localllm.generation.constraints.token_mask import AnswerState


class Drafter(ABC):
    """A source of drafts for many answers, such as a draft model."""

    @abstractmethod
    def proposer(
        self, tokens: Sequence[int], sampler: Sampler, end_ids: frozenset[int], guide: "AnswerState | None" = None
    ) -> AbstractContextManager[Proposer]:
        """Open a proposer of drafts for an answer; tokens: tokens of the prompt and the answer so far."""

    @abstractmethod
    def collect(self) -> None:
        """Take back the sequences of finished answers."""
