"""Tokenize plain text, without special tokens, by byte-pair encoding (BPE) in two variants.

Both start from single characters and join neighbours, the best pair first, until no pair can be joined. They differ in
the definition of a character, the order of pairs, and the tokens for characters that are not in the vocabulary.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import TypeVar

from localllm.text.pretokenize import make_splitter
from localllm.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

# A byte that is a printable Latin-1 character maps to itself, the others to the characters from 256 on (GPT-2).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_CHARACTER_OF_BYTE = {byte: byte for byte in _PRINTABLE}
_CHARACTER_OF_BYTE |= {byte: 256 + n for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
_BYTE_OF_CHARACTER = {chr(character): byte for byte, character in _CHARACTER_OF_BYTE.items()}

S = TypeVar("S", str, bytes)
WINDOW, MARGIN = 1 << 13, 1 << 9  # characters: see `merge_in_windows`
_CACHED_WORDS = 100_000
_CACHED_LENGTH = 64  # characters; longer words rarely occur twice


def merge_symbols(symbols: list[str], ranks: Mapping[str, float], joint: str) -> list[str]:
    """Join neighbouring symbols, the lowest rank first (the leftmost of equals), until no pair has a rank.

    ranks: of pairs, as left + joint + right. O(n log n) for n symbols.
    """
    count = len(symbols)
    # Neighbours; a merged pair keeps its left index.
    previous, following = list(range(-1, count - 1)), list(range(1, count + 1))

    def candidate(left: int, right: int) -> tuple[float, int, int, int] | None:
        if left < 0 or right >= count or (rank := ranks.get(symbols[left] + joint + symbols[right])) is None:
            return None
        return rank, left, right, len(symbols[left]) + len(symbols[right])

    queue = [pair for left in range(count - 1) if (pair := candidate(left, left + 1))]
    heapify(queue)
    while queue:
        _, left, right, length = heappop(queue)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
            continue  # one of the two has since been joined with another neighbour
        symbols[left] += symbols[right]
        symbols[right] = ""
        following[left] = following[right]
        if following[left] < count:
            previous[following[left]] = left
        for pair in (candidate(previous[left], left), candidate(left, following[left])):
            if pair:
                heappush(queue, pair)
    return [symbol for symbol in symbols if symbol]


def merge_in_windows(text: str, ranks: Mapping[str, float], joint: str) -> list[str]:
    """Apply `merge_symbols` to the characters of a text, WINDOW of them at a time.

    The symbols in the last MARGIN characters of a window are dropped, and the next window begins where the kept ones
    end, because merges far from the end of a window do not depend on it. Results are cached by window, because all
    windows of a megabyte of one letter are equal.
    """
    merged: list[str] = []
    cached: dict[str, tuple[list[str], int]] = {}
    at = 0
    while len(text) - at > WINDOW:
        window = text[at : at + WINDOW]
        if window not in cached:
            cached[window] = _select_final_symbols(merge_symbols(list(window), ranks, joint))
        symbols, length = cached[window]
        merged += symbols
        at += length
    return merged + merge_symbols(list(text[at:]), ranks, joint)


def _select_final_symbols(symbols: list[str]) -> tuple[list[str], int]:
    """Return the symbols of a window that are final, at least one, and their length in characters."""
    ends = list(accumulate(map(len, symbols)))
    count = max(1, bisect_right(ends, WINDOW - MARGIN))
    return symbols[:count], ends[count - 1]


class SubwordTokenizer:
    """A base class for tokenizers, whose subclasses split text into words, and words into tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens."""
        tokens: list[int] = []
        cached = self._words
        for word in self._split_words(text):
            tokens += cached.get(word) or self._encode_word(word)
        return tokens

    def token_bytes(self, token: int, special: bool) -> bytes:
        """Return the bytes of a token; b"" for a control token unless `special`."""
        piece, kind = self.vocabulary.pieces[token], self.vocabulary.types[token]
        if kind == NORMAL:
            return self._decode_piece(piece)
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind == USER_DEFINED or (special and kind in (CONTROL, UNKNOWN)):
            return piece.encode(errors="replace")
        return b""

    def _encode_word(self, word: str) -> list[int]:
        tokens = self._encode_word_pieces(word)
        if len(word) <= _CACHED_LENGTH:
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            self._words[word] = tokens
        return tokens

    def _split_words(self, text: str) -> Iterable[str]:
        return [text] if text else []

    def _encode_word_pieces(self, word: str) -> list[int]:
        raise NotImplementedError

    def _decode_piece(self, piece: str) -> bytes:
        return piece.replace("▁", " ").encode(errors="replace")


class ByteLevelTokenizer(SubwordTokenizer):
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        assert vocabulary.pretokenizer is not None
        self._cut = make_splitter(vocabulary.pretokenizer.patterns)
        self._ignore_merges = vocabulary.pretokenizer.ignore_merges

    def _split_words(self, text: str) -> Iterable[str]:
        return self._cut(text)

    def _encode_word_pieces(self, word: str) -> list[int]:
        ids = self.vocabulary.ids
        characters = word.encode().decode("latin-1").translate(_CHARACTER_OF_BYTE)
        if self._ignore_merges and (token := ids.get(characters)) is not None:
            return [token]
        tokens = []
        for symbol in merge_in_windows(characters, self.vocabulary.ranks, " "):
            if (token := ids.get(symbol)) is not None:
                tokens.append(token)
            else:  # tokens of the single bytes; bytes without a token are dropped, as in llama.cpp
                tokens += [ids[character] for character in symbol if character in ids]
        return tokens

    def _decode_piece(self, piece: str) -> bytes:
        try:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
        except KeyError:  # a token with characters other than the byte-level ones is plain text
            return piece.encode(errors="replace")


class SentencePieceTokenizer(SubwordTokenizer):
    """SentencePiece's BPE by scores, and Gemma 4's by merges over the same characters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        pretokenizer = vocabulary.pretokenizer
        self._by_merges = pretokenizer is not None
        self._joins_lines = pretokenizer is not None and pretokenizer.joins_lines
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
        self._boundary = build_word_boundary(vocabulary.pieces)

    def _split_words(self, text: str) -> Iterable[str]:
        """Split into words that merge as within the whole text; for Gemma 4, also at newlines."""
        text = text.replace(" ", "▁")
        lines = re.findall(r"[^\n]+|\n+", text) if self._by_merges else [text]
        return (word for line in lines for word in self._boundary.split(line))

    def _encode_word_pieces(self, word: str) -> list[int]:
        ids = self.vocabulary.ids
        if self._joins_lines and word.startswith("\n") and (token := ids.get(word)) is not None:
            return [token]
        tokens: list[int] = []
        for symbol in merge_in_windows(word, self.vocabulary.ranks, " " if self._by_merges else ""):
            token = ids.get(symbol)
            tokens += self._encode_bytes(symbol) if token is None else [token]
        return tokens

    def _encode_bytes(self, symbol: str) -> list[int]:
        """Return the byte tokens of a symbol, such as <0xE2>, or the unknown token if one of them is missing."""
        ids = self.vocabulary.ids
        names = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        return [ids[name] for name in names] if all(name in ids for name in names) else self._unknown


def index_lengths(pieces: Iterable[S], count: int) -> dict[S, list[int]]:
    """List the lengths of tokens, longest first, by their first `count` characters or bytes."""
    lengths: dict[S, set[int]] = {}
    for piece in pieces:
        lengths.setdefault(piece[:count], set()).add(len(piece))
    return {start: sorted(values, reverse=True) for start, values in lengths.items()}


def build_word_boundary(pieces: Sequence[str]) -> re.Pattern[str]:
    """Build an expression for positions before "▁" where a text can be split without changing its tokens.

    No token has the character before such a position directly before a "▁". Most vocabularies have "▁" only at the
    start of tokens, so that text is split before every word. This makes encoding fast, because short words are cached.
    """
    inside = "".join(sorted(set(re.findall("([^▁ ])▁", " ".join(pieces)))))
    return re.compile(f"(?<=[^▁{re.escape(inside)}])(?=▁)")
