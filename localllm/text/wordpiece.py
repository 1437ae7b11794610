"""WordPiece (BERT, Devlin et al. 2018): a word is split by taking the longest matching piece, from left to right.

Texts are normalized first: control characters and accents are removed, letters become lower case; white space,
punctuation and Chinese characters end words. As in the models' own tokenizers, a word that cannot be split into pieces
becomes one unknown token as a whole, and so does one that is too long. Source:
https://github.com/google-research/bert/blob/master/tokenization.py
"""

import re
from collections.abc import Iterable
from unicodedata import category, normalize

from localllm.text.subwords import Subwords
from localllm.text.vocabulary import Vocabulary

LONGEST = 100  # characters of a word
SPACE = re.compile("[\t\n\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
CHINESE = re.compile(
    "([一-\u9fff㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002b81f\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f])"
)
ASCII_WORD = re.compile("[A-Za-z0-9]+")
ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class WordPiece(Subwords):
    """A WordPiece tokenizer. Pieces that begin words have "▁" before them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._lower, self._strips = vocabulary.lowers, vocabulary.strips_accents

    def _words_of(self, text: str) -> Iterable[str]:
        """Split at white space."""
        return [chunk for chunk in SPACE.split(text) if chunk]

    def _tokens(self, word: str) -> list[int]:
        if ASCII_WORD.fullmatch(word):
            return self._pieces(word.lower() if self._lower else word)
        return [token for part in self._parts(word) for token in self._pieces(part)]

    def _parts(self, chunk: str) -> list[str]:
        """Split into normalized words, and single punctuation and Chinese characters."""
        parts: list[str] = []
        normalized = "".join(one for one in chunk if not is_control(one))
        for piece in CHINESE.split(normalized):
            word, begin = self._normalize(piece), 0
            for at, one in enumerate(word):
                if is_punctuation(one):
                    parts += [word[begin:at], one]
                    begin = at + 1
            parts.append(word[begin:])
        return [part for part in parts if part]

    def _normalize(self, piece: str) -> str:
        if self._strips:
            piece = "".join(one for one in normalize("NFD", piece) if category(one) != "Mn")
        return (
            "".join([one.lower() for one in piece]) if self._lower else piece
        )  # each alone: str.lower() writes a final sigma as ς

    def _pieces(self, word: str) -> list[int]:
        """Encode a normalized word."""
        if len(word) > LONGEST:
            return self._unknown
        ids, tokens, rest = self.vocabulary.ids, list[int](), "▁" + word
        while rest:
            length = next((end for end in range(len(rest), 0, -1) if rest[:end] in ids), 0)
            if not length:
                return self._unknown
            tokens.append(ids[rest[:length]])
            rest = rest[length:]
        return tokens

    def _piece_bytes(self, piece: str) -> bytes:
        return piece.replace("▁", " ").encode(errors="replace")


def is_control(one: str) -> bool:
    """Return whether a character is dropped: control, format, private use and unassigned ones."""
    return one in ("\0", "\ufffd") or (category(one) in ("Cc", "Cf", "Co") and one not in "\t\n\r")


def is_punctuation(one: str) -> bool:
    """Return whether a character is a word by itself."""
    return one in ASCII_PUNCTUATION or category(one)[0] == "P"
