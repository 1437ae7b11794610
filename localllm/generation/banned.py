"""Remove banned strings from an answer, and sample again from where they began.

Tokens whose text may become a banned string are held back. If it does, the string's first token and all later ones are
undone, and that position is sampled again from the same logits without this token. So the answer has the distribution
of rejection sampling, with and without drafts. Matching ignores case.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.generation.answer_state import AnswerState
    from localllm.generation.reasoning import TextPart
    from localllm.generation.sampling.sampler import Sampler
    from localllm.text.tokenizer import Tokenizer

MAX_WHITE_SPACE_TOKENS = 2000  # tokens, more than a vocabulary has of white space
Spellings = tuple[frozenset[bytes], ...]  # of each character of a string, in UTF-8


def spell_cases(text: str) -> Spellings:
    """Return the spellings of each character of a string: as it is, in lower case and in upper case."""
    return tuple(frozenset(spelling.encode(errors="replace") for spelling in (c, c.lower(), c.upper())) for c in text)


def match_string(data: bytes, place: int, string: Spellings) -> bool | None:
    """Return whether a string begins at an offset of `data`; None if that depends on bytes after its end."""
    for character in string:
        following = data[place:]
        spelling = next((candidate for candidate in character if following.startswith(candidate)), None)
        if spelling is None:
            return None if any(candidate.startswith(following) for candidate in character) else False
        place += len(spelling)
    return True


class AnswerSnapshot(NamedTuple):
    """The state of an answer before one of its tokens.

    Attributes:
        length: number of tokens of the prompt and the answer.
        sampler: copy of the sampler before the draw.  guide: copy of the text and the constraint.
        logprob: log probability of the answer.
        row: the logits after logits_processor, float32 [vocab]; None without logits_processor.
    """

    length: int
    sampler: "Sampler"
    guide: "AnswerState"
    logprob: float
    row: np.ndarray | None


class HeldToken(NamedTuple):
    """A token of an answer that is held back, because it may have to be undone.

    Attributes:
        token: its id.  data: its bytes.
        before: state of the answer before it; None if no banned string begins in it.
        row: the model's logits from which it was drawn, float32 [vocab].
        parts: parts of text that it completed.
    """

    token: int
    data: bytes
    before: AnswerSnapshot | None
    row: np.ndarray
    parts: "list[TextPart]"


class BannedStrings:
    """Finds banned strings in an answer and its reasoning, token by token.

    Attributes:
        held: the latest tokens, from the first one in which a banned string may begin.
    """

    def __init__(self, strings: Sequence[str], tokenizer: "Tokenizer"):
        self._strings, self._tokenizer = strings, tokenizer
        self._by_first: dict[int, list[Spellings]] = {}
        for string in map(spell_cases, strings):
            for first in {spelling[0] for spelling in string[0]}:
                self._by_first.setdefault(first, []).append(string)
        self.held: list[HeldToken] = []
        self._barred: dict[int, set[int]] = {}  # by the number of tokens held before the position

    def copy(self) -> "BannedStrings":
        """Return an independent copy."""
        twin = BannedStrings(self._strings, self._tokenizer)
        twin.held, twin._barred = [*self.held], {place: {*tokens} for place, tokens in self._barred.items()}
        return twin

    @property
    def barred_tokens(self) -> set[int]:
        """The tokens that must not come next."""
        return self._barred.get(len(self.held), set())

    def mask_barred(self, vocab: int, allowed: np.ndarray | None) -> np.ndarray:
        """Return the mask of the next tokens without the barred ones, bool [vocab].

        allowed: mask of the constraint, or None. Raises UsageError if no token remains, or only white space, which the
        model would repeat until its limit.
        """
        mask = np.ones(vocab, bool) if allowed is None else allowed.copy()
        mask[[*self.barred_tokens]] = False
        if not self._allows_text(mask):
            raise UsageError(
                "the constraint allows only banned strings to follow: ban fewer strings, or change the constraint"
            )
        return mask

    def _allows_text(self, mask: np.ndarray) -> bool:
        """Return whether a mask, bool [vocab], allows a token that is not white space."""
        tokens = np.flatnonzero(mask)
        if len(tokens) > MAX_WHITE_SPACE_TOKENS:
            return True
        texts = ((token, self._tokenizer.token_bytes(token, False)) for token in tokens.tolist())
        return any(text.strip() or token in self._tokenizer.end_ids for token, text in texts)

    def may_be_undone(self, token: int) -> bool:
        """Return whether a banned string may begin in this token, or has begun before it."""
        data = self._tokenizer.token_bytes(token, False)
        return bool(self.held) or any(self._find_in_bytes(data))

    def push(
        self, token: int, snapshot: AnswerSnapshot | None, row: np.ndarray, parts: "list[TextPart]"
    ) -> HeldToken | None:
        """Append a token; if it completes a banned string, bar and return the token in which the string begins.

        snapshot: state before the token; None if may_be_undone(token) is false. row: logits, float32 [vocab], copied if
        there is a snapshot. parts: parts of text that the token completed.
        """
        data = self._tokenizer.token_bytes(token, False)
        self.held.append(HeldToken(token, data, snapshot, row.copy() if snapshot else row, parts))
        place = next((place for place, match in self._find_matches(len(self.held)) if match), None)
        if place is None:
            return None
        number = self._find_token(place)
        first = self.held[number]
        del self.held[number:]
        self._barred = {place: tokens for place, tokens in self._barred.items() if place <= number}
        self._barred.setdefault(number, set()).add(first.token)
        return first

    def release(self) -> list[HeldToken]:
        """Remove and return the tokens that cannot be undone any more.

        Text before a token that may be undone could still become a banned string in another way, so it stays held.
        """
        count = len(self.held)
        while (place := next((place for place, match in self._find_matches(count) if match is None), None)) is not None:
            count = self._find_token(place)
        return self._release(count)

    def flush(self) -> list[HeldToken]:
        """Remove and return all held tokens at the end of the answer."""
        return self._release(len(self.held))

    def _release(self, count: int) -> list[HeldToken]:
        """Remove and return the first `count` held tokens."""
        released, self.held = self.held[:count], self.held[count:]
        self._barred = {place - count: tokens for place, tokens in self._barred.items() if place >= count}
        return released

    def _find_matches(self, count: int) -> Iterator[tuple[int, bool | None]]:
        """Yield (offset, verdict) for each byte of the first `count` held tokens at which a banned string may begin.

        verdict: True for a complete match, None if it depends on later bytes.
        """
        return self._find_in_bytes(b"".join(token.data for token in self.held[:count]))

    def _find_in_bytes(self, data: bytes) -> Iterator[tuple[int, bool | None]]:
        """Yield (offset, verdict) for each byte of `data`; see `_find_matches`."""
        for place, byte in enumerate(data):
            results = [match_string(data, place, string) for string in self._by_first.get(byte, ())]
            if True in results or None in results:
                yield place, True if True in results else None

    def _find_token(self, place: int) -> int:
        """Return the index of the held token that contains a byte offset."""
        for number, token in enumerate(self.held):
            place -= len(token.data)
            if place < 0:
                return number
        raise IndexError(place)
