"""A vocabulary under construction, and the types of the values in a tokenizer.json."""

import re
from dataclasses import dataclass, field
from typing import TypedDict

from localllm.files.gguf.header import printable
from localllm.text.token_types import CONTROL, UNKNOWN, UNUSED, USER_DEFINED

ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0  # lower than the score of any merged piece
# Texts that are special tokens even if a checkpoint does not mark them.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d*>|<pad>|<mask>", re.DOTALL)


class Step(TypedDict, total=False):
    """A normalizer or a pre-tokenizer; `type` decides which of the other keys it has."""

    type: str
    normalizers: list["Step"]
    pretokenizers: list["Step"]
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
    """The part of a tokenizer that adds special tokens around a text."""

    type: str
    processors: list["PostProcessor"]
    single: list[dict[str, dict[str, str]]]
    cls: tuple[str, int]
    sep: tuple[str, int]


class TokenizerModel(TypedDict, total=False):
    """The vocabulary and the settings of the algorithm that splits words."""

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
    """A token that is found in texts before they are split."""

    id: int
    content: str
    special: bool


class TokenizerJson(TypedDict, total=False):
    """The content of a tokenizer.json. It is untrusted: code that reads it runs in `report_as_model_error`."""

    model: TokenizerModel
    normalizer: Step | None
    pre_tokenizer: Step | None
    post_processor: PostProcessor | None
    added_tokens: list[AddedToken] | None


@dataclass
class Tokens:
    """A vocabulary of a fixed size under construction; ids without a token get a placeholder."""

    size: int
    model: str  # tokenizer.ggml.model: gpt2, llama, bert or t5
    pre: str  # tokenizer.ggml.pre
    merges: list[str] | None = None  # gpt2 only
    adds_space: bool | None = None  # llama and t5 only; None if the files do not specify it
    more: dict[str, object] = field(default_factory=dict)  # further keys after "tokenizer.ggml."
    pieces: list[str] = field(init=False)
    types: list[int] = field(init=False)
    scores: list[float] = field(init=False)
    left_out: dict[int, str] = field(default_factory=dict)  # texts of ids beyond the size
    composes: bool = False  # texts are normalized to NFC before they are split
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces = [f"[PAD{token}]" for token in range(self.size)]
        self.types, self.scores = [UNUSED] * self.size, [PADDING_SCORE] * self.size

    def put(self, token: int, piece: str, kind: int, score: float = 0.0) -> None:
        """Set a token. Raises ValueError."""
        if not isinstance(token, int) or not isinstance(piece, str) or token < 0:
            raise ValueError(f"token {printable(repr(piece))} has the id {token}")
        if token >= self.size:
            self.left_out[token] = piece
        else:
            self.pieces[token], self.types[token], self.scores[token] = piece, kind, score

    def add(self, token: int, text: str, special: bool) -> None:
        """Set an added token, which is found in texts before they are split."""
        if 0 <= token < self.size and self.types[token] == UNKNOWN:
            self.put(token, text, UNKNOWN, ADDED_SCORE)
        elif special or _LOOKS_SPECIAL.fullmatch(text):
            self.put(token, text, CONTROL, ADDED_SCORE)
        else:
            self.put(token, text.replace("▁", " ") if self.model == "llama" else text, USER_DEFINED, ADDED_SCORE)


def steps(normalizer: Step | None) -> list[Step]:
    """List the steps of a `normalizer`, however nested."""
    if not normalizer:
        return []
    if normalizer.get("type") == "Sequence":
        return [step for part in normalizer["normalizers"] for step in steps(part)]
    return [normalizer]
