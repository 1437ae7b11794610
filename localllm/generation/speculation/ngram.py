"""Drafts from texts: the tokens that followed the same n-gram before (prompt lookup), and copies with edits.

Both proposers (see generation.speculation.acceptance) search the text itself and earlier texts, at almost no cost.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from localllm.generation.speculation.acceptance import SURE, Guess
from localllm.generation.speculation.ngram_cache import GAP, NOTHING, CorpusMatch, NgramCache, TokenCorpus

FOLLOWED = 4  # copied tokens in a row that start a copy
LEFT = 4  # positions of earlier copies that may be resumed


class NGrams:
    """Drafts the tokens that followed the longest repeated suffix of the text.

    It is found with a suffix automaton (Blumer et al. 1985) of all tokens so far: a state represents the substrings
    that end at the same positions, and the suffix link of the newest state is the longest suffix that occurred before.
    A longer match in earlier texts takes precedence.

    Attributes:
        tokens: the earlier texts, then the text.
        agreed: length of the longest suffix that occurred before.
        place: position of the token that followed its last occurrence.
    """

    account = None

    def __init__(self, corpus: TokenCorpus = NOTHING) -> None:
        self._corpus, self._begin = corpus, len(corpus.tokens)
        self.tokens = array("i", corpus.tokens.tobytes())
        self.place = self.agreed = 0
        self._elsewhere = CorpusMatch(0, 0)  # the longest match in earlier texts
        self._next: list[dict[int, int]] = [{}]  # transitions of each state, by token
        # Of each state: longest substring, suffix link, last end position.
        self._length, self._link, self._end = [0], [-1], [-1]
        self._last = 0

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Takes constant time for each, on average."""
        for token in tokens:
            self._push(token)
        if self._begin:
            self._look_elsewhere(tokens)

    def _look_elsewhere(self, tokens: Sequence[int]) -> None:
        """Update the match in earlier texts: extend it if the new tokens agree, else search again."""
        (place, agreed), count = self._elsewhere, len(tokens)
        goes_on = agreed and self.tokens[place : place + count] == self.tokens[-count:]
        if goes_on and self.tokens[place + count] != GAP:  # at the end of an earlier text, search again
            self._elsewhere = CorpusMatch(place + count, agreed + count)
        else:
            self._elsewhere = self._corpus.find(self.tokens[max(self._begin, len(self.tokens) - SURE) :])
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
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        split = self._add(self._length[state] + 1, dict(self._next[following]), self._end[following])
        self._link[split], self._link[following] = self._link[following], split
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add(self, length: int, following: dict[int, int], end: int) -> int:
        self._next.append(following)
        for column, value in ((self._length, length), (self._link, 0), (self._end, end)):
            column.append(value)
        return len(self._length) - 1

    def rewind(self, count: int) -> None:
        """Do nothing: undone tokens remain a possible source of drafts."""

    def propose(self) -> Iterator[Guess]:
        """Yield the tokens that followed the last occurrence; a token's trust is the length of the match before it."""
        return copy_after(self.tokens, self.place, self.agreed) if self.agreed else iter(())


class Copies:
    """Drafts the continuation of a copy after an edit.

    Where the answer differs from the original, it may have replaced one token, so the copy continues after the next
    token of the original; or it has inserted or deleted text, and continues where a later token matches again.
    """

    account = None

    def __init__(self, grams: NGrams):
        """Start with no copy; grams: the n-grams of the same texts, which get every token first."""
        self._grams = grams
        self._place: int | None = None  # position of the next token if the copy continues
        self._followed = 0  # latest tokens in a row that were copied
        self._ends: deque[int] = deque(maxlen=LEFT)  # positions where copies ended, the latest first

    def push(self, tokens: Sequence[int]) -> None:
        """Update the copy by tokens that `grams` has got already."""
        for number in range(len(self._grams.tokens) - len(tokens), len(self._grams.tokens)):
            self._follow(number)
        if self._grams.agreed >= FOLLOWED and self._grams.agreed > self._followed:
            if self._grams.place != self._place:
                self._leave()
            self._place, self._followed = self._grams.place, self._grams.agreed

    def _follow(self, number: int) -> None:
        """Update the copied position by token `number` of the text."""
        text, place, followed = self._grams.tokens, self._place, self._followed
        if place is not None and text[place] == text[number]:
            self._place, self._followed = place + 1, followed + 1
            return
        self._leave()
        replaced = place + 1 if place is not None and followed else None
        due = [waiting + skipped for waiting in self._ends for skipped in (0, 1)]
        resumed = next((at for at in due if at < number and text[at] == text[number]), None)
        self._place, self._followed = (replaced, 0) if resumed is None else (resumed + 1, 1)

    def _leave(self) -> None:
        """Store the position where a copy ends."""
        if self._place is not None and self._followed > 1 and self._place not in self._ends:
            self._ends.appendleft(self._place)

    def rewind(self, count: int) -> None:
        """Do nothing: `grams` keeps undone tokens."""

    def propose(self) -> Iterator[Guess]:
        """Yield the next tokens of the original; a token's trust is the number of copied tokens before it."""
        return iter(()) if self._place is None else copy_after(self._grams.tokens, self._place, self._followed)


def copy_after(tokens: Sequence[int], place: int, agreed: int) -> Iterator[Guess]:
    """Yield the tokens from a position on; beyond the end of the text, the draft itself repeats.

    The first has trust `agreed`, each following one 1 more, at most SURE.
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


def from_text(tokens: Sequence[int], cache: NgramCache | None = None) -> tuple[NGrams, Copies]:
    """Make the proposers that search the text, which begins with these tokens, and earlier texts."""
    grams = NGrams(cache.earlier() if cache else NOTHING)
    grams.push(tokens)
    return grams, Copies(grams)
