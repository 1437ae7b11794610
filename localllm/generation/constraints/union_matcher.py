"""A token matcher that allows either the response format or tool calls."""

from copy import copy
from typing import TYPE_CHECKING, Protocol

import numpy as np

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
        """Return an independent copy."""
        twin = copy(self)
        twin.form, twin.calls = self.form and self.form.copy(), self.calls and self.calls.copy()
        return twin

    def allowed_mask(self) -> np.ndarray:
        """Compute the mask of tokens that either matcher allows, bool [vocab]. Raises ConstraintError."""
        first, *rest = self._both
        return first.allowed_mask() | rest[0].allowed_mask() if rest else first.allowed_mask()

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
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
