r"""Tokenize by the longest match: BERT's WordPiece, and RWKV's World.

WordPiece (Devlin et al. 2018) normalizes text first: control characters and accents are removed, letters become lower
case; white space, punctuation and Chinese characters end words. As in the models' own tokenizers, a word that cannot be
split into subwords, or is too long, becomes a single unknown token. Source:
https://github.com/google-research/bert/blob/master/tokenization.py

RWKV matches the UTF-8 bytes of the whole text. Files write a token with the escapes of Python's bytes literals: \\n,
\\x8f and so on, and a backslash before a backslash or quote.
"""

import re
from collections.abc import Iterable
from unicodedata import category, normalize

from localllm.errors import ModelError
from localllm.text.subwords import SubwordTokenizer, index_lengths
from localllm.text.vocabulary import NORMAL, Vocabulary

MAX_WORD = 100  # maximum characters of a word
SPACE = re.compile("[\t\n\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
CHINESE = re.compile(
    "([一-\u9fff㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002b81f\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f])"
)
ASCII_WORD = re.compile("[A-Za-z0-9]+")
ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class WordPieceTokenizer(SubwordTokenizer):
    """BERT's WordPiece tokenizer. Tokens that begin a word have the prefix "▁"."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._lower, self._strips = vocabulary.lowers, vocabulary.strips_accents

    def _split_words(self, text: str) -> Iterable[str]:
        """Split at white space."""
        return [chunk for chunk in SPACE.split(text) if chunk]

    def _encode_word_pieces(self, word: str) -> list[int]:
        if ASCII_WORD.fullmatch(word):
            return self._encode_normalized(word.lower() if self._lower else word)
        return [token for part in self._split_chunk(word) for token in self._encode_normalized(part)]

    def _split_chunk(self, chunk: str) -> list[str]:
        """Split at punctuation and Chinese characters, which become words of their own, and normalize the words."""
        parts: list[str] = []
        normalized = "".join(character for character in chunk if not is_control(character))
        for piece in CHINESE.split(normalized):
            word, begin = self._normalize(piece), 0
            for at, character in enumerate(word):
                if is_punctuation(character):
                    parts += [word[begin:at], character]
                    begin = at + 1
            parts.append(word[begin:])
        return [part for part in parts if part]

    def _normalize(self, piece: str) -> str:
        if self._strips:
            piece = "".join(character for character in normalize("NFD", piece) if category(character) != "Mn")
        # Character by character, since str.lower() writes a final sigma as ς.
        return "".join([character.lower() for character in piece]) if self._lower else piece

    def _encode_normalized(self, word: str) -> list[int]:
        """Return the longest tokens that make up a normalized word, or the unknown token."""
        if len(word) > MAX_WORD:
            return self._unknown
        ids, tokens, remaining = self.vocabulary.ids, list[int](), "▁" + word
        while remaining:
            length = next((end for end in range(len(remaining), 0, -1) if remaining[:end] in ids), 0)
            if not length:
                return self._unknown
            tokens.append(ids[remaining[:length]])
            remaining = remaining[length:]
        return tokens


def is_control(character: str) -> bool:
    """Return whether BERT drops a character: control, format, private use or unassigned."""
    return character in ("\0", "\ufffd") or (category(character) in ("Cc", "Cf", "Co") and character not in "\t\n\r")


def is_punctuation(character: str) -> bool:
    """Return whether BERT makes a character a word of its own."""
    return character in ASCII_PUNCTUATION or category(character)[0] == "P"


_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_NAMED = {"t": b"\t", "n": b"\n", "r": b"\r"}


def unescape(piece: str) -> bytes:
    """Decode the escapes of RWKV's vocabulary to the bytes of a token."""
    data, end = b"", 0
    for escape in _ESCAPED.finditer(piece):
        data += piece[end : escape.start()].encode(errors="replace")
        name, end = escape[1], escape.end()
        data += bytes([int(name[1:], 16)]) if len(name) == 3 else _NAMED.get(name, name.encode(errors="replace"))
    return data + piece[end:].encode(errors="replace")


class RwkvTokenizer(SubwordTokenizer):
    """RWKV's World tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Index the tokens by their first bytes. Raises ModelError if one of the 256 bytes has no token."""
        super().__init__(vocabulary)
        kinds = vocabulary.types
        tokens = [token for token in vocabulary.ids.values() if kinds[token] == NORMAL]
        self._bytes = {token: unescape(vocabulary.pieces[token]) for token in tokens}
        self._ids = {piece: token for token, piece in self._bytes.items()}
        self._lengths = index_lengths(self._ids, 2)
        if missing := [byte for byte in range(256) if bytes([byte]) not in self._ids]:
            more_bytes = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"tokenizer.ggml.tokens must contain every byte, but lacks {missing[0]:#04x}{more_bytes}")

    def _encode_word_pieces(self, word: str) -> list[int]:
        data, ids, at = word.encode(), self._ids, 0
        tokens = []
        while at < len(data):
            for length in self._lengths.get(data[at : at + 2], ()):
                if (token := ids.get(data[at : at + length])) is not None:
                    break
            else:
                length = 1
                token = ids[data[at : at + 1]]
            tokens.append(token)
            at += length
        return tokens

    def _decode_piece(self, piece: str) -> bytes:
        return unescape(piece)
