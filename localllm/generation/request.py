"""A prompt among others, and the answers to it in the making."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.errors import LocalllmError
from localllm.generation.beam_search import log_total
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.generate import Task
from localllm.generation.reasoning import TextPart
from localllm.generation.sampling.sampler import Sampler

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence
    from localllm.generation.chunked_prefill import PrefillSegments
    from localllm.generation.speculation.acceptance import Guesses

# Hears of a token at once: the answer, the token (None for one that ended it), the parts of text that it completes, and
# the logits that it was drawn from, float32 [vocab], good only until the call returns.
Listener = Callable[["Completion", int | None, list[TextPart], np.ndarray], None]


@dataclass(eq=False)
class Request:
    """A prompt that is to be answered n times.

    Attributes:
        key: what the caller knows it by.
        answers: in the making, then made; with n > 1 best first when all are.
        begun: whether the prompt has been read.  error: why there are no answers.
        listener: hears of every token.  cached: how many tokens of the prompt did not have to be read.
    """

    task: Task
    n: int = 1
    key: Any = None
    answers: list["Completion"] = field(default_factory=list)
    begun: bool = False
    error: LocalllmError | None = None
    listener: Listener | None = None
    cached: int = 0

    @property
    def prompt(self) -> list[int]:
        return self.task.prompt

    @property
    def finished(self) -> bool:
        return self.error is not None or (bool(self.answers) and all(one.finish_reason for one in self.answers))


class Completion:
    """An answer in the making.

    Attributes:
        ids: the prompt and what was said, without what ended it.
        text, thinking: what was said, and thought before.  finish_reason: "stop" or "length", "" before.
        seed: with which it is drawn again.
        logprob: the natural logarithm of its probability, what ended it included; 0 of an only answer.
        sequence: what has been read of `ids`; None while it waits.
        number: its place among the request's answers, as they are made.
        guesses: where drafts come from, while few are answered.
        known: logits behind the prompt, float32 [1, vocab], if files had them with all of it; until it begins.
        stretches: of its prompt.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        guide: AnswerState,
        context: int,
        stretches: "PrefillSegments",
        number: int = 0,
    ):
        self.request, self.seed, self.ids, self.number = request, sampler.seed, list(request.prompt), number
        self.stretches = stretches
        self.finish_reason, self.logprob = "", 0.0
        self.sequence: Sequence | None = None
        self.guesses: Guesses | None = None
        self.known: np.ndarray | None = None
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
    def guide(self) -> AnswerState:
        """What follows it."""
        return self._guide

    @property
    def sampler(self) -> Sampler:
        """What draws its tokens."""
        return self._sampler

    @property
    def left(self) -> int:
        """How many tokens it may still have."""
        return self._limit - len(self.ids)

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
        is_end = token in end_ids
        parts = self._finish("stop") if is_end else self._go_on(token)
        if self.request.listener:
            self.request.listener(self, None if is_end else token, parts, row)

    def _go_on(self, token: int) -> list[TextPart]:
        """The parts of text that this token completes; it may be the last."""
        self._sampler.accept(token)
        self.ids.append(token)
        parts = self._guide.accept(token)
        if self._guide.has_ended:
            return parts + self._finish("stop")
        return parts + self._finish("length") if len(self.ids) == self._limit else parts

    def _finish(self, reason: str) -> list[TextPart]:
        """Say what was held back."""
        self.finish_reason = reason
        return self._guide.transcript.flush(is_end=reason == "stop")
