"""What is read of a vocabulary: what holds where a file is silent, which tokens end an answer, what is refused."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.metadata import Oddities
from localllm.files.gguf.metadata_reader import Checked
from localllm.text.tokenizer import _chat_template
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


def scored(**changes: Any) -> Vocabulary:
    """SentencePiece's, with an end in addition."""
    return read_vocabulary(sentence_piece({"▁": -1.0, "a": -2.0}, [("<end>", CONTROL)], **changes))


def special(*texts: str | tuple[str, int], **changes: Any) -> Vocabulary:
    """Byte-level with tokens from 256 on, control tokens if nothing else is said."""
    return read_vocabulary(byte_level(special=[(t, CONTROL) if isinstance(t, str) else t for t in texts], **changes))


# ---- ids and flags


def test_ids_where_a_file_is_silent():
    vocabulary = scored()
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unknown_id) == (1, 2, 0) and vocabulary.end_ids == {2}
    assert (vocabulary.adds_bos, vocabulary.adds_eos, vocabulary.adds_space) == (True, False, True)
    silent = special()
    assert (silent.bos_id, silent.eos_id, silent.unknown_id, silent.end_ids) == (None, None, None, frozenset())
    assert (silent.adds_bos, silent.adds_eos, silent.adds_space, silent.merges_spaces) == (False,) * 4


@pytest.mark.parametrize("none", [-1, 0xFFFFFFFF])
def test_ids_that_a_file_denies(none: int):
    denied = scored(bos_token_id=none, eos_token_id=none)
    assert (denied.bos_id, denied.eos_id, denied.adds_bos, denied.end_ids) == (None, None, False, {2})  # by its text


def test_ids_and_flags_that_a_file_gives():
    given = scored(bos_token_id=3, eos_token_id=261, add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    assert (given.bos_id, given.eos_id, given.adds_bos, given.adds_eos, given.adds_space) == (
        3,
        261,
        False,
        True,
        False,
    )
    assert given.end_ids == {2, 261}  # </s> by its text
    more = scored(eot_token_id=5, eom_token_id=6)
    assert more.end_ids == {2, 5, 6}
    for name in ("bos", "eos"):
        none = scored(**{f"{name}_token_id": -1, f"add_{name}_token": True})
        assert (none.adds_bos, none.adds_eos) == (name == "eos", False)
    assert special(add_bos_token=False).adds_bos is False


def unigram(**changes: Any) -> Vocabulary:
    return read_vocabulary({**sentence_piece({"▁": -1.0}), "tokenizer.ggml.model": "t5", **{
        f"tokenizer.ggml.{key}": value for key, value in changes.items()}})  # fmt: skip


def test_unigram_models():
    usual = unigram()
    assert (usual.bos_id, usual.eos_id, usual.unknown_id, usual.adds_bos, usual.adds_eos) == (None, 1, 2, False, True)
    assert (usual.adds_space, usual.merges_spaces, usual.charsmap) == (False, False, b"")
    given = unigram(
        add_space_prefix=True, remove_extra_whitespaces=True, precompiled_charsmap=np.arange(4, dtype=np.uint8)
    )
    assert (given.adds_space, given.merges_spaces, given.charsmap) == (True, True, bytes(range(4)))
    assert unigram(precompiled_charsmap=np.arange(4, dtype=np.int8)).charsmap == bytes(range(4))
    for odd in (np.arange(4, dtype=np.int32), np.ones(4, np.float32), "x"):
        with pytest.raises(ModelError, match="precompiled_charsmap must be an array of bytes"):
            unigram(precompiled_charsmap=odd)
    assert scored(precompiled_charsmap=np.arange(4, dtype=np.int32)).charsmap == b""  # not of its kind


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


def test_word_pieces_name_their_ids_otherwise():
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


def test_ends_by_their_texts():
    ends = ("<|eot_id|>", "<end_of_turn>", "</s>", "<turn|>", "[e~[")
    assert special(*ends).end_ids == {256 + number for number in range(len(ends))}
    assert special(("</s>", NORMAL)).end_ids == frozenset()  # HTML
    assert special(("</s>", USER_DEFINED)).end_ids == {256}
    found = special(("<|im_end|>", NORMAL))
    assert found.end_ids == {256} and found.types[256] == CONTROL and "<|im_end|>" not in found.ids


def test_marks_of_filling_in():
    found = special(
        ("<|fim_prefix|>", NORMAL), ("<|fim_pad|>", NORMAL), ("<|repo_name|>", NORMAL), ("<|file_sep|>", NORMAL)
    )
    assert found.end_ids == {257, 258, 259} and all(found.types[token] == CONTROL for token in range(256, 260))
    named = special("<|fim_pad|>", "other", fim_pad_token_id=257)
    assert named.end_ids == {257} and named.types[257] == CONTROL


def test_marks_that_are_shown():
    found = special("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")
    assert [found.types[token] for token in range(256, 260)] == [USER_DEFINED] * 4 and found.end_ids == {260}


@pytest.mark.parametrize(("texts", "ends"), [
    (("<|return|>", "<|call|>", "<|end|>"), {256, 257}), (("<|flush|>", "<|calls|>", "<|end|>"), {256, 257}),
    (("<|return|>", "<|end|>"), {256, 257}), (("<|call|>", "<|end|>"), {256, 257}),
])  # fmt: skip
def test_ends_of_a_part_of_an_answer(texts: tuple[str, ...], ends: set[int]):
    found = special(*texts)
    assert found.end_ids == ends
    assert found.types[255 + len(texts)] == (CONTROL if 255 + len(texts) in ends else USER_DEFINED)


def test_gemma_4_writes_html():
    html = special("<|tool_response>", "</s>")
    assert html.end_ids == {256} and html.types[257] == NORMAL and html.ids["</s>"] == 257
    assert special("</s>").end_ids == {256}


# ---- which tokens plain text can become


def test_control_and_unknown_tokens_are_not_of_text():
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, USER_DEFINED, UNUSED]
    found = read_vocabulary(
        {**sentence_piece({"▁": -1.0, "b": -2.0, "c": -3.0}), "tokenizer.ggml.token_type": np.array(types)}
    )
    assert "<unk>" not in found.ids and "<s>" not in found.ids and "<unk>" not in found.ranks
    assert {"<0x41>", "▁", "b", "c"} <= found.ids.keys() and found.ranks["b"] == 2.0
    twice = byte_level(["a b", "c d"], [("<x>", CONTROL)])
    twice["tokenizer.ggml.merges"] = ["a b", "c d", "a b"]
    merged = read_vocabulary(twice)
    assert merged.ranks == {"a b": 0, "c d": 1} and "<x>" not in merged.ids


@pytest.mark.parametrize("kind", [7, -1])
def test_types_out_of_range(kind: int):
    types = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, kind])
    with pytest.raises(ModelError, match=rf"token_type: expected 1 to 6, found {kind} \(token 260\)"):
        read_vocabulary({**sentence_piece({"▁": -1.0, "a": -2.0}), "tokenizer.ggml.token_type": types})


def test_no_normal_token():
    with pytest.raises(ModelError, match="expected at least one normal token"):
        read_vocabulary({**sentence_piece({}), "tokenizer.ggml.tokens": sentence_piece({})["tokenizer.ggml.tokens"]})


def test_empty_pieces_have_names():
    metadata = byte_level(special=[("", CONTROL), ("", CONTROL)])
    assert read_vocabulary(metadata).pieces[256:] == ["[EMPTY_256]", "[EMPTY_257]"]


def without_bytes(count: int, **changes: Any) -> Vocabulary:
    metadata = sentence_piece({"▁": -1.0}) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].copy()
    metadata["tokenizer.ggml.tokens"] = [f"x{n}" if 3 <= n < 3 + count else piece for n, piece in enumerate(tokens)]
    types[3 : 3 + count] = NORMAL
    return read_vocabulary({**metadata, "tokenizer.ggml.token_type": types})


def test_bytes_that_are_missing():
    assert without_bytes(129).unknown_id == 0 and without_bytes(256).unknown_id == 0
    assert without_bytes(129).warning is None
    for count, more in ((1, ""), (128, " and 127 more")):
        warning = f"the vocabulary lacks the byte <0x00>{more}: the model does not read it in texts"
        assert without_bytes(count).warning == warning
    for count in (1, 256):
        with pytest.raises(ModelError, match="are missing"):
            without_bytes(count, unknown_token_id=-1)


# ---- pre-tokenizers, and what else a file says


def test_pretokenizers():
    assert special().warning is None and scored().pretokenizer is None
    assert "is unknown ('new')" in str(special(pre="new").warning)
    missing = byte_level()
    del missing["tokenizer.ggml.pre"]
    assert "is missing" in str(read_vocabulary(missing).warning)
    for odd in ("a b", "", "x" * 64, "-a"):
        if odd:
            with pytest.raises(ModelError, match="pre must be a name"):
                special(pre=odd)
    assert special(pre="x" * 63).warning


@pytest.mark.parametrize("name", ["add_bos_token", "remove_extra_whitespaces", "escape_whitespaces", "clean_spaces"])
def test_flags_that_nothing_needs_are_checked(name: str):
    with pytest.raises(ModelError, match=f"{name} must be true or false"):
        special(**{name: 1})
    with pytest.raises(ModelError, match="mask_token_id must be a number from 0 to 255"):
        special(mask_token_id=-2)
    with pytest.raises(ModelError, match="token_type_count must be a number from 0"):
        special(token_type_count=-1)
    assert special(token_type_count=2**31 - 1, mask_token_id=255).end_ids == frozenset()


def test_other_kinds():
    with pytest.raises(UnsupportedError, match=r"\(whitespace, whitespace\) is not supported"):
        special(model="whitespace")
    with pytest.raises(UnsupportedError, match=r"expected gpt2, .*found newer"):
        special(model="newer")
    for odd in ("a b", "", "x" * 64):
        with pytest.raises(ModelError, match="model must be a name"):
            special(model=odd)


# ---- white space around special tokens


def strips(name: str = "", **changes: Any) -> tuple[set[str], set[str]]:
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
    found = read_vocabulary(metadata)
    return {found.pieces[token] for token in found.strips_before}, {found.pieces[token] for token in found.strips_after}


def test_tokens_that_swallow_white_space():
    assert strips() == strips("Phi-4") == strips("Modern BERT") == (set(), set())
    assert strips("my PHI-3 mini") == strips("phi3") == (set(), {"<mask>", "[MASK]", "<u>"})
    for known in ({"tokenizer__ggml__pre": "jina-v2-code"}, {"general__architecture": "jina-bert-v3"}):
        assert strips(**known) == ({"<mask>"}, set())
    assert strips("modern-bert-base") == ({"[MASK]"}, set())
    assert strips(tokenizer__ggml__pre="jina-v2-en") == (set(), set())


@pytest.mark.parametrize(("said", "expected"), [
    ({}, None), ({"chat_template": ""}, None), ({"chat_template": "a"}, "a"), ({"chat_template.rag": "b"}, None),
    ({"chat_template": "a", "chat_template.rag": "b", "chat_templates": ["rag"]}, "a"),
    ({"chat_template": 5}, "tokenizer.chat_template "), ({"chat_template.rag": 7}, "tokenizer.chat_template.rag "),
    ({"chat_template": "a", "chat_templates": "rag"}, "tokenizer.chat_templates "),
])  # fmt: skip
def test_which_chat_template_a_file_has(said: dict, expected: str | None):
    """Those for other purposes are not used, but are texts as well."""
    keys = Checked({f"tokenizer.{key}": value for key, value in said.items()}, "tokenizer.")
    with pytest.raises(ModelError, match=f"^{expected}") if expected and " " in expected else nullcontext():
        assert _chat_template(keys) == expected


@pytest.mark.parametrize(("merges", "problem"), [
    (["a b"], None), ([], None), (["a b", "b"], "entry 1: expected two pieces with a space, found 'b'"),
    (["a b", "a b", " b"], "entry 2: expected two pieces with a space, found ' b'"),
    (["a  b"], "entry 0: expected two pieces with a space, found 'a  b'"),
    (["x" * 50], f"entry 0: expected two pieces with a space, found '{'x' * 40}'"),
])  # fmt: skip
def test_the_first_merge_that_is_none(merges: list[str], problem: str | None):
    with nullcontext() if problem is None else pytest.raises(ModelError, match=f"merges: {problem}$"):
        note_odd_merges(Checked({}, ""), merges, {"a": 0, "b": 1, "ab": 2})


@pytest.mark.parametrize(("merges", "noted"), [
    (["a b"], []), (["a b", "b a"], ["a merge has a piece that is no token (ba)"]),
    (["a x", "b a"], ["2 merges have a piece that is no token (x)"]),
])  # fmt: skip
def test_merges_of_strangers(merges: list[str], noted: list[str]):
    keys = Checked({}, "", oddities=Oddities())
    note_odd_merges(keys, merges, {"a": 0, "b": 1, "ab": 2})
    assert noted == [line.split("meaning: ")[1] for line in keys.oddities.lines()]
