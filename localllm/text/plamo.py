"""PLaMo 2's unigram tokenizer: the segmentation whose scores have the largest sum.

Unlike SentencePiece's, it normalizes nothing, spaces stay spaces, and a character that is no piece becomes byte tokens.
Scores are integers in units of 1/10,000; of equally good segmentations, the one with the longer first piece wins.
"""

from collections.abc import Iterable

from localllm.text.subwords import SentencePiece
from localllm.text.token_types import NORMAL
from localllm.text.vocabulary import Vocabulary

_UNITS = 10_000  # units of a score of 1.0
_UNKNOWN, _INVALID = -10_000_000, -20_000_000  # scores of a character that is no piece, and of pieces to ignore


class Plamo(SentencePiece):
    """PLaMo's tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        tokens = [token for token in vocabulary.ids.values() if vocabulary.types[token] == NORMAL]
        pieces = [vocabulary.pieces[token] for token in tokens]
        scores = {piece: round_half_up(-vocabulary.ranks[piece] * _UNITS) for piece in pieces}
        self._scores = {piece: score for piece, score in scores.items() if score > _INVALID}
        lengths: dict[str, set[int]] = {}
        for piece in self._scores:
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {first: sorted(by_text, reverse=True) for first, by_text in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens; a leading byte order mark is dropped."""
        return super().encode(text.removeprefix("\ufeff"))

    def _words_of(self, text: str) -> Iterable[str]:
        return [text] if text else []

    def _tokens(self, word: str) -> list[int]:
        ends, tokens, at = self._best_ends(word), [], 0
        while at < len(word):
            end = ends[at]
            ids = end > 0
            piece = word[at : abs(end)]
            tokens += [self.vocabulary.ids[piece]] if ids else self._byte_tokens(piece)
            at = abs(end)
        return tokens

    def _best_ends(self, word: str) -> list[int]:
        """Return, for each position, the end of the first piece of the best segmentation from there on.

        The end is negative where that piece is a single character that becomes byte tokens.
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

    def _piece_bytes(self, piece: str) -> bytes:
        return piece.encode(errors="replace")


def round_half_up(x: float) -> int:
    """Round as C does: halves away from 0."""
    return int(abs(x) + 0.5) * (1 if x >= 0 else -1)
