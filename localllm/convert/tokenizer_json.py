"""Declare the types of a tokenizer.json, and find llama.cpp's name for its pre-tokenizer.

The pre-tokenizer is identified by how it splits a sample, not by its expression, which can be written in many ways. In
the sample every character class is next to every other class, and next to runs of the lengths that expressions
distinguish. Pre-tokenizers that split it alike count as equal.
"""

import json
import random
from functools import cache
from itertools import accumulate, pairwise
from typing import TypedDict

from localllm.errors import ModelError
from localllm.text.pretokenize import PRETOKENIZERS, PreTokenizer, make_splitter

# llama.cpp's converter writes this name for Llamas, where the table's first name is another.
USUAL_NAMES = {"llama3": "llama-bpe", "starcoder": "smollm"}

# Names that few readers know, and equivalent names that do not set ignore_merges (gpt-oss: the first).
WIDELY_KNOWN = {"granite-embed-multi-97m": "gpt-4o"}

# One character of each class that an expression may distinguish, and runs of them.
_LETTERS = "a b Z é É ß ǅ ʰ ª ж Ж ა Ა ا א ก 中 ら カ ー 가 ㄱ ㄅ \u0301 \u0e34 \u093f क"
_NUMBERS = "1 2 ٣ ² Ⅳ ½ 12 123 1234 1234567 0000000000"
_SIGNS = ". , ! ? ' \" - _ / \\ # $ + < = ^ ~ | ` ( @ * « 。 ， 、 … — ’ ！ ～ € © ° 🙂 👍🏽 \u200d \u200b \x00 ﬁ 𝒳 𐐀"
_WORDS = "'s 'S 't 're 'RE 've 'm 'll 'LL 'd 'x hello Hello HELLO camelCase XMLHttp"
_MORE = "... </s> :// _id .py ۔ ، । ้ ﾟ ក 〜 㐀 \ufeff"
_KINDS = [
    *[*_LETTERS.split(), *_NUMBERS.split()],
    *[" ", "  ", "   ", " " * 9, "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\u00a0", "\u3000", "\u2028", "\x85"],
    *[*_SIGNS.split(), *_WORDS.split(), " word", " 7", " !", *_MORE.split()],
]


class TokenizerStep(TypedDict, total=False):
    """A normalizer or a pre-tokenizer; `type` determines which other keys are present."""

    type: str
    normalizers: list["TokenizerStep"]
    pretokenizers: list["TokenizerStep"]
    pattern: dict[str, str]
    content: str
    prepend: str
    prepend_scheme: str
    add_prefix_space: bool
    split: bool
    precompiled_charsmap: str
    clean_text: bool
    handle_chinese_chars: bool
    lowercase: bool
    strip_accents: bool | None


class PostProcessor(TypedDict, total=False):
    """The component of a tokenizer that adds special tokens before and after a text."""

    type: str
    processors: list["PostProcessor"]
    single: list[dict[str, dict[str, str]]]
    cls: tuple[str, int]
    sep: tuple[str, int]


class TokenizerModel(TypedDict, total=False):
    """The vocabulary, and the settings of the algorithm that splits words into tokens."""

    type: str
    vocab: dict[str, int]  # Unigram: list[tuple[str, float]], pieces and scores
    merges: list[str | list[str]]
    unk_token: str | None
    unk_id: int | None
    byte_fallback: bool
    ignore_merges: bool
    continuing_subword_prefix: str
    max_input_chars_per_word: int


class AddedToken(TypedDict, total=False):
    """A token that is found before the text is normalized and split."""

    id: int
    content: str
    special: bool


class TokenizerJson(TypedDict, total=False):
    """The content of a tokenizer.json, which is not trusted: code that reads it runs in `report_as_model_error`."""

    model: TokenizerModel
    normalizer: TokenizerStep | None
    pre_tokenizer: TokenizerStep | None
    post_processor: PostProcessor | None
    added_tokens: list[AddedToken] | None


def list_normalizers(normalizer: TokenizerStep | None) -> list[TokenizerStep]:
    """Flatten a `normalizer` into its steps."""
    if not normalizer:
        return []
    if normalizer.get("type") == "Sequence":
        return [step for part in normalizer["normalizers"] for step in list_normalizers(part)]
    return [normalizer]


@cache
def build_sample() -> str:
    """Build the sample: every pair of character classes, then 12,000 random classes for longer sequences."""
    draw = random.Random(0)
    pairs = [first + second for first in _KINDS for second in _KINDS]
    return "".join(pairs) + "".join(_KINDS[int(draw.random() * len(_KINDS))] for _ in range(12000))


def find_pretokenizer(content: TokenizerStep | None, ignore_merges: bool) -> str:
    """Return tokenizer.ggml.pre for a `pre_tokenizer`. Raises ModelError if llama.cpp has no equivalent."""
    from tokenizers import Tokenizer

    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    try:
        splitter = Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": content})).pre_tokenizer
    except MemoryError:
        raise
    except Exception as error:  # the package raises no subclass
        raise ModelError(f"the pre-tokenizer is invalid: {error}") from None
    if splitter is None or any(part.get("add_prefix_space") for part in list_pretokenizers(content)):
        raise ModelError("the pre-tokenizer must split texts, and must not add a space before them")
    families = list_candidates(ignore_merges)
    for text in (build_sample()[-300:], build_sample()):  # a short text rules out most
        words = [span for _, span in splitter.pre_tokenize_str(text)]
        families = {name: family for name, family in families.items() if split_words(family, text) == words}
    if not families:
        raise ModelError("the pre-tokenizer must be one that localllm and llama.cpp know")
    name = next(iter(families))
    return USUAL_NAMES.get(name, name)


def list_pretokenizers(content: TokenizerStep | None) -> list[TokenizerStep]:
    """Flatten a `pre_tokenizer` into its steps."""
    if not isinstance(content, dict):
        return []
    return [part for step in content.get("pretokenizers", []) for part in list_pretokenizers(step)] or [content]


def list_candidates(ignore_merges: bool) -> dict[str, PreTokenizer]:
    """Return the byte-level pre-tokenizers that llama.cpp knows, each under its first name."""
    families: dict[PreTokenizer, str] = {}
    for name, family in PRETOKENIZERS.items():
        if not family.marks_spaces and family.ignore_merges == ignore_merges:
            families.setdefault(family, name)
    return {name: family for family, name in families.items()}


def split_words(family: PreTokenizer, text: str) -> list[tuple[int, int]]:
    """Return the (begin, end) of each word into which a pre-tokenizer splits a text."""
    return list(pairwise(accumulate(map(len, make_splitter(family.patterns)(text)), initial=0)))
