"""Which token comes next where that is not left to the model: the end of a thought that has used up its budget."""

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from localllm.generation.thinking import THOUGHT, Part, Thinking
from localllm.generation.transcript import Transcript

if TYPE_CHECKING:
    from localllm.generation.sampling import Sampler


class Guide:
    """Follows one answer, token by token.

    Attributes:
        transcript: what was said.
    """

    def __init__(self, transcript: Transcript, thinking: Thinking):
        self.transcript = transcript
        self._budget, self._closing = thinking.budget, thinking.closing
        self._thoughts = 0  # tokens of thoughts
        self._forced: tuple[int, ...] = ()
        self._limit_thoughts()

    def copy(self) -> "Guide":
        """One that goes on from here by itself."""
        twin = copy(self)
        twin.transcript = self.transcript.copy()
        return twin

    def choose(self, sampler: "Sampler", logits: np.ndarray) -> int:
        """The next token, from logits float32 [vocab] or longer. Raises as Sampler.sample."""
        return self._forced[0] if self._forced else sampler.sample(logits)

    def accept(self, token: int) -> list[Part]:
        """This token comes, which does not end the answer: the parts of text that are complete with it."""
        if self._forced:
            self._forced = self._forced[1:] if token == self._forced[0] else ()
        else:
            self._thoughts += self.transcript.kind == THOUGHT
        parts = self.transcript.push(token)
        self._limit_thoughts()
        return parts

    def _limit_thoughts(self) -> None:
        """Close a thought that has used up the budget."""
        spent = self._budget is not None and self._thoughts >= self._budget
        if spent and not self._forced and self.transcript.kind == THOUGHT:
            self._forced = self._closing
