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
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "DNA k-mer",
    "whitespace": "whitespace",
}
# The vocabularies that are supported, with the ids that special tokens have where the file is silent.
_DEFAULTS = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
    "gemma4": {},
}
# Texts that end an answer whatever the metadata says. </s> only as a special token: it is HTML too, and Qwen has it so.
_END_TEXTS = [
    *["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|eom_id|>"],
    *["<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"],
    *["</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "<|tool_response>", "[e~["],
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
# Their <mask> swallows the white space in front of it.
_STRIPPING_PRE, _STRIPPING_ARCH = ("jina-v2-de", "jina-v2-es", "jina-v2-code"), ("nomic-bert-moe", "jina-bert-v3")


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens. Ids are positions in `pieces`."""

    model: str  # "gpt2": byte-level BPE, "llama": SentencePiece's, "t5": its unigram model, "gemma4": BPE with "▁"
    pretokenizer: PreTokenizer | None  # None for "llama" and "t5", which have no words
    pieces: list[str]
    ids: dict[str, int]  # of the tokens that plain text can become: no control tokens
    types: list[int]
    ranks: dict[str, float]  # the order of merging, lowest first: by "left right" of a merge, or -score by the piece
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # SentencePiece puts a space before a text
    merges_spaces: bool  # and makes one out of several, in unigram models
    charsmap: bytes  # its normalization there: see charsmap.py
    strips_before: frozenset[int]  # special tokens that swallow the white space in front of them
    strips_after: frozenset[int]  # special tokens that swallow the white space behind them
    warning: str | None  # one line for the user, or None


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that the metadata describes; ModelError where it is missing, inconsistent or not supported."""
    model = metadata.get(_PREFIX + "model")
    if isinstance(model, str) and model in _UNSUPPORTED:
        raise ModelError(f"the model's tokenizer ({model}, {_UNSUPPORTED[model]}) is not supported")
    if not isinstance(model, str) or model not in _DEFAULTS:
        raise ModelError(f"{_PREFIX}model: expected gpt2, llama, t5 or gemma4, found {str(model)[:40]!r}")
    pieces = _pieces(metadata)
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    _check_unique(pieces, ids)
    types = _numbers(metadata, "token_type", len(pieces), NORMAL, kinds="iu").tolist()
    _check_bytes(pieces, types)
    pretokenizer, warning = _pretokenizer(metadata, model)
    special = _special_ids(metadata, model, len(pieces))
    if pretokenizer is not None:
        ranks = _merge_ranks(metadata, pretokenizer.needs_merges)
    else:
        ranks = dict(zip(pieces, (-_numbers(metadata, "scores", len(pieces), 0.0)).tolist(), strict=True))
    ends = _settle_types(metadata, ids, types)
    ends |= {end for name in ("eos", "eot", "eom") if (end := special[name]) is not None}
    ends = _without_exceptions(ends, ids, types)
    before, after = _stripping(metadata, ids, types)
    for token in of_kinds(types, CONTROL, UNKNOWN):
        del ids[pieces[token]]
        if pretokenizer is None:
            del ranks[pieces[token]]
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
        end_ids=frozenset(ends),
        adds_bos=_adds_bos(metadata, special["bos"], pretokenizer),
        adds_eos=_adds(metadata, "eos", special["eos"], model == "t5"),
        adds_space=pretokenizer is None and _flag(metadata, "add_space_prefix", model == "llama"),
        merges_spaces=model == "t5" and _flag(metadata, "remove_extra_whitespaces", False),
        charsmap=_charsmap(metadata) if model == "t5" else b"",
        strips_before=before,
        strips_after=after,
        warning=warning,
    )


def of_kinds(types: list[int], *kinds: int) -> list[int]:
    """The tokens of these types. Of 128256 it takes 3 ms to find them so, and 10 to look at one after the other."""
    return np.flatnonzero(np.isin(types, kinds)).tolist()


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


def _merge_ranks(metadata: Mapping[str, Any], needed: bool) -> dict[str, float]:
    """The rank of each "left right" pair: its position in the file, the first one for a pair that comes twice."""
    merges = metadata.get(_PREFIX + "merges", None if needed else [])
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges[:1]):
        raise ModelError(f"{_PREFIX}merges: expected an array of strings, found {type(merges).__name__}")
    if not all([" " in merge for merge in merges]):
        position, merge = next((i, merge) for i, merge in enumerate(merges) if " " not in merge)
        raise ModelError(f"{_PREFIX}merges: entry {position}: expected two pieces with a space, found {merge[:40]!r}")
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))


def _pretokenizer(metadata: Mapping[str, Any], model: str) -> tuple[PreTokenizer | None, str | None]:
    """The pre-tokenizer of a BPE vocabulary, and a warning when the file names none that is known."""
    if model in ("llama", "t5"):
        return None, None
    name = "gemma4" if model == "gemma4" else metadata.get(_PREFIX + "pre")
    if isinstance(name, str) and name in PRETOKENIZERS:
        return PRETOKENIZERS[name], None
    found = f"unknown ({str(name)[:40]!r})" if name else "missing"
    return PRETOKENIZERS["default"], f"the model's pre-tokenizer is {found}: using the default one, answers may suffer"


def _special_ids(metadata: Mapping[str, Any], model: str, count: int) -> dict[str, int | None]:
    """The ids that the file gives, or that are usual where it is silent."""
    special = {name: _special_id(metadata, name, count) for name in ("bos", "eos", "unknown", "eot", "eom")}
    usual = {name: token for name, token in _DEFAULTS[model].items() if token < count}
    return special | {name: token for name, token in usual.items() if f"{_PREFIX}{name}_token_id" not in metadata}


def _special_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """The id of a special token; None when the file gives none (some write -1 for that)."""
    key = f"{_PREFIX}{name}_token_id"
    token = metadata.get(key)
    if token is None or (isinstance(token, int) and token in (-1, 0xFFFFFFFF)):
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < count:
        raise ModelError(f"{key}: expected an id below {count}, found {str(token)[:40]}")
    return token


def _adds_bos(metadata: Mapping[str, Any], token: int | None, pretokenizer: PreTokenizer | None) -> bool:
    """Whether a BOS token comes first. Gemma 4's files say no by mistake, and llama.cpp overrules them."""
    if pretokenizer is None:
        return _adds(metadata, "bos", token, metadata.get(_PREFIX + "model") == "llama")
    return _adds(metadata, "bos", token, pretokenizer.adds_bos) or (pretokenizer.joins_lines and token is not None)


def _adds(metadata: Mapping[str, Any], name: str, token: int | None, default: bool) -> bool:
    """Whether the file asks for a BOS (or EOS) token."""
    key = f"add_{name}_token"
    wanted = _flag(metadata, key, default)
    if wanted and token is None and _PREFIX + key in metadata:
        raise ModelError(f"{_PREFIX}{key} is true, but {_PREFIX}{name}_token_id is not set")
    return wanted and token is not None


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, int):
        raise ModelError(f"{_PREFIX}{name}: expected true or false, found {str(value)[:40]!r}")
    return bool(value)


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    """The bytes of the precompiled charsmap; none where the file has none."""
    data = np.asarray(metadata.get(_PREFIX + "precompiled_charsmap", []))
    if data.size and (data.ndim != 1 or data.dtype.kind not in "iu" or data.dtype.itemsize != 1):
        raise ModelError(f"{_PREFIX}precompiled_charsmap: expected an array of bytes")
    return data.tobytes() if data.size else b""


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


def _stripping(
    metadata: Mapping[str, Any], ids: dict[str, int], types: list[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The special tokens that swallow the white space in front of them, and those that swallow it behind them.

    GGUF does not say so: llama.cpp goes by the model's name, its pre-tokenizer and its architecture.
    """
    name, pre = str(metadata.get("general.name", "")).lower(), str(metadata.get(_PREFIX + "pre", ""))
    architecture = str(metadata.get("general.architecture", ""))
    none: frozenset[int] = frozenset()
    special = UNKNOWN, CONTROL, USER_DEFINED
    if any(known in pre for known in _STRIPPING_PRE) or any(known in architecture for known in _STRIPPING_ARCH):
        return frozenset(token for token in of_kinds(types, *special) if token == ids.get("<mask>")), none
    if "phi-3" in name or "phi3" in name:
        others = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return none, frozenset(of_kinds(types, *special)) - others
    if "modern-bert" in name:
        return frozenset(token for token in of_kinds(types, *special) if token == ids.get("[MASK]")), none
    return none, none
