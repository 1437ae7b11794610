"""A model's vocabulary for llguidance, with the tokens that other spellings of JSON need."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

from localllm.frozen import frozen

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from localllm.text.tokenizer import Tokenizer

BYTES = 256  # tokens of one byte each, which are put behind a vocabulary
JSON_MARK = "<[JSON]>"  # in a grammar: the token before JSON, which no answer contains
_SPELLED = re.compile(rb"\\[u/]|\x7f|[0-9][eE]|(?<!\\)(?:\\\\)*\\$")  # what llguidance may not accept
_EXPONENT = re.compile(rb"[eE][+-]?[0-9]*(?![+\-.0-9A-Za-z_])")


@frozen
class SpellingVocabulary:
    """A vocabulary for llguidance, with a token for each byte behind it, and one that marks the beginning of JSON.

    Attributes:
        size: number of the tokens that an answer may contain.
        texts: their bytes; b"" for special tokens.
        spelled: tokens with a spelling that llguidance may not accept, outside of strings and if they begin in one.
        by_first: tokens by their first bytes.  exponents: tokens that may go on with a number by its exponent.
    """

    tokens: "LLTokenizer"
    size: int
    texts: list[bytes]
    spelled: tuple[list[int], list[int]]
    by_first: dict[int, list[int]]
    exponents: list[int]

    @property
    def mark(self) -> int:
        return self.size + BYTES

    def sliced(self, is_json: bool) -> "SpellingVocabulary":
        """Return the vocabulary with slices of tokens that are often allowed in JSON, or in any text."""
        from llguidance import LLTokenizer

        slices = LLTokenizer.json_slices() if is_json else LLTokenizer.general_slices()
        return replace(self, tokens=self.tokens.with_slices(slices))

    def ids(self, data: bytes) -> list[int]:
        """Return the tokens of single bytes for a text."""
        return [self.size + byte for byte in data]


def convert_vocabulary(tokenizer: "Tokenizer", size: int) -> SpellingVocabulary:
    """Convert a vocabulary, of `size` tokens with padding, for llguidance; it has no reference to the tokenizer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped, ends = _Wrapped(tokenizer, size), sorted(tokenizer.end_ids)
    wrapper, count, texts = TokenizerWrapper(wrapped), len(wrapped.tokens), wrapped.texts
    tokens = LLTokenizer(wrapper, n_vocab=count, eos_token=ends, slices=[])
    by_first: dict[int, list[int]] = {}
    for token, text in enumerate(texts):
        if text:
            by_first.setdefault(text[0], []).append(token)
    spelled: tuple[list[int], list[int]] = [], []
    for token, text in enumerate(texts):
        quotes_before = ((match, text.count(b'"', 0, match.start())) for match in _SPELLED.finditer(text))
        for begins_inside in {(match[0][:1] in b"\\\x7f") ^ quotes % 2 for match, quotes in quotes_before}:
            spelled[begins_inside].append(token)
    exponents = [token for byte in b"eE" for token in by_first.get(byte, ()) if _EXPONENT.match(texts[token])]
    return SpellingVocabulary(tokens, len(texts), texts, spelled, by_first, exponents)


class _Wrapped:
    """A tokenizer with the interface that llguidance's TokenizerWrapper needs, and the tokens of SpellingVocabulary.

    Texts of special tokens get a prefix, so that plain text never equals one.
    """

    def __init__(self, tokenizer: "Tokenizer", size: int):
        self.eos_token_id, self.bos_token_id = min(tokenizer.end_ids), tokenizer.bos_id
        special = tokenizer.mark_ids
        self.special_token_ids = [*sorted(special), size + BYTES]
        padding = [b""] * (size - tokenizer.vocab_size)
        self.texts = [
            b"" if token in special else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
        ] + padding
        self.tokens = [*self.texts, *(bytes([byte]) for byte in range(BYTES)), b"\xffJSON"]
        for token in special:
            self.tokens[token] = b"\xff" + tokenizer.pieces[token].encode(errors="replace")
        self._tokenizer = ref(tokenizer)  # llguidance's references are invisible to the garbage collector

    def __call__(self, text: bytes | str) -> list[int]:
        tokenizer = self._tokenizer()
        assert tokenizer
        return tokenizer.encode_inside(text.decode(errors="replace") if isinstance(text, bytes) else text)
