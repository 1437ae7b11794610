"""Find the texts of special tokens in a text: a regular expression of their first characters finds candidates."""

import re
from collections.abc import Collection, Iterable, Iterator

_WHITE_SPACE = " \t\n\v\f\r"


class SpecialTokens:
    """A splitter that cuts special tokens out of a text as llama.cpp does: the longest first.

    Takes time in proportion to the text, however many tokens there are.
    """

    def __init__(
        self, tokens: Iterable[tuple[str, int]], strips_before: Collection[int], strips_after: Collection[int]
    ) -> None:
        """Build the splitter.

        tokens: (text, id); the sets say which of them strip the white space before them or after them.
        """
        ordered = sorted(tokens, key=lambda token: -len(token[0].encode(errors="replace")))
        self._ids = dict(ordered)
        self._ranks = {text: rank for rank, (text, _) in enumerate(ordered)}
        self._lengths: dict[str, list[int]] = {}  # of texts, by their first LENGTH characters
        for text in self._ids:
            lengths = self._lengths.setdefault(text[:LENGTH], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._head_lengths = sorted({len(head) for head in self._lengths})
        self._places = re.compile(build_prefix_regex(self._ids))
        self._strips_before, self._strips_after = strips_before, strips_after

    def cut(self, text: str) -> list[str | int]:
        """Split a text into strings and ids of special tokens, in order, without empty strings."""
        cuts, position = [], 0
        fragments: list[str | int] = []
        is_taken = bytearray(len(text))
        for _, start, end in sorted(self._occurrences(text)):
            if is_taken[start] or is_taken[end - 1]:  # checking both ends is enough: earlier tokens are not shorter
                continue
            token = self._ids[text[start:end]]
            if token in self._strips_before:
                start = _spread(text, is_taken, start, -1)
            if token in self._strips_after:
                end = _spread(text, is_taken, end, 1)
            is_taken[start:end] = b"\1" * (end - start)
            cuts.append((start, end, token))
        for start, end, token in sorted(cuts):
            fragments += [text[position:start], token] if start > position else [token]
            position = end
        return [*fragments, text[position:]] if position < len(text) else fragments

    def _occurrences(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield every occurrence, including those inside others: (rank, start, end)."""
        for place in self._places.finditer(text):
            start = place.start() - 1
            for head in self._head_lengths:
                for length in self._lengths.get(text[start : start + head], ()):
                    if (rank := self._ranks.get(text[start : start + length])) is not None:
                        yield rank, start, start + length


def _spread(text: str, is_taken: bytearray, edge: int, step: int) -> int:
    """Extend an edge of a token's match over white space that belongs to no other token."""
    at = edge if step > 0 else edge - 1
    while 0 <= at < len(text) and text[at] in _WHITE_SPACE and not is_taken[at]:
        at += step
    return at if step > 0 else at + 1


# Characters of a prefix: enough to tell <think> from <|im_end|>, and few enough that thousands of <unused...> share
# one.
LENGTH = 8


def build_prefix_regex(strings: Iterable[str]) -> str:
    """Build a regular expression with an empty match after the first character of each string.

    It looks at the first LENGTH characters only, so callers compare the rest; without strings it matches nothing.
    """
    first_ones = {string[:LENGTH] for string in strings}
    return "|".join(f"(?<={re.escape(first)})(?={_tree(rest)})" for first, rest in _by_first(first_ones)) or "(?!)"


def _tree(strings: Collection[str]) -> str:
    """Build an expression that matches any of the strings without reading a character twice."""
    if "" in strings:
        return ""
    return "(?:" + "|".join(re.escape(first) + _tree(rest) for first, rest in _by_first(strings)) + ")"


def _by_first(strings: Collection[str]) -> list[tuple[str, set[str]]]:
    """Group the strings by their first character: (the character, what follows it)."""
    rests: dict[str, set[str]] = {}
    for string in strings:
        rests.setdefault(string[0], set()).add(string[1:])
    return sorted(rests.items())
