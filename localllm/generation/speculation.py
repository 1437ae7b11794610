"""Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192): several tokens in one step of the model, if a cheap
guess of them is right.

A proposer guesses how a text goes on, the model reads the guess in one step, and the sampler draws at every position as
it would have done anyway: the guess is right as far as it is what was drawn. So the text is the very same, and only the
number of steps changes.
"""

from collections.abc import Sequence
from typing import Protocol

LENGTHS = (1, 3, 7, 15)  # of drafts: with the token before them, 2, 4, 8 and 16 tokens in a step
# A step of so many tokens takes so many times as long as one token's, until it is measured (Zen 4, 1.2 B, 2 threads).
USUAL_COSTS = {1: 1.0, 2: 1.3, 4: 1.8, 8: 3.2, 16: 5.5}
GAIN = 1.05  # a draft has to promise so much more than a step without
SHORTEST = 2  # tokens that have to agree before a guess is made
LONGEST = 16  # longer agreements are as good as this


class Proposer(Protocol):
    """Guesses how a text goes on."""

    def push(self, token: int) -> None:
        """The text goes on with this token."""

    def propose(self, most: int) -> tuple[list[int], int]:
        """At most so many tokens that may come next, and how many of the last tokens speak for them."""
        ...


class NGrams:
    """Guesses that what followed the longest repeated end of the text will follow again (prompt lookup).

    A suffix automaton (Blumer et al. 1985) of all tokens so far: a state stands for the pieces of the text that end at
    the same places. The state that the newest one links to is the longest end of the text that has been there before.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self._tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # of each state: the state after a token
        self._length, self._link, self._end = [0], [-1], [-1]  # longest piece, state of its ends, where it was last
        self._last = 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with this token. Takes constant time on average."""
        place = len(self._tokens)
        self._tokens.append(token)
        new = self._add(self._length[self._last] + 1, {}, place)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = self._linked(state, token) if state >= 0 else 0
        self._last = new

    def _linked(self, state: int, token: int) -> int:
        """The state of the longest end of the new text that the text had before."""
        known = self._next[state][token]
        if self._length[known] == self._length[state] + 1:
            return known
        split = self._add(self._length[state] + 1, dict(self._next[known]), self._end[known])
        self._link[split], self._link[known] = self._link[known], split
        while state >= 0 and self._next[state].get(token) == known:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add(self, length: int, following: dict[int, int], end: int) -> int:
        for column, value in ((self._next, following), (self._length, length), (self._link, 0), (self._end, end)):
            column.append(value)  # type: ignore[attr-defined]
        return len(self._length) - 1

    def propose(self, most: int) -> tuple[list[int], int]:
        """What followed the last time, and how many tokens agree."""
        state = self._link[self._last]
        if state <= 0 or self._length[state] < SHORTEST:
            return [], 0
        after = self._end[state] + 1
        self._end[state] = len(self._tokens) - 1
        return self._tokens[after : after + most], self._length[state]


class Guesses:
    """Drafts for one answer: from the proposer, as long as the pace says."""

    def __init__(self, prompt: Sequence[int]):
        self._proposer: Proposer = NGrams(prompt)
        self._pace, self._support = Pace(), 0
        self.took = self._pace.took

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may come next, often none."""
        draft, self._support = self._proposer.propose(min(most, LENGTHS[-1]))
        return draft[: self._pace.length(len(draft), self._support)]

    def learn(self, drawn: Sequence[int], drafted: int, accepted: int) -> None:
        """These tokens came; of a draft of so many tokens so many were right."""
        for token in drawn:
            self._proposer.push(token)
        if drafted:
            self._pace.was_right(self._support, drafted, accepted)


class Pace:
    """How long a draft should be, by what was right lately and by what steps cost on this computer."""

    def __init__(self) -> None:
        self._costs: dict[int, float] = {}  # seconds of a step, by its tokens
        self._right = [0.0] * (LONGEST + 1)  # by how many tokens spoke for a guess: tokens that were right lately,
        self._tried = [0.0] * (LONGEST + 1)  # and those that were looked at

    def length(self, available: int, support: int) -> int:
        """Of a draft, at most `available`; 0 if none is worth its step."""
        chance, best, longest = self._chance(support), GAIN / self._cost(1), 0
        for length in LENGTHS:
            if length <= available:
                expected = sum(chance**i for i in range(length + 1)) / self._cost(length + 1)
                if expected > best:
                    best, longest = expected, length
        return longest

    def _chance(self, support: int) -> float:
        """That the next token of a guess is right. Before there is experience, 2 of 4 agreeing tokens are worth 1/2."""
        n = min(support, LONGEST)
        return (self._right[n] + 2 * n / (n + 2)) / (self._tried[n] + 2)

    def _cost(self, tokens: int) -> float:
        """Of a step, relative to that of one token."""
        one = self._costs.get(1)
        return self._costs[tokens] / one if one and tokens in self._costs else USUAL_COSTS[tokens]

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens in USUAL_COSTS:
            self._costs[tokens] = min(seconds, 0.8 * self._costs.get(tokens, seconds) + 0.2 * seconds)

    def was_right(self, support: int, drafted: int, accepted: int) -> None:
        """Of a draft, so many tokens; older experience fades."""
        n = min(support, LONGEST)
        self._right[n] = 0.9 * self._right[n] + accepted
        self._tried[n] = 0.9 * self._tried[n] + min(accepted + 1, drafted)
