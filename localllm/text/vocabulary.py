"""The vocabulary of a GGUF file: its pieces, what kind each is, and the ids that mean something, all of it checked.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Where a file is silent, llama.cpp's defaults
hold, except that a byte-level vocabulary without a BOS or EOS id has none (llama.cpp takes id 11, a comma in most).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.text.pretokenizers import PRETOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_PREFIX = "tokenizer.ggml."
_UNSUPPORTED = {
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "DNA k-mer",
    "whitespace": "whitespace",
}
# Texts that end an answer whatever the metadata says. </s> only as a special token: it is HTML too, and Qwen has it so.
_END_TEXTS = [
    *["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|eom_id|>"],
    *["<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"],
    *["</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "< EOT >", "[EOT]", "<turn|>", "<|tool_response>", "[e~["],
]
# The marks of fill-in-the-middle training: those that end an answer, unless the metadata has their ids, and the others.
_FILL_END_TEXTS = {
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
_FILL_TEXTS = [
    *["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"],
    *["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"],
    *["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"],
    *["<|prefix|>", "<|suffix|>", "<|middle|>"],
]
# gpt-oss marks the parts of its answers with these: hidden, the parts would run together.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens. Ids are positions in `pieces`."""

    model: str  # "gpt2" (byte-level BPE), "llama" (SentencePiece) or "gemma4" (BPE over SentencePiece's characters)
    pretokenizer: PreTokenizer | None  # None for "llama", which has no words
    pieces: list[str]
    ids: dict[str, int]
    types: list[int]
    ranks: dict[str, float]  # the order of merging, lowest first: by "left right" of a merge, or by the joined piece
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # SentencePiece puts a space before a text
    strips_after: frozenset[int]  # special tokens that swallow the white space behind them
    warning: str | None  # one line for the user, or None


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that the metadata describes; ModelError where it is missing, inconsistent or not supported."""
    model = metadata.get(_PREFIX + "model")
    if model in _UNSUPPORTED:
        raise ModelError(f"the model's tokenizer ({model}, {_UNSUPPORTED[model]}) is not supported")
    if model not in ("gpt2", "llama", "gemma4"):
        raise ModelError(f"{_PREFIX}model: expected gpt2, llama or gemma4, found {str(model)[:40]!r}")
    pieces = _pieces(metadata)
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    _check_unique(pieces, ids)
    types = _numbers(metadata, "token_type", len(pieces), NORMAL, kinds="iu").tolist()
    _check_bytes(pieces, types)
    pretokenizer, warning = _pretokenizer(metadata, model)
    special = {name: _special_id(metadata, name, len(pieces)) for name in ("bos", "eos", "unknown", "eot", "eom")}
    if model == "llama":
        ranks = dict(zip(pieces, (-_numbers(metadata, "scores", len(pieces), 0.0)).tolist(), strict=True))
        for name, token in (("bos", 1), ("eos", 2), ("unknown", 0)):
            if special[name] is None and f"{_PREFIX}{name}_token_id" not in metadata and token < len(pieces):
                special[name] = token
    else:
        ranks = _merge_ranks(metadata)
    ends = _settle_types(metadata, ids, types)
    ends |= {end for name in ("eos", "eot", "eom") if (end := special[name]) is not None}
    return Vocabulary(
        model=model,
        pretokenizer=pretokenizer,
        pieces=pieces,
        ids=ids,
        types=types,
        ranks=ranks,
        bos_id=special["bos"],
        eos_id=special["eos"],
        unknown_id=special["unknown"],
        end_ids=frozenset(_without_exceptions(ends, ids, types)),
        adds_bos=_adds(metadata, "bos", special["bos"], pretokenizer is None or pretokenizer.adds_bos),
        adds_eos=_adds(metadata, "eos", special["eos"], False),
        adds_space=pretokenizer is None and bool(metadata.get(_PREFIX + "add_space_prefix", True)),
        strips_after=_strips_after(metadata, ids, types),
        warning=warning,
    )


def _pieces(metadata: Mapping[str, Any]) -> list[str]:
    """The text of every token; an empty one, which no text can contain, gets a name."""
    pieces = metadata.get(_PREFIX + "tokens")
    if not isinstance(pieces, list) or not pieces or not isinstance(pieces[0], str):
        raise ModelError(f"{_PREFIX}tokens: expected an array of strings, found {type(pieces).__name__}")
    return [piece or f"[EMPTY_{token}]" for token, piece in enumerate(pieces)] if "" in pieces else pieces


def _check_unique(pieces: list[str], ids: dict[str, int]) -> None:
    if len(ids) != len(pieces):
        token = next(token for token, piece in enumerate(pieces) if ids[piece] != token)
        piece = pieces[token]
        raise ModelError(f"{_PREFIX}tokens: token {token} and token {ids[piece]} are both {piece[:40]!r}")


def _check_bytes(pieces: list[str], types: list[int]) -> None:
    for token in [token for token, kind in enumerate(types) if kind == BYTE]:
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", pieces[token]):
            found = repr(pieces[token][:40])
            raise ModelError(f"{_PREFIX}tokens: token {token}: expected a byte such as <0x0A>, found {found}")


def _numbers(metadata: Mapping[str, Any], name: str, count: int, default: float, kinds: str = "iuf") -> np.ndarray:
    """An array with one number for every token, [count], of these NumPy kinds; `default` when the file has none."""
    if (values := metadata.get(_PREFIX + name)) is None:
        return np.full(count, default)
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise ModelError(f"{_PREFIX}{name}: expected an array of numbers")
    if len(values) != count:
        raise ModelError(f"{_PREFIX}{name}: expected {count} numbers, one for every token, found {len(values)}")
    if np.isnan(values).any():
        raise ModelError(f"{_PREFIX}{name}: expected numbers, found NaN for token {int(np.isnan(values).argmax())}")
    return values


def _merge_ranks(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The rank of each "left right" pair: its position in the file, the first one for a pair that comes twice."""
    merges = metadata.get(_PREFIX + "merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges[:1]):
        raise ModelError(f"{_PREFIX}merges: expected an array of strings, found {type(merges).__name__}")
    if not all([" " in merge for merge in merges]):
        position, merge = next((i, merge) for i, merge in enumerate(merges) if " " not in merge)
        raise ModelError(f"{_PREFIX}merges: entry {position}: expected two pieces with a space, found {merge[:40]!r}")
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))


def _pretokenizer(metadata: Mapping[str, Any], model: str) -> tuple[PreTokenizer | None, str | None]:
    """The pre-tokenizer of a BPE vocabulary, and a warning when the file names none that is known."""
    if model == "llama":
        return None, None
    name = "gemma4" if model == "gemma4" else metadata.get(_PREFIX + "pre")
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name], None
    found = f"unknown ({str(name)[:40]!r})" if name else "missing"
    return PRETOKENIZERS["default"], f"the model's pre-tokenizer is {found}: using the default one, answers may suffer"


def _special_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """The id of a special token; None when the file gives none (some write -1 for that)."""
    key = f"{_PREFIX}{name}_token_id"
    token = metadata.get(key)
    if token is None or token in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < count:
        raise ModelError(f"{key}: expected an id below {count}, found {str(token)[:40]}")
    return token


def _adds(metadata: Mapping[str, Any], name: str, token: int | None, default: bool) -> bool:
    """Whether the file asks for a BOS (or EOS) token. Gemma 4 files say no by mistake, and llama.cpp overrules them."""
    key = f"{_PREFIX}add_{name}_token"
    gemma4 = name == "bos" and metadata.get(_PREFIX + "model") == "gemma4"
    wanted = gemma4 or bool(metadata.get(key, default))
    if wanted and token is None and metadata.get(key):
        raise ModelError(f"{key} is true, but {_PREFIX}{name}_token_id is not set")
    return wanted and token is not None


def _settle_types(metadata: Mapping[str, Any], ids: dict[str, int], types: list[int]) -> set[int]:
    """Correct the types of tokens with well-known texts, in place; the ids of those that end an answer."""
    ends = {ids[text] for text in _END_TEXTS if text in ids and (text != "</s>" or types[ids[text]] != NORMAL)}
    for name, texts in _FILL_END_TEXTS.items():
        named = _special_id(metadata, name, len(ids))
        ends |= {ids[text] for text in texts if text in ids} if named is None else {named}
    for token in ends | {ids[text] for text in _FILL_TEXTS if text in ids}:
        types[token] = CONTROL
    for text in _SHOWN_TEXTS:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    return ends


def _without_exceptions(ends: set[int], ids: dict[str, int], types: list[int]) -> set[int]:
    """Take back two ends: gpt-oss and Solar close a part of an answer with <|end|>, Gemma 4's </s> is plain text."""
    ending = {text for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>") if text in ids}
    if ending & {"<|call|>", "<|calls|>"} and ending & {"<|return|>", "<|flush|>"} and ids.get("<|end|>") in ends:
        types[ids["<|end|>"]] = USER_DEFINED
        ends = ends - {ids["<|end|>"]}
    if "<|tool_response>" in ending and ids.get("</s>") in ends:
        types[ids["</s>"]] = NORMAL
        ends = ends - {ids["</s>"]}
    return ends


def _strips_after(metadata: Mapping[str, Any], ids: dict[str, int], types: list[int]) -> frozenset[int]:
    """Phi-3's special tokens swallow the white space behind them. GGUF does not say so: llama.cpp goes by the name."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = {token for token, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    return frozenset(special - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")})
