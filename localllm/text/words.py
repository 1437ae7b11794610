"""A text into words, by the steps of a pre-tokenizer, each applied to what the ones before have left."""

from collections.abc import Callable, Iterable
from itertools import groupby
from unicodedata import category

from localllm.text.pretokenizers import Threes

Cut = Callable[[str], list[str]]


def cutter(steps: Iterable[str | Threes]) -> Cut:
    """A function from a text to its words, which joined are the text."""
    cuts: list[Cut] = []
    for _, same in groupby(steps, type):
        group = list(same)
        cuts += [_in_threes(step) for step in group if isinstance(step, Threes)]
        cuts += (
            [_by_expressions(expressions)] if (expressions := [step for step in group if isinstance(step, str)]) else []
        )

    def words(text: str) -> list[str]:
        found = [text]
        for cut in cuts:
            found = [word for piece in found for word in cut(piece)]
        return found

    return words


def _by_expressions(expressions: list[str]) -> Cut:
    """Cut by Oniguruma expressions: what one matches becomes a word, and so does what lies between matches."""
    from tokenizers import Regex, pre_tokenizers  # here, because SentencePiece needs none of its 15 ms

    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    pre_tokenizer = pre_tokenizers.Sequence(splits)
    return lambda text: [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


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
