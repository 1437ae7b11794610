"""The vocabulary of a GGUF file: its pieces, what kind each is, and the ids that mean something, all of it checked.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Where a file is silent, llama.cpp's defaults
hold, except that a byte-level vocabulary without a BOS or EOS id has none (llama.cpp takes id 11, a comma in most).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from localllm.errors import ModelError, UnsupportedError
from localllm.files.checked import Checked, is_whole, show
from localllm.files.gguf_header import Metadata
from localllm.files.known import is_known, remember
from localllm.files.strings import StringPlaces, Strings
from localllm.frozen import frozen
from localllm.text.pretokenizers import PRETOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_PREFIX, _ID = "tokenizer.ggml.", "_token_id"
_UNSUPPORTED = {
    "hybriddna": "DNA k-mer",
    "whitespace": "whitespace",
}
# The vocabularies that are supported, with the ids that special tokens have where the file is silent.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
    "gemma4": {},
    "rwkv": {},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "eos": 102, "unknown": 100},
}
_SCORED = ("llama", "t5", "plamo2")  # the models whose pieces have scores
_WITHOUT_WORDS = (*_SCORED, "rwkv", "bert")  # which need no pre-tokenizer
_NAMED = {"bert": {"bos": "cls", "eos": "seperator"}}  # as files spell it
_FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
          "escape_whitespaces", "add_prefix_space", "clean_spaces", "normalizer.lowercase",
          "normalizer.strip_accents")  # fmt: skip
# The bytes that every byte-level vocabulary has, as it writes them; of others, some lack those that no text has.
_USUAL_BYTES = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # of a kind of vocabulary, or a pre-tokenizer
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
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
MARK_TEXTS = (*_SHOWN_TEXTS, "<|end|>")  # whether they are shown or not
# Their <mask> swallows the white space in front of it.
_STRIPPING_PRE, _STRIPPING_ARCH = ("jina-v2-de", "jina-v2-es", "jina-v2-code"), ("nomic-bert-moe", "jina-bert-v3")


@frozen
class Vocabulary:
    """What a file says about its tokens. Ids are positions in `pieces`."""

    model: (
        str  # "gpt2": byte-level BPE, "llama": SentencePiece's, "t5": its unigram model, "gemma4": BPE with "▁", others
    )
    pretokenizer: PreTokenizer | None  # None for those that have no words
    pieces: Sequence[str]
    ids: Mapping[str, int]  # of the tokens that plain text can become: no control tokens
    types: bytearray
    ranks: Mapping[str, float]  # the order of merging, lowest first: by "left right" of a merge, or -score by the piece
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # SentencePiece puts a space before a text
    merges_spaces: bool  # and makes one out of several, in unigram models
    charsmap: bytes  # its normalization there: see charsmap.py
    lowers: bool  # letters become small, in WordPiece
    strips_accents: bool  # and accents go
    strips_before: frozenset[int]  # special tokens that swallow the white space in front of them
    strips_after: frozenset[int]  # special tokens that swallow the white space behind them
    warning: str | None  # one line for the user, or None


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that the metadata describes; ModelError where it is missing, inconsistent or not supported."""
    keys = Checked(metadata, _PREFIX)
    model = _model(keys)
    kept = _kept(keys, "tokens")
    pieces = kept or _pieces(keys)
    ids = StringPlaces(kept) if kept else dict(zip(pieces, range(len(pieces)), strict=True))
    _check_unique(pieces, ids)
    types = _types(keys, len(pieces))
    _check_flags_and_ids(keys, len(pieces))
    pretokenizer, warning = _pretokenizer(keys, model)
    special = _special_ids(keys, model, len(pieces))
    if model == "bert" and special["unknown"] is None:
        raise ModelError(f"{_PREFIX}unknown_token_id should be set: words that are no pieces would vanish")
    _check_bytes(pieces, types)
    _check_all_bytes(ids, model, pretokenizer, special["unknown"])
    scores = _scores(keys, len(pieces), needed=model in _SCORED)
    ranks: dict[str, float] | StringPlaces
    if model == "bert":
        ranks = {}
        _keep(metadata, kept, "tokens")
    elif pretokenizer is None:
        ranks = dict(zip(pieces, (-scores).tolist(), strict=True))
    else:
        merges = _kept(keys, "merges")
        ranks = StringPlaces(merges) if merges else _merge_ranks(keys, ids, pretokenizer.needs_merges)
        if not pretokenizer.marks_spaces:
            _keep(metadata, kept, "tokens", "merges")
    ends = _settle_types(keys, ids, types)
    ends |= {end for name in ("eos", "eot", "eom") if (end := special[name]) is not None}
    ends = _without_exceptions(ends, ids, types)
    before, after = _stripping(metadata, ids, types)
    for token in of_kinds(types, CONTROL, UNKNOWN):
        del ids[pieces[token]]
        if pretokenizer is None and model != "bert":
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
        adds_bos=_adds_bos(keys, model, special["bos"], pretokenizer),
        adds_eos=_adds(keys, "eos", special["eos"], model in ("t5", "bert")),
        adds_space=pretokenizer is None and model != "bert" and keys.flag("add_space_prefix", model == "llama"),
        merges_spaces=model == "t5" and keys.flag("remove_extra_whitespaces", False),
        charsmap=_charsmap(keys) if model == "t5" else b"",
        lowers=keys.flag("normalizer.lowercase", True),
        strips_accents=keys.flag("normalizer.strip_accents", keys.flag("normalizer.lowercase", True)),
        strips_before=before,
        strips_after=after,
        warning=warning,
    )


def _kept(keys: Checked, name: str) -> Strings | None:
    """An array of strings that was checked at an earlier start, which need not be made."""
    return keys.metadata.kept.get(_PREFIX + name) if isinstance(keys.metadata, Metadata) else None


def _keep(metadata: Mapping[str, Any], kept: Strings | None, *names: str) -> None:
    """Arrays of strings for later starts, unless they are kept already."""
    if isinstance(metadata, Metadata) and not kept:
        metadata.keep(*(_PREFIX + name for name in names))


def of_kinds(types: bytearray, *kinds: int) -> list[int]:
    """The tokens of these types. Of 128256 it takes 0.1 ms to find them so, and 10 to look at one after the other."""
    return np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()


def _model(keys: Checked) -> str:
    """The kind of the vocabulary."""
    model = keys.text("model")
    if not _NAME.fullmatch(model):
        raise keys.wrong("model", "a name")
    if model in _UNSUPPORTED:
        raise UnsupportedError(f"the model's tokenizer ({model}, {_UNSUPPORTED[model]}) is not supported")
    if model not in _DEFAULTS:
        raise UnsupportedError(f"{_PREFIX}model: expected {', '.join(_DEFAULTS)}, found {show(model)}")
    return model


def _pieces(keys: Checked) -> list[str]:
    """The text of every token; an empty one, which no text can contain, gets a name."""
    pieces = keys.strings("tokens")
    if not pieces:
        raise keys.wrong("tokens", "an array of strings")
    return [piece or f"[EMPTY_{token}]" for token, piece in enumerate(pieces)] if "" in pieces else pieces


def _check_unique(pieces: Sequence[str], ids: Mapping[str, int]) -> None:
    if len(ids) != len(pieces):
        token = next(token for token, piece in enumerate(pieces) if ids[piece] != token)
        piece = pieces[token]
        raise ModelError(f"{_PREFIX}tokens: token {token} and token {ids[piece]} are both {piece[:40]!r}")


def _types(keys: Checked, count: int) -> bytearray:
    """Of every token; without any, all are normal."""
    if not keys.has("token_type"):
        return bytearray([NORMAL]) * count
    types = _of_every_token(keys, "token_type", "iu", count)
    if not (types.min() >= NORMAL and types.max() <= BYTE):
        token = int(((types < NORMAL) | (types > BYTE)).argmax())
        raise ModelError(f"{keys.key('token_type')}: expected {NORMAL} to {BYTE}, found {types[token]} (token {token})")
    return bytearray(types.astype(np.uint8).tobytes())


def _scores(keys: Checked, count: int, needed: bool) -> np.ndarray:
    """Of every token, float [count]."""
    if not needed and not keys.has("scores"):
        return np.zeros(count)
    scores = _of_every_token(keys, "scores", "f", count)
    if not np.isfinite(scores).all():
        token = int((~np.isfinite(scores)).argmax())
        raise ModelError(f"{keys.key('scores')}: expected a finite number, found {scores[token]} (token {token})")
    return scores


def _of_every_token(keys: Checked, name: str, kinds: str, count: int) -> np.ndarray:
    """One number for each, [count], of these NumPy kinds."""
    values = keys.array(name, kinds, f"an array of {'scores' if kinds == 'f' else 'whole numbers'}")
    if len(values) != count:
        raise ModelError(f"{keys.key(name)}: expected {count} numbers, one for every token, found {len(values)}")
    return values


def _check_bytes(pieces: Sequence[str], types: bytearray) -> None:
    for token in of_kinds(types, BYTE):
        if not re.fullmatch("<0x[0-9A-F]{2}>", pieces[token]):
            found = repr(pieces[token][:40])
            raise ModelError(f"{_PREFIX}tokens: token {token}: expected a byte such as <0x0A>, found {found}")
    if NORMAL not in types:
        raise ModelError(f"{_PREFIX}token_type: no token is a normal one")


def _check_all_bytes(
    ids: Mapping[str, int], model: str, pretokenizer: PreTokenizer | None, unknown_id: int | None
) -> None:
    """Text must not vanish for want of a token: there are bytes, or an unknown token and few bytes or none."""
    is_byte_level = pretokenizer is not None and not pretokenizer.marks_spaces
    missing = [piece for piece in (_USUAL_BYTES if is_byte_level else _BYTE_PIECES) if piece not in ids]
    has_others = unknown_id is not None and len(missing) > len(_BYTE_PIECES) // 2
    if missing and not (model in ("t5", "rwkv", "bert") or (has_others and not is_byte_level)):
        raise ModelError(f"{_PREFIX}tokens: the byte {missing[0]} and {len(missing) - 1} more are missing")


def _check_flags_and_ids(keys: Checked, count: int) -> None:
    """Also of those that nothing here needs."""
    for name in _FLAGS:
        if keys.has(name):
            keys.flag(name)
    if keys.has("token_type_count"):
        keys.whole("token_type_count", None, 0, (1 << 31) - 1)
    for key in keys.metadata:
        if key.startswith(_PREFIX) and key.endswith(_ID):
            _special_id(keys, key[len(_PREFIX) : -len(_ID)], count)


def _merge_ranks(keys: Checked, ids: Mapping[str, int], needed: bool) -> dict[str, float]:
    """The rank of each "left right" pair: its position in the file, the first one for a pair that comes twice."""
    merges = keys.strings("merges") if needed or keys.has("merges") else []
    _check_merges(keys, merges, ids)
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))


def _check_merges(keys: Checked, merges: list[str], ids: Mapping[str, int]) -> None:
    """That all are of two tokens and make one; of 280k it takes 0.1 s, so it is remembered which were."""
    data, known = keys.metadata, ids.keys()
    mark = data.fingerprint(_PREFIX + "tokens", _PREFIX + "merges") if isinstance(data, Metadata) else None
    if mark and is_known("merges", mark):
        return
    # Sets and joined strings, because to look at one merge after the other takes four times as long.
    if merges and (
        not all([" " in merge for merge in merges])
        or " ".join(merges).count(" ") != 2 * len(merges) - 1
        or set(" ".join(merges).split(" ")) - known
        or set("\0".join(merges).replace(" ", "").split("\0")) - known
    ):
        _refuse_merges(merges, ids)
    if mark:
        remember("merges", mark)


def _refuse_merges(merges: Iterable[str], ids: Mapping[str, int]) -> None:
    """Raise ModelError for the first merge that is not of two tokens, or makes none."""
    for position, merge in enumerate(merges):
        parts = merge.split(" ")
        if len(parts) != 2 or "" in parts:
            problem = "expected two pieces with a space"
        elif unknown := [piece for piece in (*parts, "".join(parts)) if piece not in ids]:
            problem = f"{show(unknown[0])} is no token"
        else:
            continue
        raise ModelError(f"{_PREFIX}merges: entry {position}: {problem}, found {merge[:40]!r}")


def _pretokenizer(keys: Checked, model: str) -> tuple[PreTokenizer | None, str | None]:
    """The pre-tokenizer of a BPE vocabulary, and a warning when the file names none that is known."""
    name = keys.text("pre", "")
    if name and not _NAME.fullmatch(name):
        raise keys.wrong("pre", "a name")
    if model in _WITHOUT_WORDS:
        return None, None
    name = "gemma4" if model == "gemma4" else name
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name], None
    found = f"unknown ({name[:40]!r})" if name else "missing"
    return PRETOKENIZERS["default"], f"the model's pre-tokenizer is {found}: using the default one, answers may suffer"


def _special_ids(keys: Checked, model: str, count: int) -> dict[str, int | None]:
    """The ids that the file gives, or that are usual where it is silent."""
    names = {name: name for name in ("bos", "eos", "unknown", "eot", "eom")}
    names |= {name: other for name, other in _NAMED.get(model, {}).items() if not keys.has(name + _ID)}
    special = {name: _special_id(keys, other, count) for name, other in names.items()}
    usual = {name: token for name, token in _DEFAULTS[model].items() if token < count}
    return special | {name: token for name, token in usual.items() if not keys.has(names[name] + _ID)}


def _special_id(keys: Checked, name: str, count: int) -> int | None:
    """The id of a special token; None when the file gives none (some write -1 for that)."""
    token = keys.raw(name + _ID)
    if token is None or (is_whole(token) and token in (-1, 0xFFFFFFFF)):
        return None
    return keys.whole(name + _ID, None, 0, count - 1)


def _adds_bos(keys: Checked, model: str, token: int | None, pretokenizer: PreTokenizer | None) -> bool:
    """Whether a BOS token comes first. Gemma 4's files say no by mistake, and llama.cpp overrules them."""
    if pretokenizer is None:
        return _adds(keys, "bos", token, model in ("llama", "bert"))
    return _adds(keys, "bos", token, pretokenizer.adds_bos) or (pretokenizer.joins_lines and token is not None)


def _adds(keys: Checked, name: str, token: int | None, default: bool) -> bool:
    """Whether the file asks for a BOS (or EOS) token."""
    wanted = keys.flag(f"add_{name}_token", default)
    if wanted and token is None and keys.has(f"add_{name}_token"):
        raise ModelError(f"{_PREFIX}add_{name}_token is true, but {_PREFIX}{name}_token_id is not set")
    return wanted and token is not None


def _charsmap(keys: Checked) -> bytes:
    """The bytes of the precompiled charsmap; none where the file has none."""
    if not keys.has("precompiled_charsmap"):
        return b""
    data = keys.array("precompiled_charsmap", "iu", "an array of bytes")
    if data.dtype.itemsize != 1:
        raise keys.wrong("precompiled_charsmap", "an array of bytes")
    return data.tobytes()


def _settle_types(keys: Checked, ids: Mapping[str, int], types: bytearray) -> set[int]:
    """Correct the types of tokens with well-known texts, in place; the ids of those that end an answer."""
    ends = {ids[text] for text in _END_TEXTS if text in ids and (text != "</s>" or types[ids[text]] != NORMAL)}
    for name, texts in _FILL_END_TEXTS.items():
        named = _special_id(keys, name, len(ids))
        ends |= {ids[text] for text in texts if text in ids} if named is None else {named}
    for token in ends | {ids[text] for text in _FILL_TEXTS if text in ids}:
        types[token] = CONTROL
    for text in _SHOWN_TEXTS:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    return ends


def _without_exceptions(ends: set[int], ids: Mapping[str, int], types: bytearray) -> set[int]:
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
    metadata: Mapping[str, Any], ids: Mapping[str, int], types: bytearray
) -> tuple[frozenset[int], frozenset[int]]:
    """The special tokens that swallow the white space in front of them, and those that swallow it behind them.

    GGUF does not say so: llama.cpp goes by the model's name, its pre-tokenizer and its architecture.
    """
    general = Checked(metadata, "general.")
    name, architecture = general.text("name", "").lower(), general.text("architecture", "")
    pre = Checked(metadata, _PREFIX).text("pre", "")
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
