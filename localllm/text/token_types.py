"""Token types of GGUF files (tokenizer.ggml.token_type), ids of special tokens, and well-known tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from localllm.files.gguf.metadata import Oddities
from localllm.files.gguf.metadata_reader import Checked, is_whole

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
PREFIX, ID = "tokenizer.ggml.", "_token_id"
NO_ID = -1, 0xFFFFFFFF  # values that mean "no such token" in some files
Twins = Mapping[str, Sequence[int]]  # texts shared by several tokens, with these tokens
# Of several tokens with the same text, encoding uses the type of lowest order, with which models were trained.
ORDER = {BYTE: 0, NORMAL: 1, USER_DEFINED: 1, UNUSED: 2, CONTROL: 3, UNKNOWN: 4}


def tokens_of_types(types: bytearray, *kinds: int) -> list[int]:
    """List the tokens of these types.

    This takes 0.1 ms for 128256 tokens, a loop over them 10 ms.
    """
    return np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()


def special_id(keys: Checked, name: str, count: int) -> int | None:
    """Read the id of a special token; None if it is missing or invalid.

    An invalid id is noted in `oddities`.
    """
    token = keys.raw(name + ID)
    if token is None or (is_whole(token) and token in NO_ID):
        return None
    if has_invalid_id(keys, name, count):
        keys.oddities.note(
            f"{keys.key(name + ID)} is {token}, but there are only {count} tokens: ignored", keys.key(name + ID)
        )
        return None
    return keys.whole(name + ID, None, 0, count - 1)


def has_invalid_id(keys: Checked, name: str, count: int) -> bool:
    """Return whether the file's id of a special token, which is then ignored, exceeds the vocabulary."""
    token = keys.raw(name + ID)
    return is_whole(token) and token >= count and token not in NO_ID


def index_duplicates(pieces: Sequence[str], types: bytearray, oddities: Oddities) -> tuple[dict[str, int], Twins]:
    """Map each text to one token, the first in ORDER, and each text shared by several tokens to all of them."""
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


def all_tokens(text: str, ids: Mapping[str, int], twins: Twins) -> Sequence[int]:
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


def end_texts(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """Return the strings that end an answer although no token has them."""
    texts = metadata.get(END_TEXTS_KEY)
    return tuple(text for text in texts if isinstance(text, str) and text) if isinstance(texts, list) else ()


def read_more_ends(keys: Checked, count: int) -> set[int]:
    """Read the additional end tokens; note ids beyond the vocabulary in `oddities`."""
    if not keys.has(MORE_ENDS):
        return set()
    ids_found = keys.array(MORE_ENDS, "iu", "an array of integers").tolist()
    if beyond := [token for token in ids_found if not 0 <= token < count]:
        keys.oddities.note(f"{keys.key(MORE_ENDS)} has {beyond[0]}, but there are only {count} tokens: ignored")
    return {token for token in ids_found if 0 <= token < count}


def correct_types(keys: Checked, ids: Mapping[str, int], types: bytearray, twins: Twins) -> set[int]:
    """Correct the types of tokens with well-known texts, in place; return those that end an answer."""
    end_ids = {token for text in END_TEXTS for token in all_tokens(text, ids, twins)}
    ends = {token for token in end_ids if token not in all_tokens("</s>", ids, twins) or types[token] != NORMAL}
    for name, texts in FILL_END_TEXTS.items():
        named = special_id(keys, name, len(types))
        by_text = {token for text in texts for token in all_tokens(text, ids, twins)}
        ends |= by_text if named is None else {named}
    fill_texts = [text for texts in FILL_TEXTS.values() for text in texts]
    for token in ends | {token for text in fill_texts for token in all_tokens(text, ids, twins)}:
        types[token] = CONTROL
    for text in SHOWN_TEXTS:
        for token in all_tokens(text, ids, twins):
            types[token] = USER_DEFINED
    return ends


def remove_exceptions(ends: set[int], ids: Mapping[str, int], types: bytearray) -> set[int]:
    """Remove two tokens that do not end an answer.

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


def find_stripping(
    metadata: Mapping[str, object], ids: Mapping[str, int], types: bytearray
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the special tokens that strip white space before them, and those that strip it after them.

    GGUF does not store this: llama.cpp derives it from the model's name, pre-tokenizer and architecture.
    """
    general = Checked(metadata, "general.")
    name, architecture = str(general.raw("name", "")).lower(), general.text("architecture", "")
    pre = Checked(metadata, PREFIX).text("pre", "")
    none: frozenset[int] = frozenset()
    special = UNKNOWN, CONTROL, USER_DEFINED
    if any(names in pre for names in _STRIPPING_PRE) or any(names in architecture for names in _STRIPPING_ARCH):
        return frozenset(token for token in tokens_of_types(types, *special) if token == ids.get("<mask>")), none
    if "phi-3" in name or "phi3" in name:
        exceptions = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return none, frozenset(tokens_of_types(types, *special)) - exceptions
    if "modern-bert" in name:
        return frozenset(token for token in tokens_of_types(types, *special) if token == ids.get("[MASK]")), none
    return none, none


OLDER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # in files from before 2024


class InfillTokens(NamedTuple):
    """Ids of fill-in-the-middle tokens.

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

    find: returns the special token with a text, or None.  count: vocabulary size.
    """
    keys = Checked(metadata, PREFIX)

    def read(name: str) -> int | None:
        for key in filter(None, (name, OLDER_NAMES.get(name))):
            if (token := special_id(keys, key, count)) is not None:
                return token
        return next((token for text in INFILL_TEXTS[name] if (token := find(text)) is not None), None)

    prefix, suffix, middle = read("fim_pre"), read("fim_suf"), read("fim_mid")
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(prefix, suffix, middle, read("fim_rep"), read("fim_sep"))
