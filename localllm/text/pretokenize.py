"""Splits text into words by the steps of a pre-tokenizer, each applied to the pieces of those before.

Before, texts are normalized to NFC for tokenizers whose originals do so; llama.cpp never does. Texts come in decomposed
form ("e" and an accent for "é"), as of file names on macOS and of PDFs. A GGUF file does not say whether to compose,
but for those that localllm converts: it follows from the pre-tokenizer, or from the architecture. Source: the
tokenizers of transformers (qwen2, qwen3_5, cohere, gpt_neox, which OLMo, MPT, Mamba and ModernBERT have, too).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, groupby
from typing import Any
from unicodedata import category, normalize

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


NORMALIZER, COMPOSING, NOTHING = "localllm.normalizer", "nfc", "none"  # a key that localllm writes, and its values
PRETOKENIZERS = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "olmo", "mpt", "modern-bert")
ARCHITECTURES = ("gptneox",)
GROWTH = 3  # times as many bytes as composed, at most
_MAY_CHANGE = re.compile("[\u0300-\U0010ffff]")  # what stands before is composed, whatever follows
_SHORT = 1 << 12  # characters: the standard library takes quadratic time for long runs of marks


def uses_nfc(metadata: Mapping[str, Any]) -> bool:
    """Return whether the original tokenizer applies NFC."""
    declared = metadata.get(NORMALIZER)
    if declared in (COMPOSING, NOTHING):
        result: bool = declared == COMPOSING
        return result
    return usually_uses_nfc(metadata.get("tokenizer.ggml.pre"), metadata.get("general.architecture"))


def usually_uses_nfc(pretokenizer: Any, architecture: Any) -> bool:
    """Return whether tokenizers with these names apply NFC."""
    return pretokenizer in PRETOKENIZERS or architecture in ARCHITECTURES


def to_nfc(text: str) -> str:
    """Convert to NFC in linear time."""
    if text.isascii() or not _MAY_CHANGE.search(text):
        return text
    if len(text) <= _SHORT:
        return normalize("NFC", text)
    from tokenizers import normalizers  # 15 ms, which few texts need

    return str(normalizers.NFC().normalize_str(text))
