"""The state of an answer: its text, and masks of the next token from the constraint and the budget of reasoning.

Reasoning is not constrained, the answer after it is; no end token is allowed until the answer is complete.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from localllm.generation.reasoning import ANSWER, REASONING, TextPart, Thinking
from localllm.generation.tools.tool_call_parser import CALL
from localllm.generation.transcript import Transcript

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Matcher
    from localllm.generation.reasoning import Thinking


class TokenMatcher(Protocol):
    """The part of a matcher that AnswerState uses."""

    def copy(self) -> "TokenMatcher": ...
    def allowed_mask(self) -> np.ndarray: ...
    def accept(self, token: int) -> None: ...
    def unfinished_mask(self, thinking: "Thinking") -> np.ndarray: ...
    @property
    def is_complete(self) -> bool: ...
    def expected_tokens(self) -> list[int]: ...


class UnionMatcher:
    """Advances two matchers while both allow the answer's tokens, then the remaining one.

    Attributes:
        form: the constraint; None once only calls are possible.  calls: None once no call is possible.
    """

    def __init__(self, form: "Matcher", calls: "Matcher"):
        """Set up; both matchers are at the beginning of the answer."""
        self.form: Matcher | None = form
        self.calls: Matcher | None = calls
        self._first = form

    @property
    def _both(self) -> "list[Matcher]":
        return [matcher for matcher in (self.form, self.calls) if matcher]

    def copy(self) -> "UnionMatcher":
        twin = copy(self)
        twin.form, twin.calls = self.form and self.form.copy(), self.calls and self.calls.copy()
        return twin

    def allowed_mask(self) -> np.ndarray:
        """Compute the mask of tokens that either matcher allows, bool [vocab]. Raises ConstraintError."""
        first, *rest = self._both
        return first.allowed_mask() | rest[0].allowed_mask() if rest else first.allowed_mask()

    def accept(self, token: int) -> None:
        if self.form and self.calls:
            self.form, self.calls = (
                matcher if matcher.allowed_mask()[token] else None for matcher in (self.form, self.calls)
            )
        for matcher in self._both:
            matcher.accept(token)

    def unfinished_mask(self, thinking: "Thinking") -> np.ndarray:
        """Compute the mask of tokens within reasoning, see Matcher."""
        return self._first.unfinished_mask(thinking)

    @property
    def is_complete(self) -> bool:
        return all(matcher.is_complete for matcher in self._both)

    def expected_tokens(self) -> list[int]:
        """Return the forced tokens; none while both matchers are possible."""
        first, *rest = self._both
        return [] if rest else first.expected_tokens()


class AnswerState:
    """The state of one answer's text and constraint, advanced token by token.

    Attributes:
        transcript: the texts so far.  thoughts: number of tokens of reasoning so far.
    """

    def __init__(
        self, transcript: Transcript, thinking: Thinking, matcher: "TokenMatcher | None" = None,
        calls: "Matcher | None" = None, is_whole: bool = False,
    ):  # fmt: skip
        """Start at the beginning of an answer.

        matcher: of the constraint, or None.  calls: the matcher of tool calls, which starts at a call's trigger.
        is_whole: whether `matcher` covers reasoning and the openings of calls, too.
        """
        self._calls, self._is_whole = calls, is_whole
        self.transcript = transcript
        self._thinking, self._matcher = thinking, matcher
        self.thoughts = 0
        self._forced: tuple[int, ...] = ()  # the next tokens, whatever the logits
        if matcher and not is_whole and transcript.kind is None and not self._may_think:
            transcript.begin_answer()
        self._limit_thoughts()

    @property
    def _may_think(self) -> bool:
        """Return whether reasoning, or, in formats with headers, any part with a header, may begin."""
        thinking = self._thinking
        return bool(thinking.starts) and (self._has_heads or thinking.budget != 0)

    @property
    def _has_heads(self) -> bool:
        return self._thinking.format is not None and self._thinking.format.repeats

    def copy(self) -> "AnswerState":
        twin = copy(self)
        twin.transcript = self.transcript.copy()
        twin._matcher = self._matcher and self._matcher.copy()
        twin._calls = self._calls and self._calls.copy()
        return twin

    def restore(self, snapshot: "AnswerState") -> None:
        """Go back to the state of a copy; the copy stays independent."""
        vars(self).update(vars(snapshot.copy()))

    @property
    def has_ended(self) -> bool:
        """Return whether the answer has ended: at a stop string, or because the constraint allows only the end."""
        is_complete = self._matcher is not None and self.transcript.kind == ANSWER and self._matcher.is_complete
        return is_complete or self.transcript.has_stopped

    @property
    def is_needed(self) -> bool:
        return self._matcher is not None or self._calls is not None or self._thinking.budget is not None

    def allowed_mask(self, vocab: int) -> np.ndarray | None:
        """Compute the mask of the next tokens, bool [vocab]; None: all. Raises ConstraintError."""
        if self._forced:
            return _only(self._forced[:1], vocab)
        matcher, transcript = self._matcher, self.transcript
        if matcher is None:
            return None
        if self._is_whole:
            return matcher.allowed_mask()[:vocab]
        if transcript.kind == ANSWER:
            allowed = matcher.allowed_mask()
            if self.transcript.reader is None:  # otherwise the grammar of calls handles these tokens
                allowed[list(self._thinking.shown)] = False
        elif not transcript.is_between:
            allowed = matcher.unfinished_mask(self._thinking)
        elif self._has_heads:
            allowed = _only(self._thinking.starts, vocab)
        else:
            allowed = matcher.allowed_mask()
            allowed[list(self._thinking.starts)] = True
        return allowed[:vocab]

    def accept(self, token: int) -> list[TextPart]:
        """Advance by an allowed token that does not end the answer; return the parts of text that it completes."""
        kind = self.transcript.kind
        if self._matcher and self._is_whole:
            self._matcher.accept(token)
        if self._forced:
            self._forced = self._forced[1:]
        elif kind == REASONING:
            self.thoughts += 1
        elif self._is_whole:
            pass
        elif self._matcher and kind is None and self.transcript.is_between and token in self._thinking.starts:
            self._forced = self._thinking.continuing
        elif self._matcher and (kind == ANSWER or not self._has_heads):
            self.transcript.begin_answer()
            self._matcher.accept(token)
        parts = self.transcript.push(token)
        if kind == REASONING and self.transcript.interruption and not self._is_whole:
            self._interrupt(token, self.transcript.interruption)
        if isinstance(self._matcher, UnionMatcher) and any(part.kind == CALL for part in parts):
            self._matcher.form = None  # the text is a tool call, so the constraint on answers is dropped
        if self._calls and self.transcript.reader and self.transcript.reader.in_call:
            parts += self._begin_call(self._calls, self.transcript.reader.pending)
        elif getattr(self._matcher, "calls", self) is None:  # a UnionMatcher that has excluded calls
            parts += self.transcript.give_up_call()
        self._limit_thoughts()
        return parts

    def _interrupt(self, token: int, text: str) -> None:
        """Advance the constraint, if it includes calls, by the mark of a call that has ended the reasoning."""
        if isinstance(self._matcher, UnionMatcher):
            self._matcher.form = None
        calls = cast("Matcher | None", getattr(self._matcher, "calls", self._matcher))
        if calls and calls.allowed_mask()[token]:
            calls.accept(token)
        elif calls:
            calls.accept_text(text)  # several tokens write the mark

    def _begin_call(self, calls: "Matcher", pending: str) -> list[TextPart]:
        """Constrain the answer by the grammar of calls from now on; pending: the text after the trigger."""
        self._calls = None
        if calls.accept_text(pending):
            self._matcher = calls
            return []
        return self.transcript.give_up_call()

    def expected_tokens(self) -> Sequence[int]:
        """Return tokens that will follow almost certainly, as a draft."""
        if self._forced or self._matcher is None or self.transcript.kind != ANSWER:
            return self._forced
        return self._matcher.expected_tokens()

    def _limit_thoughts(self) -> None:
        """Force the end of reasoning that has used up the budget."""
        budget = self._thinking.budget
        if budget is not None and self.thoughts >= budget and self.transcript.kind == REASONING and not self._forced:
            self._forced = self._thinking.closing


def _only(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """Make a mask with only these tokens, bool [vocab]."""
    allowed = np.zeros(vocab, bool)
    allowed[list(tokens)] = True
    return allowed
