"""Read the tokens of a checkpoint (strings, types, scores, merges) from tokenizer.json or tokenizer.model."""

import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from localllm.convert.files import read_bytes, read_json, report_as_model_error
from localllm.convert.sentencepiece import BPE, read_sentencepiece
from localllm.convert.tokenizer_json import (
    WIDELY_KNOWN,
    TokenizerJson,
    TokenizerStep,
    find_pretokenizer,
    list_normalizers,
    list_pretokenizers,
)
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.text.longest_match import MAX_WORD
from localllm.text.subwords import merge_symbols
from localllm.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

# Gemma 4's markers of reasoning, tool calls and strings in tool calls.
VISIBLE_MARKERS = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0  # lower than the score of any merged piece
# Texts that are special tokens even if a checkpoint does not mark them.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d*>|<pad>|<mask>", re.DOTALL)


@dataclass
class VocabularyBuilder:
    """A vocabulary that is filled token by token; ids that stay empty are placeholders."""

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
        """Set the token with this id. Raises ValueError for an id out of range or already set."""
        if not isinstance(token, int) or not isinstance(piece, str) or token < 0:
            raise ValueError(f"token {printable(repr(piece))} has the id {token}")
        if token >= self.size:
            self.left_out[token] = piece
        else:
            self.pieces[token], self.types[token], self.scores[token] = piece, kind, score

    def add(self, token: int, text: str, special: bool) -> None:
        """Set an added token, which is matched before texts are split.

        special: marked as special in the file. An id beyond the embedding is recorded in `left_out`.
        """
        if 0 <= token < self.size and self.types[token] == UNKNOWN:
            self.put(token, text, UNKNOWN, ADDED_SCORE)
        elif special or _LOOKS_SPECIAL.fullmatch(text):
            self.put(token, text, CONTROL, ADDED_SCORE)
        else:
            self.put(token, text.replace("▁", " ") if self.model == "llama" else text, USER_DEFINED, ADDED_SCORE)


def read_tokens(folder: Path, content: TokenizerJson | None, size: int, of_gemma4: bool = False) -> VocabularyBuilder:
    """Read the tokens of a checkpoint. Raises ModelError.

    content: its tokenizer.json, or None. size: rows of the embedding. of_gemma4: GGUF's readers merge in the listed
    order, not by scores.
    """
    path = folder / "tokenizer.json"
    sentencepiece = folder / "tokenizer.model"
    if content is None:
        if not sentencepiece.is_file():
            raise ModelError(f"{folder}: the folder must have a tokenizer.json or a tokenizer.model")
        tokens = read_sentencepiece_file(sentencepiece, size)
        add_slow_tokens(folder, tokens)
        return tokens
    with report_as_model_error(path):
        model = content["model"]
        kind = model.get("type", "BPE")
        if kind not in ("BPE", "WordPiece", "Unigram"):
            shown = printable(str(kind))
            raise ModelError(f"{path}: the type of the tokenizer must be BPE, WordPiece or Unigram (found {shown})")
        if kind != "BPE":
            tokens = read_wordpiece(path, content, size) if kind == "WordPiece" else read_unigram(path, content, size)
        elif any(part.get("type") == "ByteLevel" for part in list_pretokenizers(content.get("pre_tokenizer"))):
            tokens = read_byte_level(path, content, size)
        elif not model.get("byte_fallback"):
            raise ModelError(f"{path}: BPE must be byte-level, or SentencePiece's")
        elif of_gemma4:
            tokens = read_listed_merges(path, content, size)
        elif sentencepiece.is_file():
            tokens = read_sentencepiece_file(sentencepiece, size)
        else:
            tokens = read_scored_merges(path, content, size)
        for added in content.get("added_tokens") or () if kind == "BPE" else ():
            tokens.add(added["id"], added["content"], added.get("special") is True)
        if tokens.model == "gemma4":
            tokens.adds_space = False
            make_markers_visible(tokens)
        if tokens.model == "llama":
            tokens.adds_space = has_space_prefix(content)
    return tokens


def read_byte_level(path: Path, content: TokenizerJson, size: int) -> VocabularyBuilder:
    """Read byte-level BPE, whose merges are listed in the file. Raises ModelError."""
    refuse_normalizer(path, content, {"NFC"})
    pre = name_pretokenizer(path, content)
    pairs = parse_merges(content)
    if any(" " in left + right for left, right in pairs):
        raise ModelError(f"{path}: merges must not contain tokens with spaces")
    tokens = VocabularyBuilder(size, "gpt2", pre, merges=[f"{left} {right}" for left, right in pairs])
    tokens.composes = bool(list_normalizers(content.get("normalizer")))
    for piece, token in content["model"]["vocab"].items():
        tokens.put(token, piece, NORMAL)
    return tokens


def name_pretokenizer(path: Path, content: TokenizerJson) -> str:
    """Return tokenizer.ggml.pre, which also implies `ignore_merges`. Raises ModelError."""
    ignores = content["model"].get("ignore_merges") is True
    try:
        name = find_pretokenizer(content["pre_tokenizer"], ignores)
        return WIDELY_KNOWN[name] if name in WIDELY_KNOWN and can_merge_all(content) else name
    except ModelError as error:
        if not can_merge_all(content):
            raise ModelError(f"{path}: {error}") from None
    try:
        return find_pretokenizer(content["pre_tokenizer"], not ignores)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def can_merge_all(content: TokenizerJson) -> bool:
    """Return whether the merges can produce every token, so that `ignore_merges` makes no difference."""
    added = {token["content"] for token in content.get("added_tokens") or ()}
    ranks = {f"{left} {right}": float(rank) for rank, (left, right) in reversed([*enumerate(parse_merges(content))])}
    return all(
        merge_symbols(list(piece), ranks, " ") == [piece] for piece in content["model"]["vocab"] if piece not in added
    )


def read_sentencepiece_file(path: Path, size: int) -> VocabularyBuilder:
    """Read a SentencePiece vocabulary from tokenizer.model. Raises ModelError."""
    try:
        model = read_sentencepiece(read_bytes(path) or b"")
    except ValueError as error:
        raise ModelError(f"{path}: {printable(str(error))}") from None
    if model.kind != BPE:
        problem = f"the type of the SentencePiece model must be {BPE}, BPE (found {model.kind})"
        raise ModelError(f"{path}: {problem}")
    tokens = VocabularyBuilder(size, "llama", "default", adds_space=model.adds_space)
    if model.normalizes:
        tokens.warnings.append(f"{path.name} normalizes text (like NFKC), which is ignored")
    for token, (piece, kind, score) in enumerate(zip(model.pieces, model.types, model.scores, strict=True)):
        tokens.put(token, piece, kind, score)
    return tokens


def read_scored_merges(path: Path, content: TokenizerJson, size: int) -> VocabularyBuilder:
    """Read a SentencePiece vocabulary from tokenizer.json, with scores that decrease in the order of the merges."""
    refuse_normalizer(path, content, {"Prepend", "Replace"})
    refuse_splits(path, content)
    vocabulary, unknown = content["model"]["vocab"], content["model"].get("unk_token")
    added = {token["content"] for token in content.get("added_tokens") or ()}
    plain = {piece for piece in vocabulary if piece not in added and not _BYTE.fullmatch(piece)}
    scores = score_merges(path, plain, parse_merges(content))
    tokens = VocabularyBuilder(size, "llama", "default")
    for piece, token in vocabulary.items():
        kind = UNKNOWN if piece == unknown else BYTE if _BYTE.fullmatch(piece) else NORMAL
        tokens.put(token, piece, kind, scores.get(piece, float(-len(scores))) if kind == NORMAL else 0.0)
    return tokens


def read_listed_merges(path: Path, content: TokenizerJson, size: int) -> VocabularyBuilder:
    """Read the vocabulary of Gemma 4, which keeps its list of merges. Raises ModelError."""
    refuse_normalizer(path, content, {"Replace"})
    refuse_splits(path, content)
    tokens = VocabularyBuilder(
        size, "gemma4", "gemma4", merges=[f"{left} {right}" for left, right in parse_merges(content)]
    )
    for piece, token in content["model"]["vocab"].items():
        tokens.put(token, piece, BYTE if _BYTE.fullmatch(piece) else NORMAL)
    return tokens


def make_markers_visible(tokens: VocabularyBuilder) -> None:
    """Change the control tokens that are needed to parse answers to user-defined ones, which are printed."""
    for token, piece in enumerate(tokens.pieces):
        if piece in VISIBLE_MARKERS:
            tokens.types[token] = USER_DEFINED


def refuse_splits(path: Path, content: TokenizerJson) -> None:
    """Raise ModelError if the pre-tokenizer splits texts into words that are tokenized separately.

    The GGUF tokenizers "llama" and "gemma4" merge across the whole text.
    """
    for part in list_pretokenizers(content.get("pre_tokenizer")):
        if not is_splitless(part, content):
            kind = printable(str(part.get("type")))
            raise ModelError(f"{path}: the pre-tokenizer must not split texts if BPE has byte_fallback (found {kind})")


def is_splitless(part: TokenizerStep, content: TokenizerJson) -> bool:
    """Return whether a step leaves every text whole.

    Gemma's step, for example, splits at spaces, but an earlier step has replaced them all.
    """
    if part.get("type") == "Split" and part.get("pattern") == {"String": " "}:
        return any(step.get("type") == "Replace" for step in list_normalizers(content.get("normalizer")))
    return part.get("type") == "Metaspace" and part.get("split") is False


def score_merges(path: Path, plain: set[str], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Score every token that a merge produces: 0, -1, -2, ... in the order of the merges.

    SentencePiece merges any two neighbours whose concatenation is a token, the one with the highest score first. Raises
    ModelError for merges that no such model has, because scores would split texts differently.
    """
    scores: dict[str, float] = {}
    for rank, group in enumerate(group_merges(pairs)):
        lengths = [(len(left), len(right)) for left, right in group]
        pieces = {left + right for left, right in group}
        if len(pieces) > 1 and lengths != sorted(lengths, reverse=True):  # Hugging Face's order among equal scores
            raise ModelError(f"{path}: the merges of {printable(min(pieces))} are not consecutive as SentencePiece's")
        scores |= dict.fromkeys(pieces, float(-rank))
    listed = set(pairs)
    for piece in plain:
        for split_at in range(1, len(piece)):
            pair = piece[:split_at], piece[split_at:]
            if pair not in listed and pair[0] in plain and pair[1] in plain:
                description = f"{printable(piece)} of {printable(' '.join(pair))}"
                raise ModelError(f"{path}: no merge produces {description}, as SentencePiece would")
    return scores


def group_merges(pairs: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group consecutive merges that produce the same token, or several interleaved tokens of one score."""
    last = {left + right: position for position, (left, right) in enumerate(pairs)}
    group: list[tuple[str, str]] = []
    end = -1
    for position, pair in enumerate(pairs):
        group.append(pair)
        end = max(end, last[pair[0] + pair[1]])
        if position == end:
            yield group
            group = []


def parse_merges(content: TokenizerJson) -> list[tuple[str, str]]:
    """Return the merges of a tokenizer.json, each stored as "left right" or as two strings."""
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def refuse_normalizer(path: Path, content: TokenizerJson, allowed: set[str]) -> None:
    """Raise ModelError for a normalizer step that GGUF cannot express."""
    for step in list_normalizers(content.get("normalizer")):
        kind = step.get("type")
        spaces = kind != "Replace" or (step.get("pattern"), step.get("content")) == ({"String": " "}, "▁")
        if kind not in allowed or not spaces or step.get("prepend", "▁") != "▁":
            accepted = ", ".join(sorted(allowed))
            raise ModelError(
                f"{path}: normalizer {printable(str(kind))} is not supported (accepted for spaces: {accepted})"
            )


def has_space_prefix(content: TokenizerJson) -> bool:
    """Return whether a SentencePiece tokenizer.json adds a space before a text."""
    metaspaces = [part for part in list_pretokenizers(content.get("pre_tokenizer")) if part.get("type") == "Metaspace"]
    is_prepended = any(part.get("prepend_scheme", "always") in ("always", "first") for part in metaspaces)
    return is_prepended or any(step["type"] == "Prepend" for step in list_normalizers(content.get("normalizer")))


def add_slow_tokens(folder: Path, tokens: VocabularyBuilder) -> None:
    """Add the tokens in added_tokens.json and tokenizer_config.json, for checkpoints without tokenizer.json."""
    path = folder / "added_tokens.json"
    with report_as_model_error(path):
        for text, token in (read_json(path) or {}).items():
            tokens.add(token, text, special=False)
    path = folder / "tokenizer_config.json"
    with report_as_model_error(path):
        for number, added in ((read_json(path) or {}).get("added_tokens_decoder") or {}).items():
            tokens.add(int(number), added["content"], added.get("special") is True)


def read_wordpiece(path: Path, content: TokenizerJson, size: int) -> VocabularyBuilder:
    """Read WordPiece: tokens that begin a word get the prefix "▁", others lose their "##". Raises ModelError."""
    model, (normalizer,) = content["model"], list_normalizers(content.get("normalizer")) or [TokenizerStep()]
    pretokenizers = [part["type"] for part in list_pretokenizers(content.get("pre_tokenizer"))]
    if normalizer.get("type") != "BertNormalizer" or pretokenizers != ["BertPreTokenizer"]:
        raise ModelError(f"{path}: WordPiece must have BERT's normalizer and pre-tokenizer")
    for name, usual in (("continuing_subword_prefix", "##"), ("max_input_chars_per_word", MAX_WORD)):
        if (value := model.get(name, usual)) != usual:
            raise ModelError(f"{path}: {name} must be {usual} (found {printable(str(value))})")
    if not (normalizer.get("clean_text", True) and normalizer.get("handle_chinese_chars", True)):
        raise ModelError(f"{path}: clean_text and handle_chinese_chars of the normalizer must be true")
    lowers, strips = normalizer.get("lowercase", True), normalizer.get("strip_accents")
    tokens = VocabularyBuilder(size, "bert", "bert-bge" if lowers else "default")
    if not lowers:
        tokens.more["normalizer.lowercase"] = False
    if strips is not None and strips is not lowers:
        tokens.more["normalizer.strip_accents"] = strips
    special = {added["content"] for added in content.get("added_tokens") or () if added.get("special")}
    for piece, token in model["vocab"].items():
        is_special = piece in special or piece == model.get("unk_token")
        spelled = piece if is_special else piece[2:] if piece.startswith("##") and piece != "##" else f"▁{piece}"
        tokens.put(token, spelled, CONTROL if is_special else NORMAL)
    return tokens


def read_unigram(path: Path, content: TokenizerJson, size: int) -> VocabularyBuilder:
    """Read a unigram model: tokens, scores and the normalizer's character map. Raises ModelError."""
    model, charsmap, merges_spaces = content["model"], b"", False
    vocabulary = cast("list[tuple[str, float]]", model["vocab"])  # of type Unigram, which read_tokens has checked
    for step in list_normalizers(content.get("normalizer")):
        if step["type"] == "Precompiled":
            charsmap = b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}:
            merges_spaces = True
        else:
            shown = printable(str(step), 80)
            raise ModelError(
                f"{path}: the normalizer must be Precompiled, or Replace of repeated spaces (found {shown})"
            )
    kinds = {part["type"]: part for part in list_pretokenizers(content.get("pre_tokenizer"))}
    if not kinds.keys() <= {"WhitespaceSplit", "Metaspace"} or "Metaspace" not in kinds:
        raise ModelError(f"{path}: the pre-tokenizer of a unigram model must be Metaspace")
    space = kinds["Metaspace"]
    adds = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never") != "never"
    tokens = VocabularyBuilder(size, "t5", "default", adds_space=adds)
    tokens.more["remove_extra_whitespaces"] = merges_spaces or "WhitespaceSplit" in kinds
    if charsmap:
        tokens.more["precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    for token, (piece, score) in enumerate(vocabulary):
        tokens.put(token, piece, UNKNOWN if token == model.get("unk_id") else NORMAL, float(score))
    for added in content.get("added_tokens") or ():
        if added["id"] != model.get("unk_id"):
            kind = CONTROL if added.get("special") else USER_DEFINED
            score = vocabulary[added["id"]][1] if added["id"] < len(vocabulary) else 0.0
            tokens.put(added["id"], added["content"], kind, float(score))
    return tokens
