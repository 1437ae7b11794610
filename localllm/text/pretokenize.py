"""Split text into words by the steps of a pre-tokenizer; each step splits the pieces of the previous one.

Texts are first normalized to NFC if the model's original tokenizer does so (llama.cpp never does): file names of macOS
and PDFs often have decomposed characters ("e" and an accent for "é"). Only GGUF files that localllm converted say
whether to normalize; for others it follows from the pre-tokenizer or the architecture. Source: the tokenizers of
transformers (qwen2, qwen3_5, cohere, and gpt_neox, which OLMo, MPT, Mamba and ModernBERT use, too).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, groupby
from unicodedata import category, normalize

from localllm.text.pretokenize import Threes

Cut = Callable[[str], list[str]]
WINDOW, MARGIN = 1 << 18, 1 << 12  # characters: see `in_windows`


def make_splitter(steps: Iterable[str | Threes]) -> Cut:
    """Make a function that splits a text into words; joined, the words are the text again."""
    cuts: list[Cut] = []
    for _, equal_steps in groupby(steps, type):
        group = list(equal_steps)
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
    """Make a function that splits by Oniguruma expressions: each match and each text between matches is a word."""
    from tokenizers import Regex, pre_tokenizers  # takes 15 ms, and SentencePiece does not need it

    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    pre_tokenizer = pre_tokenizers.Sequence(splits)

    def pieces(text: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    return pieces


def in_windows(cut: Cut, text: str) -> list[str]:
    """Apply `cut` to a text, WINDOW characters at a time.

    Oniguruma fails, and the tokenizers library panics, on a match of some million characters. The words in the last
    MARGIN characters of a window are dropped, and the next window begins where the kept words end. Only a run of
    millions of spaces or symbols is cut where its window ends.
    """
    window_words: list[str] = []
    at = 0
    while len(text) - at > WINDOW:
        words = cut(text[at : at + WINDOW])
        finished = _far_from_end(words)
        window_words += words[:finished]
        at += sum(map(len, words[:finished]))
    return window_words + cut(text[at:])


def _far_from_end(words: list[str]) -> int:
    """Return how many words of a window to keep: at least one.

    If possible the last one ends with a letter and a space or newline follows: no expression matches across such a
    position, or looks back from after it.
    """
    ends = list(accumulate(map(len, words)))
    count = max(1, bisect_right(ends, WINDOW - MARGIN))
    best = (n for n in range(count, 0, -1) if words[n - 1][-1].isalpha() and words[n : n + 1] and words[n][0] in " \n")
    return next(best, count)


def _in_threes(step: Threes) -> Cut:
    """Make a function that splits runs of digits into threes, counted from the right."""
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
GROWTH = 3  # most bytes of a text for each byte of its NFC form
_MAY_CHANGE = re.compile("[\u0300-\U0010ffff]")  # NFC changes no text of lower characters alone
_SHORT = 1 << 12  # characters: the standard library takes quadratic time for long runs of marks


def uses_nfc(metadata: Mapping[str, object]) -> bool:
    """Return whether the original tokenizer applies NFC."""
    declared = metadata.get(NORMALIZER)
    if declared in (COMPOSING, NOTHING):
        result: bool = declared == COMPOSING
        return result
    return usually_uses_nfc(metadata.get("tokenizer.ggml.pre"), metadata.get("general.architecture"))


def usually_uses_nfc(pretokenizer: object, architecture: object) -> bool:
    """Return whether tokenizers with these names apply NFC."""
    return pretokenizer in PRETOKENIZERS or architecture in ARCHITECTURES


def to_nfc(text: str) -> str:
    """Convert to NFC in linear time."""
    if text.isascii() or not _MAY_CHANGE.search(text):
        return text
    if len(text) <= _SHORT:
        return normalize("NFC", text)
    from tokenizers import normalizers  # takes 15 ms, and few texts need it

    return str(normalizers.NFC().normalize_str(text))
