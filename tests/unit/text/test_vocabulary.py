"""Test reading a vocabulary: defaults, end tokens, and refusals."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.metadata import Irregularities
from localllm.files.gguf.metadata_reader import MetadataReader
from localllm.text.tokenizer import _read_chat_template
from localllm.text.vocabulary import Vocabulary, note_odd_merges, read_vocabulary
from tests.unit.text.test_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    sentence_piece,
)


def sentence_piece_vocabulary(**changes: Any) -> Vocabulary:
    """Return a SentencePiece vocabulary with an end token."""
    return read_vocabulary(sentence_piece({"▁": -1.0, "a": -2.0}, [("<end>", CONTROL)], **changes))


def with_special(*texts: str | tuple[str, int], **changes: Any) -> Vocabulary:
    """Return a byte-level vocabulary with tokens from 256 on, control tokens by default."""
    return read_vocabulary(byte_level(special=[(t, CONTROL) if isinstance(t, str) else t for t in texts], **changes))


# ---- ids and flags


def test_ids_missing_in_a_file_have_defaults():
    vocabulary = sentence_piece_vocabulary()
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id) == (1, 2, 0) and vocabulary.end_ids == {2}
    assert (vocabulary.adds_bos, vocabulary.adds_eos, vocabulary.adds_space) == (True, False, True)
    silent = with_special()
    assert (silent.bos_id, silent.eos_id, silent.unknown_id, silent.end_ids) == (None, None, None, frozenset())
    assert (silent.adds_bos, silent.adds_eos, silent.adds_space, silent.merges_spaces) == (False,) * 4


@pytest.mark.parametrize("none", [-1, 0xFFFFFFFF])
def test_ids_of_minus_one_are_absent(none: int):
    denied = sentence_piece_vocabulary(bos_token_id=none, eos_token_id=none)
    assert (denied.bos_id, denied.eos_id, denied.adds_bos, denied.end_ids) == (None, None, False, {2})  # by its text


def test_ids_and_flags_of_the_file_are_read():
    vocabulary = sentence_piece_vocabulary(
        bos_token_id=3, eos_token_id=261, add_bos_token=False, add_eos_token=True, add_space_prefix=False
    )
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.adds_bos, vocabulary.adds_eos, vocabulary.adds_space) == (
        3,
        261,
        False,
        True,
        False,
    )
    assert vocabulary.end_ids == {2, 261}  # </s> by its text
    more = sentence_piece_vocabulary(eot_token_id=5, eom_token_id=6)
    assert more.end_ids == {2, 5, 6}
    for name in ("bos", "eos"):
        none = sentence_piece_vocabulary(**{f"{name}_token_id": -1, f"add_{name}_token": True})
        assert (none.adds_bos, none.adds_eos) == (name == "eos", False)
    assert with_special(add_bos_token=False).adds_bos is False


def unigram(**changes: Any) -> Vocabulary:
    return read_vocabulary({**sentence_piece({"▁": -1.0}), "tokenizer.ggml.model": "t5", **{
        f"tokenizer.ggml.{key}": value for key, value in changes.items()}})  # fmt: skip


def test_unigram_vocabularies_are_read():
    usual = unigram()
    assert (usual.bos_id, usual.eos_id, usual.unknown_id, usual.adds_bos, usual.adds_eos) == (None, 1, 2, False, True)
    assert (usual.adds_space, usual.merges_spaces, usual.charsmap) == (False, False, b"")
    configured = unigram(
        add_space_prefix=True, remove_extra_whitespaces=True, precompiled_charsmap=np.arange(4, dtype=np.uint8)
    )
    assert (configured.adds_space, configured.merges_spaces, configured.charsmap) == (True, True, bytes(range(4)))
    assert unigram(precompiled_charsmap=np.arange(4, dtype=np.int8)).charsmap == bytes(range(4))
    for odd in (np.arange(4, dtype=np.int32), np.ones(4, np.float32), "x"):
        with pytest.raises(ModelError, match="precompiled_charsmap must be an array of bytes"):
            unigram(precompiled_charsmap=odd)
    assert (
        sentence_piece_vocabulary(precompiled_charsmap=np.arange(4, dtype=np.int32)).charsmap == b""
    )  # not of its kind


def word_piece(**changes: Any) -> Vocabulary:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "b"]
    metadata: dict[str, Any] = {
        "model": "bert",
        "tokens": pieces,
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    }
    return read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()})


def test_wordpiece_vocabularies_have_their_own_ids():
    usual = word_piece()
    assert (usual.bos_id, usual.eos_id, usual.unknown_id, usual.adds_bos, usual.adds_eos) == (2, 3, 1, True, True)
    assert (usual.adds_space, usual.lowers, usual.strips_accents, usual.ranks) == (False, True, True, {})
    assert (word_piece(bos_token_id=4).bos_id, word_piece(eos_token_id=5).eos_id) == (4, 5)
    cased = word_piece(**{"normalizer.lowercase": False})
    assert (cased.lowers, cased.strips_accents) == (False, False)
    both = word_piece(**{"normalizer.lowercase": False, "normalizer.strip_accents": True})
    assert (both.lowers, both.strips_accents) == (False, True)
    assert word_piece(**{"normalizer.strip_accents": False}).lowers


# ---- what is known by its text


def test_end_tokens_are_recognized_by_their_texts():
    ends = ("<|eot_id|>", "<end_of_turn>", "</s>", "<turn|>", "[e~[")
    assert with_special(*ends).end_ids == {256 + number for number in range(len(ends))}
    assert with_special(("</s>", NORMAL)).end_ids == frozenset()  # HTML
    assert with_special(("</s>", USER_DEFINED)).end_ids == {256}
    vocabulary = with_special(("<|im_end|>", NORMAL))
    assert vocabulary.end_ids == {256} and vocabulary.types[256] == CONTROL and "<|im_end|>" not in vocabulary.ids


def test_infill_tokens_are_control_tokens():
    vocabulary = with_special(
        ("<|fim_prefix|>", NORMAL), ("<|fim_pad|>", NORMAL), ("<|repo_name|>", NORMAL), ("<|file_sep|>", NORMAL)
    )
    assert vocabulary.end_ids == {257, 258, 259} and all(
        vocabulary.types[token] == CONTROL for token in range(256, 260)
    )
    named = with_special("<|fim_pad|>", "other", fim_pad_token_id=257)
    assert named.end_ids == {257} and named.types[257] == CONTROL


def test_harmony_markers_are_user_defined():
    vocabulary = with_special("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")
    assert [vocabulary.types[token] for token in range(256, 260)] == [USER_DEFINED] * 4 and vocabulary.end_ids == {260}


@pytest.mark.parametrize(("texts", "ends"), [
    (("<|return|>", "<|call|>", "<|end|>"), {256, 257}), (("<|flush|>", "<|calls|>", "<|end|>"), {256, 257}),
    (("<|return|>", "<|end|>"), {256, 257}), (("<|call|>", "<|end|>"), {256, 257}),
])  # fmt: skip
def test_end_ends_an_answer_only_without_channels(texts: tuple[str, ...], ends: set[int]):
    vocabulary = with_special(*texts)
    assert vocabulary.end_ids == ends
    assert vocabulary.types[255 + len(texts)] == (CONTROL if 255 + len(texts) in ends else USER_DEFINED)


def test_gemma_4_reads_the_eos_text_as_html():
    html = with_special("<|tool_response>", "</s>")
    assert html.end_ids == {256} and html.types[257] == NORMAL and html.ids["</s>"] == 257
    assert with_special("</s>").end_ids == {256}


# ---- which tokens plain text can become


def test_control_and_unknown_tokens_are_not_made_from_text():
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, USER_DEFINED, UNUSED]
    vocabulary = read_vocabulary(
        {**sentence_piece({"▁": -1.0, "b": -2.0, "c": -3.0}), "tokenizer.ggml.token_type": np.array(types)}
    )
    assert "<unk>" not in vocabulary.ids and "<s>" not in vocabulary.ids and "<unk>" not in vocabulary.ranks
    assert {"<0x41>", "▁", "b", "c"} <= vocabulary.ids.keys() and vocabulary.ranks["b"] == 2.0
    twice = byte_level(["a b", "c d"], [("<x>", CONTROL)])
    twice["tokenizer.ggml.merges"] = ["a b", "c d", "a b"]
    merged = read_vocabulary(twice)
    assert merged.ranks == {"a b": 0, "c d": 1} and "<x>" not in merged.ids


@pytest.mark.parametrize("kind", [7, -1])
def test_token_types_out_of_range_are_refused(kind: int):
    types = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, kind])
    with pytest.raises(ModelError, match=rf"token_type: expected 1 to 6, found {kind} \(token 260\)"):
        read_vocabulary({**sentence_piece({"▁": -1.0, "a": -2.0}), "tokenizer.ggml.token_type": types})


def test_a_vocabulary_without_normal_tokens_is_refused():
    with pytest.raises(ModelError, match="expected at least one normal token"):
        read_vocabulary({**sentence_piece({}), "tokenizer.ggml.tokens": sentence_piece({})["tokenizer.ggml.tokens"]})


def test_empty_pieces_get_names():
    metadata = byte_level(special=[("", CONTROL), ("", CONTROL)])
    assert read_vocabulary(metadata).pieces[256:] == ["[EMPTY_256]", "[EMPTY_257]"]


def without_bytes(count: int, **changes: Any) -> Vocabulary:
    metadata = sentence_piece({"▁": -1.0}) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].copy()
    metadata["tokenizer.ggml.tokens"] = [f"x{n}" if 3 <= n < 3 + count else piece for n, piece in enumerate(tokens)]
    types[3 : 3 + count] = NORMAL
    return read_vocabulary({**metadata, "tokenizer.ggml.token_type": types})


def test_missing_byte_tokens_warn_or_are_refused():
    assert without_bytes(129).unknown_id == 0 and without_bytes(256).unknown_id == 0
    assert without_bytes(129).warning is None
    for count, more in ((1, ""), (128, " and 127 more")):
        warning = f"the vocabulary lacks the byte <0x00>{more}: the model cannot read it"
        assert without_bytes(count).warning == warning
    for count in (1, 256):
        with pytest.raises(ModelError, match="must contain every byte"):
            without_bytes(count, unknown_token_id=-1)


# ---- pre-tokenizers, and what else a file says


def test_unknown_and_missing_pretokenizers_warn():
    assert with_special().warning is None and sentence_piece_vocabulary().pretokenizer is None
    assert "is unknown ('new')" in str(with_special(pre="new").warning)
    missing = byte_level()
    del missing["tokenizer.ggml.pre"]
    assert "is missing" in str(read_vocabulary(missing).warning)
    for odd in ("a b", "", "x" * 64, "-a"):
        if odd:
            with pytest.raises(ModelError, match="pre must be a name"):
                with_special(pre=odd)
    assert with_special(pre="x" * 63).warning


@pytest.mark.parametrize("name", ["add_bos_token", "remove_extra_whitespaces", "escape_whitespaces", "clean_spaces"])
def test_unused_flags_are_checked_for_their_type(name: str):
    with pytest.raises(ModelError, match=f"{name} must be true or false"):
        with_special(**{name: 1})
    with pytest.raises(ModelError, match="mask_token_id must be a number from 0 to 255"):
        with_special(mask_token_id=-2)
    with pytest.raises(ModelError, match="token_type_count must be a number from 0"):
        with_special(token_type_count=-1)
    assert with_special(token_type_count=2**31 - 1, mask_token_id=255).end_ids == frozenset()


def test_unsupported_vocabulary_models_are_refused():
    with pytest.raises(UnsupportedError, match=r"\(whitespace, whitespace\) is not supported"):
        with_special(model="whitespace")
    with pytest.raises(UnsupportedError, match=r"expected gpt2, .*found newer"):
        with_special(model="newer")
    for odd in ("a b", "", "x" * 64):
        with pytest.raises(ModelError, match="model must be a name"):
            with_special(model=odd)


# ---- white space around special tokens


def stripping_tokens(name: str = "", **changes: Any) -> tuple[set[str], set[str]]:
    texts = [
        ("<mask>", CONTROL),
        ("[MASK]", CONTROL),
        ("<s>", CONTROL),
        ("<|endoftext|>", CONTROL),
        ("<u>", USER_DEFINED),
        ("<n>", NORMAL),
    ]
    metadata = (
        byte_level(special=texts)
        | {"general.name": name}
        | {key.replace("__", "."): value for key, value in changes.items()}
    )
    vocabulary = read_vocabulary(metadata)
    return {vocabulary.pieces[token] for token in vocabulary.strips_before}, {
        vocabulary.pieces[token] for token in vocabulary.strips_after
    }


def test_tokens_that_strip_white_space_are_found():
    assert stripping_tokens() == stripping_tokens("Phi-4") == stripping_tokens("Modern BERT") == (set(), set())
    assert stripping_tokens("my PHI-3 mini") == stripping_tokens("phi3") == (set(), {"<mask>", "[MASK]", "<u>"})
    for known in ({"tokenizer__ggml__pre": "jina-v2-code"}, {"general__architecture": "jina-bert-v3"}):
        assert stripping_tokens(**known) == ({"<mask>"}, set())
    assert stripping_tokens("modern-bert-base") == ({"[MASK]"}, set())
    assert stripping_tokens(tokenizer__ggml__pre="jina-v2-en") == (set(), set())


@pytest.mark.parametrize(("declared", "expected"), [
    ({}, None), ({"chat_template": ""}, None), ({"chat_template": "a"}, "a"), ({"chat_template.rag": "b"}, None),
    ({"chat_template": "a", "chat_template.rag": "b", "chat_templates": ["rag"]}, "a"),
    ({"chat_template": 5}, "tokenizer.chat_template "), ({"chat_template.rag": 7}, "tokenizer.chat_template.rag "),
    ({"chat_template": "a", "chat_templates": "rag"}, "tokenizer.chat_templates "),
])  # fmt: skip
def test_only_the_default_chat_template_is_used(declared: dict, expected: str | None):
    """Check the types of the others."""
    keys = MetadataReader({f"tokenizer.{key}": value for key, value in declared.items()}, "tokenizer.")
    with pytest.raises(ModelError, match=f"^{expected}") if expected and " " in expected else nullcontext():
        assert _read_chat_template(keys) == expected


@pytest.mark.parametrize(("merges", "problem"), [
    (["a b"], None), ([], None), (["a b", "b"], "entry 1: expected two tokens separated by a space, found 'b'"),
    (["a b", "a b", " b"], "entry 2: expected two tokens separated by a space, found ' b'"),
    (["a  b"], "entry 0: expected two tokens separated by a space, found 'a  b'"),
    (["x" * 50], f"entry 0: expected two tokens separated by a space, found '{'x' * 40}'"),
])  # fmt: skip
def test_the_first_invalid_merge_is_reported(merges: list[str], problem: str | None):
    with nullcontext() if problem is None else pytest.raises(ModelError, match=f"merges: {problem}$"):
        note_odd_merges(MetadataReader({}, ""), merges, {"a": 0, "b": 1, "ab": 2})


@pytest.mark.parametrize(("merges", "noted"), [
    (["a b"], []), (["a b", "b a"], ["a merge has an operand or a result that is not a token (ba)"]),
    (["a x", "b a"], ["2 merges have an operand or a result that is not a token (x)"]),
])  # fmt: skip
def test_merges_of_unknown_pieces_are_noted(merges: list[str], noted: list[str]):
    keys = MetadataReader({}, "", oddities=Irregularities())
    note_odd_merges(keys, merges, {"a": 0, "b": 1, "ab": 2})
    assert noted == [line.split("meaning: ")[1] for line in keys.oddities.format_lines()]
