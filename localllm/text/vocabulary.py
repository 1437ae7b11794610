"""Read and validate the vocabulary of a GGUF file: token texts, token types, ids of special tokens.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Missing keys get llama.cpp's defaults, except
that a byte-level vocabulary without a BOS or EOS id has none (llama.cpp takes id 11, a comma in most).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from localllm.errors import ModelError, UnsupportedError
from localllm.files.cache.checksummed_cache import is_recorded, record_check
from localllm.files.gguf.metadata import Irregularities, MappedStrings, Metadata, StringIndex
from localllm.files.gguf.metadata_reader import MetadataReader, format_value, is_integer
from localllm.frozen import frozen
from localllm.text.pretokenize import PRETOKENIZERS, PreTokenizer

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
PREFIX, ID = "tokenizer.ggml.", "_token_id"
NO_ID = -1, 0xFFFFFFFF  # values that mean "no such token" in some files
DuplicateTokens = Mapping[str, Sequence[int]]  # texts shared by several tokens, with these tokens
# Of several tokens with the same text, encoding uses the type of lowest order, with which models were trained.
ORDER = {BYTE: 0, NORMAL: 1, USER_DEFINED: 1, UNUSED: 2, CONTROL: 3, UNKNOWN: 4}


def list_tokens_of_types(types: bytearray, *kinds: int) -> list[int]:
    """List the tokens of these types.

    This takes 0.1 ms for 128256 tokens; a loop over them takes 10 ms.
    """
    return np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()


def read_special_id(keys: MetadataReader, name: str, count: int) -> int | None:
    """Read the id of a special token; None if it is missing or beyond the vocabulary, which is noted in `oddities`."""
    token = keys.read_raw(name + ID)
    if token is None or (is_integer(token) and token in NO_ID):
        return None
    if has_invalid_id(keys, name, count):
        keys.oddities.note(
            f"{keys.format_key(name + ID)} is {token}, but there are only {count} tokens: ignored",
            keys.format_key(name + ID),
        )
        return None
    return keys.read_integer(name + ID, None, 0, count - 1)


def has_invalid_id(keys: MetadataReader, name: str, count: int) -> bool:
    """Return whether the file's id of a special token is beyond the vocabulary and therefore ignored."""
    token = keys.read_raw(name + ID)
    return is_integer(token) and token >= count and token not in NO_ID


def index_duplicates(
    pieces: Sequence[str], types: bytearray, oddities: Irregularities
) -> tuple[dict[str, int], DuplicateTokens]:
    """Map each text to one token, and each text that several tokens share to all of them.

    Of several tokens, the one whose type comes first in ORDER is chosen, and a note goes to `oddities`.
    """
    all_tokens: dict[str, list[int]] = {}
    for token, piece in enumerate(pieces):
        all_tokens.setdefault(piece, []).append(token)
    ids = {piece: min(tokens, key=lambda token: ORDER[types[token]]) for piece, tokens in all_tokens.items()}
    twins = {piece: tokens for piece, tokens in all_tokens.items() if len(tokens) > 1}
    piece, tokens = next(iter(twins.items()))
    more_texts = f", and {len(twins) - 1} more texts have several tokens" if len(twins) > 1 else ""
    oddities.note(
        f"tokens {tokens[0]} and {tokens[1]} are both {piece[:40]!r}, which is encoded as {ids[piece]}{more_texts}"
    )
    return ids, twins


def list_tokens_with_text(text: str, ids: Mapping[str, int], twins: DuplicateTokens) -> Sequence[int]:
    """List all tokens with this text, usually one or none."""
    return twins.get(text) or ([ids[text]] if text in ids else [])


# Texts that end an answer regardless of the metadata. </s> only as a special token: for Qwen it is HTML in plain text.
END_TEXTS = [
    *["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|eom_id|>"],
    *["<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"],
    *["</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "<|tool_response>", "[e~["],
]
# Fill-in-the-middle markers that end an answer (if the metadata has no ids), and those that do not.
FILL_END_TEXTS = {
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
FILL_TEXTS = {
    "fim_pre": ["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"],
    "fim_suf": ["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"],
    "fim_mid": ["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"],
}  # fmt: skip
INFILL_TEXTS = FILL_TEXTS | FILL_END_TEXTS
# gpt-oss separates the segments of its answers with these tokens, which stay visible to keep the segments apart.
SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
MARK_TEXTS = (*SHOWN_TEXTS, "<|end|>")  # all markers of gpt-oss, shown or not
# Pre-tokenizers and architectures whose <mask> token strips the white space before it.
_STRIPPING_PRE, _STRIPPING_ARCH = ("jina-v2-de", "jina-v2-es", "jina-v2-code"), ("nomic-bert-moe", "jina-bert-v3")

END_TEXTS_KEY = "localllm.end_texts"  # a key that localllm writes: texts of end tokens without an embedding row
MORE_ENDS = "eos_token_ids"  # a key of Ollama's: all tokens that end an answer


def read_end_texts(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """Return the strings that end an answer although no token has them (localllm's key)."""
    texts = metadata.get(END_TEXTS_KEY)
    return tuple(text for text in texts if isinstance(text, str) and text) if isinstance(texts, list) else ()


def read_extra_end_ids(keys: MetadataReader, count: int) -> set[int]:
    """Read the end tokens in Ollama's key; ids beyond the vocabulary are noted in `oddities`."""
    if not keys.has(MORE_ENDS):
        return set()
    ids_found = keys.read_array(MORE_ENDS, "iu", "an array of integers").tolist()
    if beyond := [token for token in ids_found if not 0 <= token < count]:
        keys.oddities.note(f"{keys.format_key(MORE_ENDS)} has {beyond[0]}, but there are only {count} tokens: ignored")
    return {token for token in ids_found if 0 <= token < count}


def correct_types(keys: MetadataReader, ids: Mapping[str, int], types: bytearray, twins: DuplicateTokens) -> set[int]:
    """Correct the types of tokens with well-known texts in place, and return those that end an answer."""
    end_ids = {token for text in END_TEXTS for token in list_tokens_with_text(text, ids, twins)}
    ends = {
        token for token in end_ids if token not in list_tokens_with_text("</s>", ids, twins) or types[token] != NORMAL
    }
    for name, texts in FILL_END_TEXTS.items():
        named = read_special_id(keys, name, len(types))
        by_text = {token for text in texts for token in list_tokens_with_text(text, ids, twins)}
        ends |= by_text if named is None else {named}
    fill_texts = [text for texts in FILL_TEXTS.values() for text in texts]
    for token in ends | {token for text in fill_texts for token in list_tokens_with_text(text, ids, twins)}:
        types[token] = CONTROL
    for text in SHOWN_TEXTS:
        for token in list_tokens_with_text(text, ids, twins):
            types[token] = USER_DEFINED
    return ends


def remove_exceptions(ends: set[int], ids: Mapping[str, int], types: bytearray) -> set[int]:
    """Return the end tokens without two that do not end an answer.

    <|end|> of gpt-oss and Solar closes only a segment of an answer, and Gemma 4's </s> is plain text.
    """
    ending = {text for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>") if text in ids}
    if ending & {"<|call|>", "<|calls|>"} and ending & {"<|return|>", "<|flush|>"} and ids.get("<|end|>") in ends:
        types[ids["<|end|>"]] = USER_DEFINED
        ends = ends - {ids["<|end|>"]}
    if "<|tool_response>" in ending and ids.get("</s>") in ends:
        types[ids["</s>"]] = NORMAL
        ends = ends - {ids["</s>"]}
    return ends


def find_stripping_tokens(
    metadata: Mapping[str, object], ids: Mapping[str, int], types: bytearray
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the special tokens that remove white space before them, and those that remove it after them.

    GGUF does not store this: llama.cpp derives it from the model's name, pre-tokenizer and architecture.
    """
    general = MetadataReader(metadata, "general.")
    name, architecture = str(general.read_raw("name", "")).lower(), general.read_text("architecture", "")
    pre = MetadataReader(metadata, PREFIX).read_text("pre", "")
    none: frozenset[int] = frozenset()
    special = UNKNOWN, CONTROL, USER_DEFINED
    if any(names in pre for names in _STRIPPING_PRE) or any(names in architecture for names in _STRIPPING_ARCH):
        return frozenset(token for token in list_tokens_of_types(types, *special) if token == ids.get("<mask>")), none
    if "phi-3" in name or "phi3" in name:
        exceptions = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return none, frozenset(list_tokens_of_types(types, *special)) - exceptions
    if "modern-bert" in name:
        return frozenset(token for token in list_tokens_of_types(types, *special) if token == ids.get("[MASK]")), none
    return none, none


OLDER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # in files from before 2024


class InfillTokens(NamedTuple):
    """The ids of fill-in-the-middle tokens.

    Attributes:
        prefix, suffix, middle: precede the sections of a prompt; the model continues after `middle`.
        repository, file: precede the names of a repository and of its files; None if the model has none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def read_infill_tokens(
    metadata: Mapping[str, object], find: Callable[[str], int | None], count: int
) -> InfillTokens | None:
    """Return the fill-in-the-middle tokens; None if prefix, suffix or middle is missing.

    find: returns the special token with a text, or None. count: size of the vocabulary.
    """
    keys = MetadataReader(metadata, PREFIX)

    def read(name: str) -> int | None:
        for key in filter(None, (name, OLDER_NAMES.get(name))):
            if (token := read_special_id(keys, key, count)) is not None:
                return token
        return next((token for text in INFILL_TEXTS[name] if (token := find(text)) is not None), None)

    prefix, suffix, middle = read("fim_pre"), read("fim_suf"), read("fim_mid")
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(prefix, suffix, middle, read("fim_rep"), read("fim_sep"))


_UNSUPPORTED = {"hybriddna": "DNA k-mer", "whitespace": "whitespace"}
# The supported vocabularies, with the default ids of special tokens.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
    "gemma4": {},
    "rwkv": {},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "eos": 102, "unknown": 100},
}
_SCORED = ("llama", "t5", "plamo2")  # the models whose tokens have scores
_WITHOUT_WORDS = (*_SCORED, "rwkv", "bert")  # models without a pre-tokenizer
_NAMED = {"bert": {"bos": "cls", "eos": "seperator"}}  # names of ids in keys; the misspelling is GGUF's
_FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
          "escape_whitespaces", "add_prefix_space", "clean_spaces", "normalizer.lowercase",
          "normalizer.strip_accents")  # fmt: skip
# The bytes that every byte-level vocabulary has, as characters; some vocabularies lack bytes that never occur in UTF-8.
_SPACES = {"Ġ": 0x20, "Ċ": 0x0A}  # byte-level BPE's characters for a space and a line break
_USUAL_BYTES = [chr(code) for code in range(0x21, 0x7F)] + [*_SPACES]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # of a tokenizer model or a pre-tokenizer
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@frozen
class Vocabulary:
    """The tokens of a file; ids are indices of `pieces`."""

    model: str  # "gpt2": byte-level BPE, "llama": SentencePiece BPE, "t5": unigram, "gemma4": BPE with "▁", ...
    pretokenizer: PreTokenizer | None  # None for models without one
    pieces: Sequence[str]
    ids: Mapping[str, int]  # by text; only tokens that encoding plain text can yield, no control tokens
    types: bytearray
    ranks: Mapping[str, float]  # of merges, lowest first, by "left right"; -score by token text for models with scores
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # SentencePiece: add a space before a text
    merges_spaces: bool  # unigram: merge consecutive spaces
    charsmap: bytes  # unigram: normalization map, see unigram.CharsmapNormalizer
    lowers: bool  # WordPiece: convert to lower case
    strips_accents: bool  # WordPiece
    strips_before: frozenset[int]  # special tokens that strip the white space before them
    strips_after: frozenset[int]  # special tokens that strip the white space after them
    warning: str | None  # one line for the user, or None


def read_vocabulary(metadata: Mapping[str, object], oddities: Irregularities | None = None) -> Vocabulary:
    """Read the vocabulary. Raises ModelError if it is missing, inconsistent or not supported.

    oddities: receives notes on harmless irregularities of the file.
    """
    keys = MetadataReader(metadata, PREFIX, oddities=oddities)
    model = _read_model(keys)
    cached = _get_cached_strings(keys, "tokens")
    pieces = cached or _read_pieces(keys)
    types = _read_types(keys, len(pieces))
    ids, twins = _index_pieces(keys, pieces, types, cached)
    _check_flags_and_ids(keys, len(pieces))
    pretokenizer, warning = _select_pretokenizer(keys, model)
    special = _read_special_ids(keys, model, len(pieces))
    if model == "bert" and special["unknown"] is None:
        raise ModelError(f"{PREFIX}unknown_token_id must be set: unknown words would be dropped")
    _check_bytes(pieces, types)
    lack = _check_all_bytes(ids, model, pretokenizer, special["unknown"])
    scores = _read_scores(keys, len(pieces), needed=model in _SCORED)
    ranks: dict[str, float] | StringIndex
    if model == "bert":
        ranks = {}
        _cache_strings(metadata, cached, twins, "tokens")
    elif pretokenizer is None:
        ranks = dict(zip(pieces, (-scores).tolist(), strict=True))
        ranks |= {piece: -float(scores[ids[piece]]) for piece in twins}
    elif merges := _get_cached_strings(keys, "merges"):
        ranks = StringIndex(merges)
    else:
        ranks, is_usual = rank_merges(keys, ids, pretokenizer.needs_merges)
        if not pretokenizer.marks_spaces and is_usual:
            _cache_strings(metadata, cached, twins, "tokens", "merges")
    ends = correct_types(keys, ids, types, twins)
    ends |= {end for name in ("eos", "eot", "eom") if (end := special[name]) is not None}
    ends = remove_exceptions(ends, ids, types) | read_extra_end_ids(keys, len(pieces))
    strips_left, strips_right = find_stripping_tokens(metadata, ids, types)
    for token in list_tokens_of_types(types, CONTROL, UNKNOWN):
        if not twins or ids.get(pieces[token]) == token:
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
        adds_bos=_requests_bos(keys, model, special["bos"], pretokenizer),
        adds_eos=_requests_token(keys, "eos", special["eos"], model in ("t5", "bert")),
        adds_space=pretokenizer is None and model != "bert" and keys.read_flag("add_space_prefix", model == "llama"),
        merges_spaces=model == "t5" and keys.read_flag("remove_extra_whitespaces", False),
        charsmap=_read_charsmap(keys) if model == "t5" else b"",
        lowers=keys.read_flag("normalizer.lowercase", True),
        strips_accents=keys.read_flag("normalizer.strip_accents", keys.read_flag("normalizer.lowercase", True)),
        strips_before=strips_left,
        strips_after=strips_right,
        warning="; ".join(filter(None, (lack, warning))) or None,
    )


def _get_cached_strings(keys: MetadataReader, name: str) -> MappedStrings | None:
    """Return an array of strings that an earlier start has validated and cached, or None."""
    return keys.metadata.kept.get(PREFIX + name) if isinstance(keys.metadata, Metadata) else None


def _cache_strings(
    metadata: Mapping[str, object], cached: MappedStrings | None, twins: DuplicateTokens, *names: str
) -> None:
    """Cache arrays of strings, unless they are cached or have duplicates, which must be reported at every start."""
    if isinstance(metadata, Metadata) and not cached and not twins:
        metadata.keep(*(PREFIX + name for name in names))


def _read_model(keys: MetadataReader) -> str:
    """Read the name of the tokenizer model. Raises ModelError for an invalid one, UnsupportedError."""
    model = keys.read_text("model")
    if not _NAME.fullmatch(model):
        raise keys.make_value_error("model", "a name")
    if model in _UNSUPPORTED:
        raise UnsupportedError(f"the model's tokenizer ({model}, {_UNSUPPORTED[model]}) is not supported")
    if model not in _DEFAULTS:
        raise UnsupportedError(f"{PREFIX}model: expected {', '.join(_DEFAULTS)}, found {format_value(model)}")
    return model


def _read_pieces(keys: MetadataReader) -> list[str]:
    """Read the text of every token. An empty text, which cannot be encoded, gets a name."""
    pieces = keys.read_strings("tokens")
    if not pieces:
        raise keys.make_value_error("tokens", "an array of strings")
    return [piece or f"[EMPTY_{token}]" for token, piece in enumerate(pieces)] if "" in pieces else pieces


def _index_pieces(
    keys: MetadataReader, pieces: Sequence[str], types: bytearray, cached: MappedStrings | None
) -> tuple[dict[str, int] | StringIndex, DuplicateTokens]:
    """Map texts to tokens, and list the texts that several tokens share; a cached vocabulary has none."""
    if cached:
        return StringIndex(cached), {}
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    return (ids, {}) if len(ids) == len(pieces) else index_duplicates(pieces, types, keys.oddities)


def _read_types(keys: MetadataReader, count: int) -> bytearray:
    """Read the type of each token; without the key all are normal."""
    if not keys.has("token_type"):
        return bytearray([NORMAL]) * count
    types = _read_token_array(keys, "token_type", "iu", count)
    if not (types.min() >= UNDEFINED and types.max() <= BYTE):
        token = int(((types < UNDEFINED) | (types > BYTE)).argmax())
        raise ModelError(
            f"{keys.format_key('token_type')}: expected {NORMAL} to {BYTE}, found {types[token]} (token {token})"
        )
    if undefined := int((types == UNDEFINED).sum()):  # llama.cpp does not decode them to text either
        first = int((types == UNDEFINED).argmax())
        keys.oddities.note(
            f"{undefined} tokens have the undefined type 0, the first is token {first}: treated as unused"
        )
        types = np.where(types == UNDEFINED, UNUSED, types)
    return bytearray(types.astype(np.uint8).tobytes())


def _read_scores(keys: MetadataReader, count: int, needed: bool) -> np.ndarray:
    """Read the score of each token, float [count]."""
    if not needed and not keys.has("scores"):
        return np.zeros(count)
    scores = _read_token_array(keys, "scores", "f", count)
    if not np.isfinite(scores).all():
        token = int((~np.isfinite(scores)).argmax())
        raise ModelError(
            f"{keys.format_key('scores')}: expected a finite number, found {scores[token]} (token {token})"
        )
    return scores


def _read_token_array(keys: MetadataReader, name: str, kinds: str, count: int) -> np.ndarray:
    """Read an array with one value per token, [count].

    kinds: accepted NumPy dtype kinds.
    """
    values = keys.read_array(name, kinds, f"an array of {'scores' if kinds == 'f' else 'integers'}")
    if len(values) != count:
        raise ModelError(f"{keys.format_key(name)}: expected {count} values, one per token, found {len(values)}")
    return values


def _check_bytes(pieces: Sequence[str], types: bytearray) -> None:
    for token in list_tokens_of_types(types, BYTE):
        if not re.fullmatch("<0x[0-9A-F]{2}>", pieces[token]):
            tokens = repr(pieces[token][:40])
            raise ModelError(f"{PREFIX}tokens: token {token}: expected a byte such as <0x0A>, found {tokens}")
    if NORMAL not in types:
        raise ModelError(f"{PREFIX}token_type: expected at least one normal token")


def _check_all_bytes(
    ids: Mapping[str, int], model: str, pretokenizer: PreTokenizer | None, unknown_id: int | None
) -> str | None:
    """Return a warning about missing byte tokens, whose bytes the model cannot read, or None.

    T5, RWKV and BERT need none, nor do vocabularies that lack most of them and have an unknown token. Raises ModelError
    if most are missing in byte-level BPE, or some in a vocabulary without an unknown token.
    """
    is_byte_level = pretokenizer is not None and not pretokenizer.marks_spaces
    pieces = _USUAL_BYTES if is_byte_level else _BYTE_PIECES
    missing = [piece for piece in pieces if piece not in ids]
    if not missing or model in ("t5", "rwkv", "bert"):
        return None
    is_few = len(missing) <= len(pieces) // 2
    first = "the byte " + (f"<0x{_SPACES.get(missing[0], ord(missing[0])):02X}>" if is_byte_level else missing[0])
    if not (is_few if is_byte_level else unknown_id is not None):
        raise ModelError(f"{PREFIX}tokens must contain every byte, but lacks {first} and {len(missing) - 1} more")
    more = f" and {len(missing) - 1} more" if missing[1:] else ""
    return f"the vocabulary lacks {first}{more}: the model cannot read it" if is_few else None


def _check_flags_and_ids(keys: MetadataReader, count: int) -> None:
    """Raise ModelError for a flag or an id of a wrong type, also if it is not used."""
    for name in _FLAGS:
        if keys.has(name):
            keys.read_flag(name)
    if keys.has("token_type_count"):
        keys.read_integer("token_type_count", None, 0, (1 << 31) - 1)
    for key in keys.metadata:
        if key.startswith(PREFIX) and key.endswith(ID):
            read_special_id(keys, key[len(PREFIX) : -len(ID)], count)


def _select_pretokenizer(keys: MetadataReader, model: str) -> tuple[PreTokenizer | None, str | None]:
    """Return the pre-tokenizer of a BPE vocabulary, and a warning if its name is missing or unknown."""
    name = keys.read_text("pre", "")
    if name and not _NAME.fullmatch(name):
        raise keys.make_value_error("pre", "a name")
    if model in _WITHOUT_WORDS:
        return None, None
    name = "gemma4" if model == "gemma4" else name
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name], None
    state = f"unknown ({name[:40]!r})" if name else "missing"
    return PRETOKENIZERS["default"], f"the model's pre-tokenizer is {state}: using the default one, answers may suffer"


def _read_special_ids(keys: MetadataReader, model: str, count: int) -> dict[str, int | None]:
    """Read the ids of special tokens, with llama.cpp's defaults for missing keys."""
    names = {name: name for name in ("bos", "eos", "unknown", "eot", "eom")}
    names |= {name: name_here for name, name_here in _NAMED.get(model, {}).items() if not keys.has(name + ID)}
    special = {name: read_special_id(keys, name_here, count) for name, name_here in names.items()}
    usual = {name: token for name, token in _DEFAULTS[model].items() if token < count}
    is_silent = {
        name: not keys.has(name_here + ID) or has_invalid_id(keys, name_here, count)
        for name, name_here in names.items()
    }
    return special | {name: token for name, token in usual.items() if is_silent[name]}


def _requests_bos(keys: MetadataReader, model: str, token: int | None, pretokenizer: PreTokenizer | None) -> bool:
    """Return whether a BOS token precedes each text.

    Gemma 4's files deny this by mistake, which is overridden, as in llama.cpp.
    """
    if pretokenizer is None:
        return _requests_token(keys, "bos", token, model in ("llama", "bert"))
    return _requests_token(keys, "bos", token, pretokenizer.adds_bos) or (
        pretokenizer.joins_lines and token is not None
    )


def _requests_token(keys: MetadataReader, name: str, token: int | None, default: bool) -> bool:
    """Return whether the file requests a BOS or EOS token and has one."""
    flag = keys.read_flag(f"add_{name}_token", default)
    if flag and token is None and keys.has(key := f"add_{name}_token"):
        keys.oddities.note(f"{PREFIX}{key} is true, but the vocabulary has no {name} token: ignored", PREFIX + key)
    return flag and token is not None


def _read_charsmap(keys: MetadataReader) -> bytes:
    """Read the precompiled charsmap; b"" without one."""
    if not keys.has("precompiled_charsmap"):
        return b""
    data = keys.read_array("precompiled_charsmap", "iu", "an array of bytes")
    if data.dtype.itemsize != 1:
        raise keys.make_value_error("precompiled_charsmap", "an array of bytes")
    return data.tobytes()


def rank_merges(keys: MetadataReader, ids: Mapping[str, int], needed: bool) -> tuple[dict[str, float], bool]:
    """Rank each "left right" pair by its first position in the file.

    Returns the ranks, and whether all merges are regular (see check_merges).
    """
    merges = keys.read_strings("merges") if needed or keys.has("merges") else []
    is_usual = check_merges(keys, merges, ids)
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True)), is_usual


def check_merges(keys: MetadataReader, merges: list[str], ids: Mapping[str, int]) -> bool:
    """Return whether every merge joins two tokens to a token; others are noted in `oddities`.

    As in llama.cpp, a result that is not a token is encoded as the tokens of its characters. Checking 280k merges takes
    0.1 s, so the result is cached. Raises ModelError for an entry that is not a merge.
    """
    data, is_cached = keys.metadata, ids.keys()
    mark = data.compute_fingerprint(PREFIX + "tokens", PREFIX + "merges") if isinstance(data, Metadata) else None
    if mark and is_recorded("merges", mark):
        return True
    # Sets and joined strings: a loop over the merges takes four times as long.
    if merges and (
        not all([" " in merge for merge in merges])
        or " ".join(merges).count(" ") != 2 * len(merges) - 1
        or set(" ".join(merges).split(" ")) - is_cached
        or set("\0".join(merges).replace(" ", "").split("\0")) - is_cached
    ):
        note_odd_merges(keys, merges, ids)
        return False
    if mark:
        record_check("merges", mark)
    return True


def note_odd_merges(keys: MetadataReader, merges: Iterable[str], ids: Mapping[str, int]) -> None:
    """Note in `oddities` how many merges join or yield texts that are not tokens.

    Raises ModelError for an entry that is not two texts separated by a space.
    """
    odd: list[str] = []
    for position, merge in enumerate(merges):
        parts = merge.split(" ")
        if len(parts) != 2 or "" in parts:
            problem = f"expected two tokens separated by a space, found {merge[:40]!r}"
            raise ModelError(f"{PREFIX}merges: entry {position}: {problem}")
        odd += [piece for piece in (*parts, "".join(parts)) if piece not in ids][:1]
    if odd:
        count = "a merge has" if len(odd) == 1 else f"{len(odd)} merges have"
        keys.oddities.note(f"{count} an operand or a result that is not a token ({format_value(odd[0])})")
