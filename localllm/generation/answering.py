"""A prompt among others, and the answers to it in the making."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.errors import LocalllmError
from localllm.generation.answers import log_total
from localllm.generation.generate import Task
from localllm.generation.guide import Guide
from localllm.generation.sampling import Sampler

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence


@dataclass(eq=False)
class AnswerRequest:
    """A prompt that is to be answered n times.

    Attributes:
        key: what the caller knows it by.
        answers: in the making, then made; with n > 1 best first when all are.
        begun: whether the prompt has been read.  error: why there are no answers.
    """

    task: Task
    n: int = 1
    key: Any = None
    answers: list["Answering"] = field(default_factory=list)
    begun: bool = False
    error: LocalllmError | None = None

    @property
    def prompt(self) -> list[int]:
        return self.task.prompt

    @property
    def finished(self) -> bool:
        return self.error is not None or (bool(self.answers) and all(one.finish_reason for one in self.answers))


class Answering:
    """An answer in the making.

    Attributes:
        ids: the prompt and what was said, without what ended it.
        text, thinking: what was said, and thought before.  finish_reason: "stop" or "length", "" before.
        seed: with which it is drawn again.
        logprob: the natural logarithm of its probability, what ended it included; 0 of an only answer.
        sequence: what has been read of `ids`; None while it waits.
    """

    def __init__(self, request: AnswerRequest, sampler: Sampler, guide: Guide, context: int):
        self.request, self.seed, self.ids = request, sampler.seed, list(request.prompt)
        self.finish_reason, self.logprob = "", 0.0
        self.sequence: Sequence | None = None
        self._sampler, self._guide = sampler, guide
        self._limit = len(self.ids) + request.task.options.limit(context - len(self.ids))
        self._chosen = 0
        if self._limit == len(self.ids):
            self.finish_reason = "length"

    @property
    def text(self) -> str:
        return self._guide.transcript.text

    @property
    def thinking(self) -> str:
        return self._guide.transcript.thinking

    @property
    def tokens(self) -> list[int]:
        """What was said, as token ids."""
        return self.ids[len(self.request.prompt) :]

    @property
    def has_begun(self) -> bool:
        """Whether it has a token."""
        return len(self.ids) > len(self.request.prompt)

    @property
    def held(self) -> int:
        """How many of its ids have been read."""
        return len(self.sequence.tokens) if self.sequence else 0

    @property
    def unread(self) -> int:
        """How many tokens are to be read before a step; the newest of the answer is the step's."""
        return len(self.ids) - self.has_begun - self.held

    @property
    def score(self) -> float:
        """The log probability per token, by which answers of different lengths are compared."""
        return self.logprob / max(self._chosen, 1)

    @property
    def width(self) -> int:
        """How many answers are here in one: all of the request until its prompt has been read."""
        return 1 if self.request.begun else self.request.n

    def take(self, row: np.ndarray, end_ids: frozenset[int]) -> None:
        """Go on with the token that is drawn from logits float32 [vocab]. Raises LocalllmError if there is none."""
        token = self._guide.choose(self._sampler, row)
        self._chosen += 1
        if self.request.n > 1:
            self.logprob += float(row[token]) - log_total(row)
        if token in end_ids:
            self._finish("stop")
            return
        self._sampler.accept(token)
        self.ids.append(token)
        self._guide.accept(token)
        if self._guide.has_ended:
            self._finish("stop")
        elif len(self.ids) == self._limit:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        """Say what was held back."""
        self._guide.transcript.flush()
        self.finish_reason = reason
