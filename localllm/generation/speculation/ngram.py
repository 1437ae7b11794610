"""Drafts from texts: what followed the same words before (prompt lookup), and how an edited copy continues.

Both are proposers of generation.speculation.acceptance and cost next to nothing. They look at the text itself, and at
what was written before.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from localllm.generation.speculation.acceptance import SURE, Guess
from localllm.generation.speculation.ngram_cache import GAP, NOTHING, CorpusMatch, NgramCache, TokenCorpus

FOLLOWED = 4  # tokens in a row that make a copy of what looks like one
LEFT = 4  # copies that were left and may be taken up again


class NGrams:
    """Drafts the tokens that followed the longest repeated suffix of the text.

    A suffix automaton (Blumer et al. 1985) of all tokens so far: a state represents the substrings that end at the same
    positions. The state that the newest one links to is the longest end of the text that has been there before. Where
    an earlier text has a longer one, that counts.

    Attributes:
        tokens: earlier texts, and then the text.
        agreed: how many of its last tokens have been there before.
        place: where the token is that followed the last time.
    """

    account = None

    def __init__(self, earlier: TokenCorpus = NOTHING) -> None:
        self._earlier, self._begin = earlier, len(earlier.tokens)
        self.tokens = array("i", earlier.tokens.tobytes())
        self.place = self.agreed = 0
        self._elsewhere = CorpusMatch(0, 0)  # the longest in earlier texts
        self._next: list[dict[int, int]] = [{}]  # of each state: the state after a token
        self._length, self._link, self._end = [0], [-1], [-1]  # longest piece, state of its ends, where it was last
        self._last = 0

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Takes constant time for each, on average."""
        for token in tokens:
            self._push(token)
        if self._begin:
            self._look_elsewhere(tokens)

    def _look_elsewhere(self, tokens: Sequence[int]) -> None:
        """Look in earlier texts; the longest match is followed as long as the text agrees."""
        (place, agreed), count = self._elsewhere, len(tokens)
        goes_on = agreed and self.tokens[place : place + count] == self.tokens[-count:]
        if goes_on and self.tokens[place + count] != GAP:  # at its end it would say nothing, and hide what does
            self._elsewhere = CorpusMatch(place + count, agreed + count)
        else:
            self._elsewhere = self._earlier.find(self.tokens[max(self._begin, len(self.tokens) - SURE) :])
        if self._elsewhere.agreed > self.agreed:
            self.place, self.agreed = self._elsewhere

    def _push(self, token: int) -> None:
        place = len(self.tokens)
        self.tokens.append(token)
        new = self._add(self._length[self._last] + 1, {}, place)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = self._suffix_link(state, token) if state >= 0 else 0
        self._last = new
        match = self._link[new]
        self.agreed, self.place = self._length[match], self._end[match] + 1
        self._end[match] = place

    def _suffix_link(self, state: int, token: int) -> int:
        """Return the state of the longest suffix of the new text that occurred before."""
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
        self._next.append(following)
        for column, value in ((self._length, length), (self._link, 0), (self._end, end)):
            column.append(value)
        return len(self._length) - 1

    def rewind(self, count: int) -> None:
        """Keep undone tokens as an earlier text, since they were written here once."""

    def propose(self) -> Iterator[Guess]:
        """Draft what followed the last time; a token's trust is the length of the match before it."""
        return copy_after(self.tokens, self.place, self.agreed) if self.agreed else iter(())


class Copies:
    """Drafts the continuation of an edited copy after a change.

    Once the answer leaves the original, it may have replaced a token, and continues with the next but one; or it has
    inserted or left out text, which shows when it returns to a token of the original.
    """

    account = None

    def __init__(self, grams: NGrams):
        """Start with no copy; grams: the n-grams of the same texts, which get every token first."""
        self._grams = grams
        self._place: int | None = None  # in the text, of what comes next if the copy goes on
        self._followed = 0  # tokens that the answer has followed it in a row
        self._left: deque[int] = deque(maxlen=LEFT)  # places where copies were left, the latest first

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, the latest that `grams` has read."""
        for number in range(len(self._grams.tokens) - len(tokens), len(self._grams.tokens)):
            self._follow(number)
        if self._grams.agreed >= FOLLOWED and self._grams.agreed > self._followed:
            if self._grams.place != self._place:
                self._leave()
            self._place, self._followed = self._grams.place, self._grams.agreed

    def _follow(self, number: int) -> None:
        """Update where the answer copies from, by token `number` of the text."""
        text, place, followed = self._grams.tokens, self._place, self._followed
        if place is not None and text[place] == text[number]:
            self._place, self._followed = place + 1, followed + 1
            return
        self._leave()
        replaced = place + 1 if place is not None and followed else None
        due = [left + skipped for left in self._left for skipped in (0, 1)]
        found = next((at for at in due if at < number and text[at] == text[number]), None)
        self._place, self._followed = (replaced, 0) if found is None else (found + 1, 1)

    def _leave(self) -> None:
        """Remember where a copy was left."""
        if self._place is not None and self._followed > 1 and self._place not in self._left:
            self._left.appendleft(self._place)

    def rewind(self, count: int) -> None:
        """Do nothing: `grams` keeps undone tokens."""

    def propose(self) -> Iterator[Guess]:
        """Draft the next tokens of the original; a token's trust is the number of copied tokens before it."""
        return iter(()) if self._place is None else copy_after(self._grams.tokens, self._place, self._followed)


def copy_after(tokens: Sequence[int], place: int, agreed: int) -> Iterator[Guess]:
    """Yield the tokens at a place and after it; after the end of the last text, the draft again, as in a loop.

    Each has the trust of a match that is longer by the number of tokens before it.
    """
    guesses = list[int]()
    while True:
        end = len(tokens)
        token = tokens[place] if place < end else guesses[place - end]
        if token == GAP:
            return
        guesses.append(token)
        yield Guess(token, min(agreed, SURE))
        place, agreed = place + 1, agreed + 1


def from_text(tokens: Sequence[int], written: NgramCache | None = None) -> tuple[NGrams, Copies]:
    """Make the proposers that need only the text, which begins with these tokens, and earlier texts."""
    grams = NGrams(written.earlier() if written else NOTHING)
    grams.push(tokens)
    return grams, Copies(grams)
