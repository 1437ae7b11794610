"""Splits text into words by the steps of a pre-tokenizer, each applied to the pieces of those before."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, groupby
from unicodedata import category

from localllm.text.pretokenizers import Threes

Cut = Callable[[str], list[str]]
WINDOW, MARGIN = 1 << 18, 1 << 12  # characters: see `in_windows`


def make_splitter(steps: Iterable[str | Threes]) -> Cut:
    """Make a function that splits a text into words, which joined are the text."""
    cuts: list[Cut] = []
    for _, same in groupby(steps, type):
        group = list(same)
        cuts += [_in_threes(step) for step in group if isinstance(step, Threes)]
        cuts += (
            [_by_expressions(expressions)] if (expressions := [step for step in group if isinstance(step, str)]) else []
        )

    def words(text: str) -> list[str]:
        pieces = [text]
        for cut in cuts:
            pieces = [word for piece in pieces for word in cut(piece)]
        return pieces

    return lambda text: words(text) if len(text) <= WINDOW else in_windows(words, text)


def _by_expressions(expressions: list[str]) -> Cut:
    """Split by Oniguruma expressions: each match is a word, and so is the text between matches."""
    from tokenizers import Regex, pre_tokenizers  # here, because SentencePiece needs none of its 15 ms

    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    pre_tokenizer = pre_tokenizers.Sequence(splits)

    def pieces(text: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    return pieces


def in_windows(cut: Cut, text: str) -> list[str]:
    """Apply `cut` to a text, WINDOW characters at a time.

    Oniguruma gives up, and the library panics, where it looks at some million characters for one word. The words in a
    window's last MARGIN characters are found again in the next one, which begins where a word begins. Only in a run of
    millions of spaces, or of signs, is there a word that ends with the window.
    """
    window_words: list[str] = []
    at = 0
    while len(text) - at > WINDOW:
        words = cut(text[at : at + WINDOW])
        done = _far_from_end(words)
        window_words += words[:done]
        at += sum(map(len, words[:done]))
    return window_words + cut(text[at:])


def _far_from_end(words: list[str]) -> int:
    """Return how many words of a window to keep: at least one, if possible up to a letter before a space.

    There, no expression looks back, and none that goes before others has a match that they cut.
    """
    ends = list(accumulate(map(len, words)))
    count = max(1, bisect_right(ends, WINDOW - MARGIN))
    best = (n for n in range(count, 0, -1) if words[n - 1][-1].isalpha() and words[n : n + 1] and words[n][0] in " \n")
    return next(best, count)


def _in_threes(step: Threes) -> Cut:
    runs = _by_expressions([step.runs])
    is_run = str.isdecimal if step.decimal else _is_number

    def cut(text: str) -> list[str]:
        return [part for word in runs(text) for part in (_threes(word) if is_run(word) else [word])]

    return cut


def _is_number(word: str) -> bool:
    return all(category(character)[0] == "N" for character in word)


def _threes(digits: str) -> list[str]:
    first = len(digits) % 3
    groups = [digits[at : at + 3] for at in range(first, len(digits), 3)]
    return [digits[:first], *groups] if first else groups
