"""The tokens of a text so far, as far as steps of sampling look back."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer

FIRST_ROOM = 256  # tokens


class History:
    """The last tokens of a text: at least `most` of them, or all."""

    def __init__(self, most: int):
        """most: -1 for all of them, 0 for none."""
        self.most, self._count = most, 0
        self._tokens = np.empty(FIRST_ROOM if most else 0, np.int64)

    def append(self, token: int) -> None:
        """Append a token."""
        if self.most == 0:
            return
        if self._count == len(self._tokens):
            kept = self.last(self.most)
            self._tokens = np.empty(2 * max(len(kept), FIRST_ROOM), np.int64)
            self._tokens[: len(kept)] = kept
            self._count = len(kept)
        self._tokens[self._count] = token
        self._count += 1

    def last(self, count: int) -> np.ndarray:
        """Return the last `count` tokens, or fewer, int64 [n]; -1: all."""
        return self._tokens[0 if count < 0 else max(0, self._count - count) : self._count]

    def copy(self) -> "History":
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._tokens = self._tokens[: self._count].copy()
        return twin


class Breakers:
    """Texts that end a sequence, wherever they stand in the text and however that is cut into tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: "Tokenizer | None"):
        """tokenizer: may be None if there are no texts."""
        self._texts, self._tokenizer = [text.encode() for text in texts], tokenizer
        self._longest = max(map(len, self._texts), default=1)
        self._tail, self.since = b"", 0  # the last bytes of the text; tokens since one of the texts ended

    def push(self, token: int) -> None:
        """Append a token."""
        said, before = self._tail + self._bytes(token), len(self._tail)
        ended = any(said.find(text, max(0, before - len(text) + 1)) >= 0 for text in self._texts)
        self.since = 0 if ended else self.since + 1
        self._tail = said[max(0, len(said) - self._longest + 1) :]

    def are_in(self, token: int) -> bool:
        """Whether a token has one of them."""
        said = self._bytes(token)
        return any(text in said for text in self._texts)

    def _bytes(self, token: int) -> bytes:
        """Return a token's bytes; of a control token, its name."""
        return self._tokenizer.token_bytes(token, special=True) if self._tokenizer and self._texts else b""

    def copy(self) -> "Breakers":
        """Return an independent copy."""
        return copy.copy(self)
