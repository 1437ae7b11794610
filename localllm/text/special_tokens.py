"""Special tokens in a text: where their texts are, each a token whatever lies around it."""

import re
from collections.abc import Collection, Iterable, Iterator

from localllm.text.prefix_regex import LENGTH, heads

_WHITE_SPACE = " \t\n\v\f\r"


class SpecialTokens:
    """Cuts special tokens out of a text, as llama.cpp does: first the longest wherever it is, then the next one.

    Takes time in proportion to the text, however many tokens there are.
    """

    def __init__(
        self, tokens: Iterable[tuple[str, int]], strips_before: Collection[int], strips_after: Collection[int]
    ) -> None:
        """tokens: (text, id); the sets tell which of them swallow the white space in front of them or behind them."""
        ordered = sorted(tokens, key=lambda token: -len(token[0].encode(errors="replace")))
        self._ids = dict(ordered)
        self._ranks = {text: rank for rank, (text, _) in enumerate(ordered)}
        self._lengths: dict[str, list[int]] = {}  # of the texts that begin so
        for text in self._ids:
            lengths = self._lengths.setdefault(text[:LENGTH], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._head_lengths = sorted({len(head) for head in self._lengths})
        self._places = re.compile(heads(self._ids))
        self._strips_before, self._strips_after = strips_before, strips_after

    def cut(self, text: str) -> list[str | int]:
        """The text with its special tokens cut out: strings and ids, in order, no empty string."""
        cuts, done = [], 0
        fragments: list[str | int] = []
        taken = bytearray(len(text))
        for _, start, end in sorted(self._found(text)):
            if taken[start] or taken[end - 1]:  # enough: what has been taken before is not shorter
                continue
            token = self._ids[text[start:end]]
            if token in self._strips_before:
                start = _spread(text, taken, start, -1)
            if token in self._strips_after:
                end = _spread(text, taken, end, 1)
            taken[start:end] = b"\1" * (end - start)
            cuts.append((start, end, token))
        for start, end, token in sorted(cuts):
            fragments += [text[done:start], token] if start > done else [token]
            done = end
        return [*fragments, text[done:]] if done < len(text) else fragments

    def _found(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Every occurrence, also of those inside others: (rank, start, end)."""
        for place in self._places.finditer(text):
            start = place.start() - 1
            for head in self._head_lengths:
                for length in self._lengths.get(text[start : start + head], ()):
                    if (rank := self._ranks.get(text[start : start + length])) is not None:
                        yield rank, start, start + length


def _spread(text: str, taken: bytearray, edge: int, step: int) -> int:
    """The edge of a token's place, moved over white space that is no other token's."""
    at = edge if step > 0 else edge - 1
    while 0 <= at < len(text) and text[at] in _WHITE_SPACE and not taken[at]:
        at += step
    return at if step > 0 else at + 1
