"""Tokenize text with unigram models, which choose the segmentation with the highest sum of scores.

SentencePiece's (T5, https://arxiv.org/abs/1804.10959) first normalizes text with the file's charsmap. PLaMo 2's does
not normalize, keeps spaces, and encodes a character without a token as byte tokens.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from math import inf

import numpy as np

from localllm.errors import ModelError
from localllm.text.subwords import SentencePieceTokenizer, SubwordTokenizer, build_word_boundary, index_lengths
from localllm.text.vocabulary import NORMAL, UNUSED, USER_DEFINED, Vocabulary

_PENALTY = 10.0  # a character without a token has the lowest token score minus this


class UnigramTokenizer(SubwordTokenizer):
    """SentencePiece's unigram tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._normalized = CharsmapNormalizer(vocabulary.charsmap)
        kinds, ranks = vocabulary.types, vocabulary.ranks
        scores = {piece: -ranks[piece] for piece, token in vocabulary.ids.items() if kinds[token] in (NORMAL, UNUSED)}
        scores |= {piece: 0.0 for piece, token in vocabulary.ids.items() if kinds[token] == USER_DEFINED}
        self._scores = scores
        normal = [score for piece, score in scores.items() if kinds[vocabulary.ids[piece]] == NORMAL]
        self._unknown_score = min(normal, default=0.0) - _PENALTY
        self._lengths = index_lengths(scores, 1)
        self._boundary = build_word_boundary(list(scores))
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens; adjacent unknown characters become one unknown token."""
        tokens = super().encode(text)
        if not self._unknown or self._unknown[0] not in tokens:
            return tokens
        return tokens[:1] + [token for last, token in pairwise(tokens) if not last == token == self._unknown[0]]

    def _split_words(self, text: str) -> Iterable[str]:
        """Split into words whose best segmentations, joined, are that of the whole text, with "▁" for a space."""
        text = self._normalized(text)
        if self.vocabulary.merges_spaces:
            text = "".join("▁" + word for word in text.split(" ") if word)
        else:
            begins = self.vocabulary.adds_space and text.strip(" ")
            text = ("▁" if begins else "") + text.replace(" ", "▁")
        return self._boundary.split(text) if text else []

    def _encode_word_pieces(self, word: str) -> list[int]:
        tokens, end = [], len(word)
        starts = self._find_best_starts(word)
        while end > 0:
            start = starts[end]
            token = self.vocabulary.ids.get(word[start:end]) if word[start:end] in self._scores else None
            tokens += self._unknown if token is None else [token]
            end = start
        return tokens[::-1]

    def _find_best_starts(self, word: str) -> list[int]:
        """Return for each prefix where the last token of its best segmentation starts (Viterbi's algorithm)."""
        count, scores, lengths = len(word), self._scores, self._lengths
        best, starts = [0.0] + [-inf] * count, [0] * (count + 1)
        for start in range(count):
            is_piece = False
            for length in reversed(lengths.get(word[start], ())):
                if (end := start + length) > count:
                    break
                if (score := scores.get(word[start:end])) is None:
                    continue
                is_piece = is_piece or length == 1
                if best[start] + score > best[end]:
                    best[end], starts[end] = best[start] + score, start
            if not is_piece and best[start] + self._unknown_score > best[start + 1]:
                best[start + 1], starts[start + 1] = best[start] + self._unknown_score, start
        return starts


_LONGEST = 256  # maximum bytes of a sequence; those of Unicode's normalization have up to 12
_LABEL = 0x800000FF


class CharsmapNormalizer:
    """A normalizer that replaces the longest mapped sequence at each position of a text."""

    def __init__(self, data: bytes) -> None:
        """Parse a precompiled charsmap; an empty one changes nothing. Raises ModelError if it is inconsistent."""
        size = int.from_bytes(data[:4], "little")
        if data and (len(data) <= size + 4 or size % 4 or data[-1] != 0):
            raise ModelError(
                f"the charsmap has only {len(data)} bytes, too few for its trie of {size} bytes and the replacements"
            )
        self._nodes: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist() if size else []
        self._texts = data[4 + size :]
        self._inert: set[str] = set()  # characters that begin no mapped sequence
        ascii_ones = [chr(code) for code in range(128)]
        quiet = (
            [character for character in ascii_ones if self._is_unchanged(character, ascii_ones)] if self._nodes else []
        )
        # Runs of ASCII characters that no sequence changes, the bulk of most text.
        self._quiet = re.compile(f"[{re.escape(''.join(quiet))}]+(?![^\\x00-\\x7f])" if quiet else "(?!)")

    def __call__(self, text: str) -> str:
        """Normalize a text. Raises ModelError if the map refers to bytes beyond its end."""
        if not self._nodes:
            return text
        parts, at = [], 0
        while at < len(text):
            if run := self._quiet.match(text, at):
                parts.append(run[0])
                at = run.end()
                continue
            end, place = self._find_longest(text, at) if text[at] not in self._inert else (at, 0)
            parts.append(self._read_replacement(place) if end > at else text[at])
            at = max(end, at + 1)
        return "".join(parts)

    def _is_unchanged(self, character: str, characters: list[str]) -> bool:
        return all(self._find_longest(character + second, 0)[0] == 0 for second in characters)

    def _find_longest(self, text: str, start: int) -> tuple[int, int]:
        """Return the end of the longest mapped sequence at a position, and the offset of its replacement.

        Returns (start, 0) if no sequence begins there.
        """
        nodes, count = self._nodes, len(self._nodes)
        best, place = start, 0
        inner = _get_offset(nodes[0])
        for at in range(start, min(start + _LONGEST, len(text))):
            for byte in text[at].encode(errors="replace"):
                child = inner ^ byte
                if not byte or child >= count or nodes[child] & _LABEL != byte:
                    if at == start:
                        self._inert.add(text[start])
                    return best, place
                inner = child ^ _get_offset(nodes[child])
            if nodes[child] & 256 and inner < count:
                best, place = at + 1, nodes[inner] & 0x7FFFFFFF
        return best, place

    def _read_replacement(self, place: int) -> str:
        if place >= len(self._texts):
            raise ModelError("the charsmap refers to bytes beyond its end")
        return self._texts[place : self._texts.index(b"\0", place)].decode(errors="replace")


def _get_offset(node: int) -> int:
    return node >> 10 << ((node & 512) >> 6)


_UNITS = 10_000  # units of a score of 1.0
_UNKNOWN, _INVALID = -10_000_000, -20_000_000  # scores of a character without a token, and of tokens to ignore


class PlamoTokenizer(SentencePieceTokenizer):
    """PLaMo 2's tokenizer.

    Scores are integers in units of 1/10,000; of equally good segmentations, the one with the longer first token is
    chosen.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        tokens = [token for token in vocabulary.ids.values() if vocabulary.types[token] == NORMAL]
        pieces = [vocabulary.pieces[token] for token in tokens]
        scores = {piece: round_half_away_from_zero(-vocabulary.ranks[piece] * _UNITS) for piece in pieces}
        self._scores = {piece: score for piece, score in scores.items() if score > _INVALID}
        self._lengths = index_lengths(self._scores, 1)

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens and without a leading byte order mark."""
        return super().encode(text.removeprefix("\ufeff"))

    def _split_words(self, text: str) -> Iterable[str]:
        return [text] if text else []

    def _encode_word_pieces(self, word: str) -> list[int]:
        ends, tokens, at = self._find_best_ends(word), [], 0
        while at < len(word):
            end = abs(ends[at])
            piece = word[at:end]
            tokens += [self.vocabulary.ids[piece]] if ends[at] > 0 else self._encode_bytes(piece)
            at = end
        return tokens

    def _find_best_ends(self, word: str) -> list[int]:
        """Return for each position where the first token of the rest's best segmentation ends.

        The value is negative if that token is a single character that becomes byte tokens.
        """
        count, scores = len(word), self._scores
        best, ends = [0] * (count + 1), [0] * count
        for start in range(count - 1, -1, -1):
            pairs = [
                (best[start + length] + score, start + length)
                for length in self._lengths.get(word[start], ())
                if start + length <= count and (score := scores.get(word[start : start + length])) is not None
            ]  # longest first: max() prefers the first of equal scores
            pairs.append((best[start + 1] + _UNKNOWN, -(start + 1)))
            best[start], ends[start] = max(pairs, key=lambda pair: pair[0])
        return ends

    def _decode_piece(self, piece: str) -> bytes:
        return piece.encode(errors="replace")


def round_half_away_from_zero(x: float) -> int:
    """Round to the nearest integer as C does, halves away from 0."""
    return int(abs(x) + 0.5) * (1 if x >= 0 else -1)
