"""SentencePiece's unigram tokenizer (T5): the segmentation whose scores have the largest sum.

Unlike its BPE it normalizes texts first, by the file's charsmap. https://arxiv.org/abs/1804.10959
"""

from collections.abc import Iterable
from itertools import pairwise
from math import inf

from localllm.text.subwords import Subwords, word_boundary
from localllm.text.token_types import NORMAL, UNUSED, USER_DEFINED
from localllm.text.unigram import Charsmap
from localllm.text.vocabulary import Vocabulary

_PENALTY = 10.0  # the score of a character that is no piece is the lowest score of a piece minus this


class Unigram(Subwords):
    """A unigram tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._normalized = Charsmap(vocabulary.charsmap)
        kinds, ranks = vocabulary.types, vocabulary.ranks
        scores = {piece: -ranks[piece] for piece, token in vocabulary.ids.items() if kinds[token] in (NORMAL, UNUSED)}
        scores |= {piece: 0.0 for piece, token in vocabulary.ids.items() if kinds[token] == USER_DEFINED}
        self._scores = scores
        normal = [score for piece, score in scores.items() if kinds[vocabulary.ids[piece]] == NORMAL]
        self._unknown_score = min(normal, default=0.0) - _PENALTY
        lengths: dict[str, set[int]] = {}  # of pieces, by their first character
        for piece in scores:
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {first: sorted(by_length) for first, by_length in lengths.items()}
        self._boundary = word_boundary(list(scores))
        self._unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens; adjacent unknown characters become one unknown token."""
        tokens = super().encode(text)
        if not self._unknown or self._unknown[0] not in tokens:
            return tokens
        return tokens[:1] + [token for last, token in pairwise(tokens) if not last == token == self._unknown[0]]

    def _words_of(self, text: str) -> Iterable[str]:
        """Split into words whose best segmentations, joined, are that of the whole text; "▁" for a space."""
        text = self._normalized(text)
        if self.vocabulary.merges_spaces:
            text = "".join("▁" + word for word in text.split(" ") if word)
        else:
            begins = self.vocabulary.adds_space and text.strip(" ")
            text = ("▁" if begins else "") + text.replace(" ", "▁")
        return self._boundary.split(text) if text else []

    def _tokens(self, word: str) -> list[int]:
        tokens, end = [], len(word)
        starts = self._best_starts(word)
        while end > 0:
            start = starts[end]
            token = self.vocabulary.ids.get(word[start:end]) if word[start:end] in self._scores else None
            tokens += self._unknown if token is None else [token]
            end = start
        return tokens[::-1]

    def _best_starts(self, word: str) -> list[int]:
        """Return the start of the last piece of each prefix's best segmentation, by Viterbi's algorithm."""
        count, scores, lengths = len(word), self._scores, self._lengths
        best, starts = [0.0] + [-inf] * count, [0] * (count + 1)
        for start in range(count):
            is_piece = False
            for length in lengths.get(word[start], ()):
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

    def _piece_bytes(self, piece: str) -> bytes:
        return piece.replace("▁", " ").encode(errors="replace")
