"""Banned strings: an answer goes back to where one begins, and takes another token there.

Tokens whose text may become a banned string are held back. When it does, the first of them is barred at its place, it
and all after it are undone, and the place is sampled again from the same logits. So the answer is the one that sampling
with rejection gives, with drafts or without. Upper and lower case count as the same.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from localllm.errors import LocalllmError

if TYPE_CHECKING:
    from localllm.generation.reasoning import TextPart
    from localllm.text.tokenizer import Tokenizer

Spellings = tuple[frozenset[bytes], ...]  # of each character of a string, in UTF-8


def spellings(text: str) -> Spellings:
    """Return what each character of a text may look like: as it is, in lower and in upper case."""
    return tuple(frozenset(one.encode(errors="replace") for one in (c, c.lower(), c.upper())) for c in text)


def match_at(data: bytes, place: int, string: Spellings) -> bool | None:
    """Return whether a string begins at this place; None if that depends on what comes after the data."""
    for character in string:
        rest = data[place:]
        found = next((one for one in character if rest.startswith(one)), None)
        if found is None:
            return None if any(one.startswith(rest) for one in character) else False
        place += len(found)
    return True


class HeldToken(NamedTuple):
    """A token that may have to be undone.

    Attributes:
        data: its bytes.  before: the answer's state before it, as its owner describes it.
        row: the logits that it was sampled from, float32 [vocab].  parts: of text that it completed.
    """

    token: int
    data: bytes
    before: Any
    row: np.ndarray
    parts: "list[TextPart]"


class BannedStrings:
    """Follows one answer, token by token, and finds banned strings in its text, thoughts included.

    Attributes:
        held: the latest tokens, from the first one on that a banned string may begin in.
    """

    def __init__(self, strings: Sequence[str], tokenizer: "Tokenizer"):
        self._strings, self._tokenizer = strings, tokenizer
        self._by_first: dict[int, list[Spellings]] = {}
        for string in map(spellings, strings):
            for first in {one[0] for one in string[0]}:
                self._by_first.setdefault(first, []).append(string)
        self.held: list[HeldToken] = []
        self._barred: dict[int, set[int]] = {}  # by the number of tokens held before the place

    def copy(self) -> "BannedStrings":
        """Return an independent copy."""
        twin = BannedStrings(self._strings, self._tokenizer)
        twin.held, twin._barred = [*self.held], {place: {*tokens} for place, tokens in self._barred.items()}
        return twin

    @property
    def barred(self) -> set[int]:
        """The tokens that may not come next."""
        return self._barred.get(len(self.held), set())

    def require_choice(self, vocab: int, allowed: np.ndarray | None) -> np.ndarray:
        """Return the mask of the next tokens, bool [vocab], without barred ones. Raises LocalllmError if none is left.

        allowed: the mask of a constraint, or None.
        """
        mask = np.ones(vocab, bool) if allowed is None else allowed.copy()
        mask[[*self.barred]] = False
        if not mask.any():
            raise LocalllmError("only a banned text could follow here: allow it, or change the constraint")
        return mask

    def push(self, token: int, before: Any, row: np.ndarray, parts: "list[TextPart]") -> HeldToken | None:
        """Append a token; return the one that the answer has to go back to, which is barred from now on.

        row: is copied.
        """
        data = self._tokenizer.token_bytes(token, False)
        self.held.append(HeldToken(token, data, before, row.copy(), parts))
        place = next((place for place, match in self._matches(len(self.held)) if match), None)
        if place is None:
            return None
        number = self._token_at(place)
        first = self.held[number]
        del self.held[number:]
        self._barred = {place: tokens for place, tokens in self._barred.items() if place <= number}
        self._barred.setdefault(number, set()).add(first.token)
        return first

    def release(self) -> list[HeldToken]:
        """Return the tokens that are certain, which are not held any more.

        If a token may be undone, what stands before it may become a banned string in another way: it is held, too.
        """
        count = len(self.held)
        while (place := next((place for place, match in self._matches(count) if match is None), None)) is not None:
            count = self._token_at(place)
        return self._release(count)

    def flush(self) -> list[HeldToken]:
        """Return all tokens that are held: the answer ends here."""
        return self._release(len(self.held))

    def _release(self, count: int) -> list[HeldToken]:
        released, self.held = self.held[:count], self.held[count:]
        self._barred = {place - count: tokens for place, tokens in self._barred.items() if place >= count}
        return released

    def _matches(self, count: int) -> Iterator[tuple[int, bool | None]]:
        """Yield the places in the bytes of the first held tokens where a banned string begins, or may (None)."""
        data = b"".join(one.data for one in self.held[:count])
        for place, byte in enumerate(data):
            found = [match_at(data, place, string) for string in self._by_first.get(byte, ())]
            if True in found or None in found:
                yield place, True if True in found else None

    def _token_at(self, place: int) -> int:
        """Return the index of the held token that has the byte at this place."""
        for number, one in enumerate(self.held):
            place -= len(one.data)
            if place < 0:
                return number
        raise IndexError(place)
