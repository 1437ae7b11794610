"""Test tokenizers against llama.cpp's vectors, real prompts and naive implementations, and with hostile metadata."""

import json
import random
import re
import struct
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from pretokenizer_sources import SOURCES
from vocabularies import GIVEN

from localllm.errors import ModelError, UsageError
from localllm.text import pretokenize, subwords
from localllm.text.longest_match import unescape
from localllm.text.pretokenize import NFC_PRETOKENIZERS, PRETOKENIZERS, make_splitter
from localllm.text.special_tokens import SpecialTokenSplitter
from localllm.text.subwords import build_word_boundary, merge_in_windows, merge_symbols
from localllm.text.tokenizer import Tokenizer
from localllm.text.unigram import PlamoTokenizer, round_half_away_from_zero

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
VOCABULARIES = ["deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder"]

# GPT-2's characters for the bytes 0 to 255: the tokens 0 to 255 of every byte-level vocabulary here.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_PIECES = [chr(byte if byte in PRINTABLE else 256 + OTHERS.index(byte)) for byte in range(256)]


def byte_level(merges=(), special=(), **metadata) -> dict:
    """Return metadata of a byte-level vocabulary: 256 bytes, merged pieces, then (text, type) special tokens."""
    merged = [merge.replace(" ", "", 1) for merge in merges]
    types = [NORMAL] * (256 + len(merged)) + [kind for _, kind in special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": BYTE_PIECES + merged + [text for text, _ in special],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentence_piece(scores: dict[str, float], special=(), **metadata) -> dict:
    """Return metadata of a SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, scored pieces, (text, type) tokens."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + list(scores)
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(scores) + [kind for _, kind in special]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + [text for text, _ in special],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + list(scores.values()) + [-1000.0] * len(special), np.float32),
    } | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def pieces_of(tokenizer: Tokenizer, text: str, **options) -> list[str]:
    return [tokenizer.pieces[token] for token in tokenizer.encode(text, **options)]


@pytest.fixture(scope="module")
def vocabulary():
    """Return a function that gives the tokenizer of a tiny vocabulary by name, each read once."""
    return cache(lambda name: Tokenizer.from_metadata(vocabularies.metadata(name)))


@pytest.fixture(scope="module")
def released_vocabulary(shared):
    """Return a function that gives the tokenizer of a released vocabulary by name, each read once."""
    return cache(lambda name: Tokenizer.from_file(shared / "vocabs" / f"ggml-vocab-{name}.gguf"))


def require_round_trip(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Check that ids decode to the text, whole and streamed."""
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text


def is_composed(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text is composed (NFC) first, as by the original tokenizer and not by llama.cpp."""
    whole = unicodedata.normalize("NFC", text)
    return tokenizer._composes and text != whole and tokenizer.encode(text) == tokenizer.encode(whole)


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_token_ids_equal_those_of_llama_cpp(vocabulary, name: str):
    tokenizer = vocabulary(name)
    for text, (plain, special, whole) in zip(GIVEN["texts"], GIVEN["tokens"][name], strict=True):
        if is_composed(tokenizer, text):
            continue
        assert tokenizer.encode(text) == plain, text
        spaced = name in vocabularies.SENTENCE_PIECE and ("▁" in text or "<extra>" in text)  # with spaces of their own
        if not (spaced or (name == "plamo2" and text.startswith("\ufeff"))):
            require_round_trip(tokenizer, text, plain)
        assert tokenizer.encode(text, special=True) == special, text
        if tokenizer.bos_id not in special[:1]:  # we do not add a second one
            assert tokenizer.encode(text, special=True, bos=True) == whole, text


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_released_vocabularies_pass_llama_cpps_test_vectors(shared, released_vocabulary, name: str):
    path = shared / "vocabs" / f"ggml-vocab-{name}.gguf.inp"
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text().splitlines()
    assert len(lines) == len(texts) - 1 == 46
    for text, line in zip(texts, lines, strict=False):
        ids = [int(token) for token in line.split()]
        assert released_vocabulary(name).encode(text) == ids, text
        require_round_trip(released_vocabulary(name), text, ids)


@pytest.mark.parametrize(
    ("name", "adds_bos", "bos_id", "eos_id", "end_ids"),
    [
        ("llama-bpe", True, 128000, 128001, {128001, 128009}),
        ("llama-spm", True, 1, 2, {2}),
        ("phi-3", True, 1, 32000, {2, 32000, 32007}),
        ("qwen2", False, 151643, 151643, {151643, 151645}),
        ("gpt-2", False, 50256, 50256, {50256}),
    ],
)
def test_special_tokens_of_released_vocabularies_are_found(
    released_vocabulary, name, adds_bos, bos_id, eos_id, end_ids
):
    tokenizer = released_vocabulary(name)
    properties = tokenizer.adds_bos, tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids, tokenizer.warnings
    assert properties == (adds_bos, bos_id, eos_id, end_ids, [])


def test_prompts_of_smollm2_have_the_recorded_ids(shared):
    tokenizer = Tokenizer.from_file(shared / "models" / "smollm2-135m-instruct-q4_1.gguf")
    for prompt in json.loads((shared / "goldens" / "smollm2.json").read_text())["prompts"]:
        assert tokenizer.encode(prompt["prompt"], special=True, bos=True) == prompt["tokens"]
        assert tokenizer.decode(prompt["tokens"], special=True) == prompt["prompt"]
        assert tokenizer.decode(prompt["greedy"], special=True) == prompt["text"]
    assert tokenizer.end_ids >= {0, 2}
    assert tokenizer.chat_template.startswith("{% for message in messages %}")


@pytest.mark.slow
@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_any_text_survives_encoding_and_decoding(vocabulary, name: str):
    tokenizer = vocabulary(name)
    sentence_piece = name in vocabularies.SENTENCE_PIECE  # which takes "▁" for a space

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.text(st.characters(codec="utf-8"), max_size=40) | st.text(" \n\t'aA1中é▁<|>", max_size=40))
    def check(text: str) -> None:
        if name in NFC_PRETOKENIZERS:  # which compose characters
            text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == (text.replace("▁", " ") if sentence_piece else text)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm"])
def test_a_megabyte_is_encoded_by_several_threads(vocabulary, name: str):
    text = 10 * vocabularies.PROSE
    tokenizer = vocabulary(name)
    parts = [text[:200_000], text[100_000:300_000], text[:200_000]]
    with ThreadPoolExecutor() as pool:
        ids = list(pool.map(tokenizer.encode, parts))
    assert ids[0] == ids[2]
    assert [tokenizer.decode(part) for part in ids] == parts


def test_phi_3_strips_white_space_after_special_tokens(vocabulary):
    tokenizer = vocabulary("phi-3")
    assert pieces_of(tokenizer, "<|user|>\n of<|end|>\n", special=True) == ["<|user|>", "▁of", "<|end|>"]
    assert pieces_of(tokenizer, "<s>\n", special=True) == ["<s>", "▁", "<0x0A>"]  # not after <s>


def naive_merge(symbols: list[str], ranks: dict[str, float], joint: str) -> list[str]:
    """Search all pairs before every merge, by definition."""
    while True:
        pairs = [(ranks.get(a + joint + b), at) for at, (a, b) in enumerate(pairwise(symbols))]
        possible = [pair for pair in pairs if pair[0] is not None]
        if not possible:
            return symbols
        at = min(possible)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("joint", ["", " "])
def test_merging_equals_the_naive_merge(seed: int, joint: str):
    rng = random.Random(seed)
    pieces = ["".join(rng.choices("ab▁", k=rng.randint(1, 5))) for _ in range(40)]
    ranks = {joint.join(cut): rng.randint(0, 9) for piece in pieces if len(piece) > 1 for cut in cuts(piece)}
    for _ in range(50):
        symbols = rng.choices("ab▁c", k=rng.randint(0, 40))
        assert merge_symbols(list(symbols), ranks, joint) == naive_merge(symbols, ranks, joint)


def cuts(piece: str) -> list[tuple[str, str]]:
    return [(piece[:at], piece[at:]) for at in range(1, len(piece))]


@pytest.mark.parametrize("seed", range(20))
def test_sentence_piece_word_by_word_equals_the_naive_merge(seed: int):
    rng = random.Random(seed)
    pieces = {"".join(rng.choices("aab▁", k=rng.randint(1, 5))) for _ in range(30)} | set("ab▁")
    scores = {piece: float(-rng.randint(0, 9)) for piece in sorted(pieces)}
    tokenizer = Tokenizer.from_metadata(sentence_piece(scores))
    ranks = {piece: -score for piece, score in zip(tokenizer.pieces, [0.0] * 259 + [*scores.values()], strict=True)}
    for _ in range(30):
        text = "".join(rng.choices("aab  ", k=rng.randint(1, 40)))
        assert pieces_of(tokenizer, text) == naive_merge(list("▁" + text.replace(" ", "▁")), ranks, "")


def test_sentence_piece_uses_byte_tokens_for_unknown_characters():
    tokenizer = Tokenizer.from_metadata(sentence_piece({"▁": -1.0, "a": -2.0}))
    assert pieces_of(tokenizer, "aé") == ["▁", "a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aé\n\0")) == "aé\n\0"


def test_sentence_piece_without_bytes_uses_the_unknown_token():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a"],
        "tokenizer.ggml.token_type": np.array([UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL], np.int32),
        "tokenizer.ggml.scores": np.zeros(5, np.float32),
    }
    assert Tokenizer.from_metadata(metadata).encode("aé") == [3, 4, 0]


def test_a_space_prefix_is_added_and_removed():
    scores = {"▁": -1.0, "a": -2.0, "▁a": -0.5}
    tokenizer = Tokenizer.from_metadata(sentence_piece(scores))
    assert pieces_of(tokenizer, "a<s>a", special=True) == ["▁a", "<s>", "▁a"]
    assert pieces_of(tokenizer, "") == []
    assert tokenizer.decode(tokenizer.encode(" a a", bos=True)) == " a a"
    stream = tokenizer.stream(continued=True)
    assert stream.push(tokenizer.encode("a")[0]) == " a"
    tokenizer = Tokenizer.from_metadata(sentence_piece(scores, add_space_prefix=False))
    assert pieces_of(tokenizer, "a") == ["a"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_gemma_4_merges_across_marked_spaces():
    pieces = ["<pad>", "<bos>", "▁", "a", "b", "▁a", "\n", "\n\n", "<|tool_response>", "</s>"]
    types = [CONTROL, CONTROL, *[NORMAL] * 6, CONTROL, USER_DEFINED, *[BYTE] * 256]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": pieces + [f"<0x{byte:02X}>" for byte in range(256)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["▁ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces_of(tokenizer, "a ab\n\né", bos=True) == ["<bos>", "a", "▁a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a ab\n\né")) == "a ab\n\né"
    assert tokenizer.end_ids == {8}


@pytest.mark.parametrize(("ignore", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])])
def test_ignore_merges_takes_a_whole_word_that_is_a_token(ignore: str, expected: list[str]):
    metadata = byte_level(["a b", "x y"], [("abc", NORMAL)], pre=ignore)
    assert pieces_of(Tokenizer.from_metadata(metadata), "abc") == expected


def test_special_tokens_are_parsed_only_on_request():
    special = [("<|a|>", CONTROL), ("<|a|>b", CONTROL), ("<user>", USER_DEFINED), ("<odd>", UNKNOWN)]
    tokenizer = Tokenizer.from_metadata(byte_level(special=special))
    text = "x<|a|><|a|>by<user><odd>"
    assert pieces_of(tokenizer, text, special=True) == ["x", "<|a|>", "<|a|>b", "y", "<user>", "<odd>"]
    assert pieces_of(tokenizer, text) == [*"x<|a|><|a|>by", "<user>", *"<odd>"]
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids) == "xy<user>"
    assert tokenizer.decode(ids, special=True) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_added_once_and_only_if_the_file_asks():
    special = [("<s>", CONTROL)]
    asking = Tokenizer.from_metadata(byte_level(special=special, bos_token_id=256, add_bos_token=True))
    assert asking.encode("a", bos=True) == [256, 97]
    assert asking.encode("a") == [97]
    assert asking.encode("", bos=True) == [256]
    assert asking.encode("<s>a", special=True, bos=True) == [256, 97]
    assert asking.encode("<s>", bos=True)[:2] == [256, ord("<")]
    assert not Tokenizer.from_metadata(byte_level(special=special, bos_token_id=256)).adds_bos
    assert Tokenizer.from_metadata(byte_level(special=special, bos_token_id=256, pre="llama-bpe")).adds_bos
    assert Tokenizer.from_metadata(byte_level(special=special, pre="llama-bpe")).bos_id is None
    assert not Tokenizer.from_metadata(byte_level(special=special, bos_token_id=0xFFFFFFFF)).adds_bos


def test_eos_is_added_only_if_file_and_caller_ask():
    asking = Tokenizer.from_metadata(byte_level(special=[("</s>", CONTROL)], eos_token_id=256, add_eos_token=True))
    assert (asking.encode("a"), asking.encode("a", eos=True), asking.encode("", eos=True)) == ([97], [97, 256], [256])
    assert Tokenizer.from_metadata(byte_level(eos_token_id=3)).encode("a", eos=True) == [97]


def test_end_tokens_are_found_by_id_and_text():
    special = [("<|im_end|>", USER_DEFINED), ("<|end|>", CONTROL), ("<end>", CONTROL), ("</s>", NORMAL)]
    tokenizer = Tokenizer.from_metadata(byte_level(special=special, eos_token_id=3, eot_token_id=258))
    assert tokenizer.end_ids == {3, 256, 257, 258}
    assert tokenizer.decode([256, 259]) == "</s>"  # an end token is a control token, whatever the file says
    harmony = [("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL), ("<|channel|>", CONTROL)]
    tokenizer = Tokenizer.from_metadata(byte_level(special=harmony))
    assert tokenizer.end_ids == {256, 257}
    assert tokenizer.decode([256, 258, 259]) == "<|end|><|channel|>"


@pytest.mark.parametrize(
    ("named", "text", "pieces"),
    [
        ({"general.name": "Phi-3 mini"}, "<mask> a <mask> b", ["<mask>", "a", "▁", "<mask>", "b"]),
        ({"tokenizer.ggml.pre": "jina-v2-es"}, "a <mask> b", ["a", "<mask>", "▁", "b"]),
        ({"general.architecture": "nomic-bert-moe"}, "a\n\t <mask>", ["a", "<mask>"]),
        ({"general.name": "modern-bert"}, "a <mask>", ["a", "▁", "<mask>"]),
        ({"general.name": "modern-bert"}, "a [MASK] b", ["a", "[MASK]", "▁", "b"]),
        ({}, "a <mask>", ["a", "▁", "<mask>"]),
    ],
)
def test_special_tokens_strip_white_space_around_them(named: dict, text: str, pieces: list[str]):
    scores = {"▁": -1.0, "a": -2.0, "b": -3.0}
    metadata = sentence_piece(scores, [("<mask>", CONTROL), ("[MASK]", CONTROL)], add_space_prefix=False) | named
    assert pieces_of(Tokenizer.from_metadata(metadata), text, special=True) == pieces


def test_plain_text_makes_no_control_token():
    special = [("ab", CONTROL), ("<odd>", UNKNOWN)]
    for pre in ("gpt-2", "llama-bpe"):
        tokenizer = Tokenizer.from_metadata(byte_level(["x y", "a b"], pre=pre))
        assert pieces_of(tokenizer, "abxy") == ["ab", "xy"]
        metadata = byte_level(["x y"], special, pre=pre)
        metadata["tokenizer.ggml.merges"] = ["x y", "a b"]
        assert pieces_of(Tokenizer.from_metadata(metadata), "ab abxy") == ["a", "b", "Ġ", "a", "b", "xy"]
        assert pieces_of(Tokenizer.from_metadata(metadata), "ab") == ["a", "b"]
    scores = {"▁": -1.0, "a": -2.0, "s>": -3.0, "/s>": -4.0, "<": -5.0, "/": -6.0, "s": -7.0, ">": -8.0}
    tokenizer = Tokenizer.from_metadata(sentence_piece(scores, add_space_prefix=False))
    assert pieces_of(tokenizer, "a</s>") == ["a", "<", "/s>"]


def naive_cut(text: str, tokens: list[tuple[str, int]], before: set[int], after: set[int]) -> list[str | int]:
    """Search for every token, longest first, in all that is still text, as llama.cpp does."""
    fragments: list[str | int] = [text] if text else []
    for piece, token in sorted(tokens, key=lambda pair: -len(pair[0].encode())):
        cut: list[str | int] = []
        for fragment in fragments:
            while isinstance(fragment, str) and piece in fragment:
                left, _, fragment = fragment.partition(piece)
                left = left.rstrip(" \n") if token in before else left
                fragment = fragment.lstrip(" \n") if token in after else fragment
                cut += [left, token] if left else [token]
            cut += [fragment] if fragment != "" else []
        fragments = cut
    return fragments


@settings(max_examples=500, deadline=None, database=None)
@given(
    st.lists(st.text("ab< \né", min_size=1, max_size=4), unique=True, max_size=6),
    st.text("ab< \né", max_size=30),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_special_tokens_are_found_as_by_llama_cpp(pieces: list[str], text: str, before: set[int], after: set[int]):
    tokens = [(piece, token) for token, piece in enumerate(pieces)]
    assert SpecialTokenSplitter(tokens, before, after).split(text) == naive_cut(text, tokens, before, after)


@pytest.mark.parametrize("text", ["<unused5999>", "<", "<unused", "a ", "<unused1><unused2>"])
def test_thousands_of_special_tokens_take_linear_time(text: str):
    tokens = [(f"<unused{number}>", number) for number in range(6000)]
    special = SpecialTokenSplitter(tokens, {1}, {2})
    started = time.process_time()
    special.split(text * (1_000_000 // len(text)))
    assert time.process_time() - started < 10, "a second, if it takes as long as the text is"


def test_streaming_never_splits_a_character():
    tokenizer = Tokenizer.from_metadata(byte_level())
    text = "é 👩‍👩‍👧 中"
    stream = tokenizer.stream()
    pushed = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pushed) == text
    assert set(pushed) == {"", *text}
    assert stream.flush() == ""


def test_streaming_replaces_invalid_bytes():
    tokenizer = Tokenizer.from_metadata(byte_level())
    ids = list(b"a\xff\xc3b\xf0\x9f\x99")
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "�", "", "�b", "", "", ""]
    assert stream.flush() == "�"
    assert tokenizer.decode(ids) == "a��b�"


@pytest.mark.parametrize("seed", range(10))
def test_streamed_chunks_join_to_the_decoded_text(seed: int):
    rng = random.Random(seed)
    for metadata in (byte_level(["a b"], [("<|x|>", CONTROL)]), sentence_piece({"▁": 0.0, "▁a": 0.0})):
        tokenizer = Tokenizer.from_metadata(metadata)
        ids = rng.choices(range(tokenizer.vocab_size), k=200)
        data = b"".join(tokenizer.token_bytes(token) for token in ids)
        prefix = b" " if tokenizer.encode("a")[0] != ord("a") else b""
        stream = tokenizer.stream()
        streamed = "".join([stream.push(token) for token in ids]) + stream.flush()
        assert streamed == tokenizer.decode(ids) == data.removeprefix(prefix).decode(errors="replace")


def test_surrogates_and_null_characters_are_encoded():
    for metadata in (byte_level(), sentence_piece({"▁": 0.0})):
        tokenizer = Tokenizer.from_metadata(metadata)
        assert tokenizer.decode(tokenizer.encode("a\0\ud83d\ude00\udc00b")) == "a\0😀�b"


def test_unknown_ids_are_refused():
    tokenizer = Tokenizer.from_metadata(byte_level())
    for token in (-1, 256):
        with pytest.raises(UsageError, match="does not exist: the vocabulary has 256 tokens"):
            tokenizer.decode([token])


def test_kimi_needs_no_merges():
    metadata = byte_level(pre="kimi-k2")
    del metadata["tokenizer.ggml.merges"]
    assert Tokenizer.from_metadata(metadata).encode("ab") == [97, 98]


@pytest.mark.parametrize("model", ["hybriddna", "whitespace"])
def test_unsupported_vocabularies_are_refused_by_name(model: str):
    with pytest.raises(ModelError, match=rf"the model's tokenizer \({model}, .*\) is not supported"):
        Tokenizer.from_metadata(byte_level(model=model))


def test_qwen_composes_texts_before_encoding(released_vocabulary):
    """Encode 4 tokens instead of 12, also with a vocabulary file that others converted."""
    qwen = released_vocabulary("qwen2")
    text = "Größe naïve"
    assert qwen.encode(unicodedata.normalize("NFD", text)) == qwen.encode(text)
    llama = released_vocabulary("llama-bpe")
    assert llama.encode(unicodedata.normalize("NFD", text)) != llama.encode(text)
    assert len("e\u0301".encode()) * 1000 <= qwen.most_bytes(1000)


def test_an_unknown_pretokenizer_warns_and_uses_the_default():
    metadata = byte_level(pre="of-tomorrow")
    assert "'of-tomorrow'" in Tokenizer.from_metadata(metadata).warnings[0]
    del metadata["tokenizer.ggml.pre"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert "missing" in tokenizer.warnings[0]
    assert tokenizer.decode(tokenizer.encode("I've 1234")) == "I've 1234"


TEXT = "I've 1234567 HelloWorld naïveÉtat 中文かな\n\n  x=3.14;\tdon'T   'RE ÄÖ　。！\r\n "


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_every_pretokenizer_keeps_the_text(name: str):
    words = make_splitter(PRETOKENIZERS[name].patterns)(TEXT)
    assert "".join(words) == TEXT
    assert len(words) > 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I've 123  x", ["I", "'ve", " 123", " ", " x"]),
        ("llama-bpe", "I'VE 1234  x\n", ["I", "'VE", " ", "123", "4", " ", " x", "\n"]),
        ("qwen2", "x 12!\n", ["x", " ", "1", "2", "!\n"]),
        ("qwen35", "nai\u0308ve", ["nai\u0308ve"]),
        ("qwen2", "nai\u0308ve", ["nai", "\u0308ve"]),
        ("starcoder", "x12 ", ["x", "1", "2", " "]),
        ("gpt-4o", "HelloWorld's ÉtatÉtat", ["Hello", "World's", " État", "État"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("deepseek-v3", "ab中文1234 c", ["ab", "中文", "123", "4", " c"]),
        ("deepseek-llm", "a\u3000。中", ["a", "\u3000。", "中"]),
        ("kimi-k2", "ab中文CdEf", ["ab", "中文", "Cd", "Ef"]),
        ("superbpe", "a 1234567", ["a ", "1", "234", "567"]),
        ("afmoe", "12345 x", ["12", "345", " x"]),
        ("tiny_aya", "12345", ["12", "345"]),
        ("tiny_aya", "x1234567 ٣٤٥٦ 1234x", ["x", "1", "234", "567", " ", "٣", "٤٥٦", " ", "123", "4", "x"]),
        ("afmoe", "1½34 123 1", ["1", "½34", " ", "123", " ", "1"]),
        ("superbpe", "123 4", ["123", " ", "4"]),
        ("deepseek-llm", "a  中  ", ["a", "  ", "中", "  "]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_pretokenizers_split_into_the_expected_words(name: str, text: str, words: list[str]):
    assert make_splitter(PRETOKENIZERS[name].patterns)(text) == words


# A vocabulary under every name: what llama.cpp (llama-cpp-python 0.3.36) makes of some texts. Left out is where it and
# the models' own tokenizers differ: which letters outside ASCII are large, spaces before digits that are cut off first.
CASELESS = {"youtu", "tiny_aya", "kimi-k2"}  # there; the models' own expressions tell "T" from "t"
WITHOUT_LARGE_LETTERS = CASELESS | {"gpt-4o", "granite-embed-multi-97m", "tekken"}


def differs(family: str, text: str) -> bool:
    """Return whether the model's own tokenizer splits a text otherwise than llama.cpp."""
    if family in pretokenize.PRETOKENIZERS and not unicodedata.is_normalized("NFC", text):
        return True
    large = ("yÉ" in text and family in WITHOUT_LARGE_LETTERS) or (text.startswith("YouTube") and family in CASELESS)
    return large or (family in ("tiny_aya", "afmoe") and re.search("  \\d", text) is not None)


@pytest.mark.parametrize("row", GIVEN["cuts"], ids=lambda row: row["names"][0])
def test_every_pretokenizer_splits_as_llama_cpp(row: dict):
    for family in {PRETOKENIZERS[name]: name for name in reversed(row["names"])}.values():
        tokenizer = Tokenizer.from_metadata(vocabularies.cuts(family))
        for text, ids in zip(GIVEN["cut_texts"], row["ids"], strict=True):
            assert tokenizer.encode(text) == ids or differs(family, text), (family, text)
        assert tokenizer.adds_bos == row["adds_bos"], family


LLAMA_3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"


@pytest.mark.parametrize(
    ("flag", "usual", "names"),
    [
        ("ignore_merges", False, f"{LLAMA_3} minicpm5 granite-embed-multi-97m tekken youtu"),
        ("adds_bos", False, f"chameleon {LLAMA_3} tekken gemma4 granite-embed-multi-311m"),
        ("marks_spaces", False, "gemma4 granite-embed-multi-311m sarvam-moe"),
        ("joins_lines", False, "gemma4 granite-embed-multi-311m"),
        ("needs_merges", True, "kimi-k2"),
    ],
)
def test_only_the_listed_pretokenizers_set_each_flag(flag: str, usual: bool, names: str):
    assert [name for name, known in PRETOKENIZERS.items() if getattr(known, flag) != usual] == names.split()


def test_every_pretokenizer_name_has_its_source():
    assert set(SOURCES) == set(PRETOKENIZERS)
    assert all(source == "-" or source.count("/") == 1 for source in SOURCES.values())


def test_all_pretokenizers_but_three_are_compared():
    compared = {name for row in GIVEN["cuts"] for name in row["names"]}
    assert set(PRETOKENIZERS) - compared == {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}


@pytest.mark.parametrize("name", vocabularies.NAMES)
def test_the_word_cache_is_bounded(vocabulary, monkeypatch, name: str):
    """Cache neither more words nor long ones, and give the same tokens."""
    texts = [" ".join(vocabularies.PROSE.split()[start : start + 40]) for start in range(0, 200, 40)]
    expected = [vocabulary(name).encode(text) for text in texts]
    monkeypatch.setattr(subwords, "_CACHED_WORDS", 8)
    monkeypatch.setattr(subwords, "_CACHED_LENGTH", 6)
    tokenizer = Tokenizer.from_metadata(vocabularies.metadata(name))
    for _ in range(2):
        assert [tokenizer.encode(text) for text in texts] == expected
        words = tokenizer._subwords._words
        assert len(words) <= 8 and all(len(word) <= 6 for word in words)


def test_long_spaces_of_jais_are_split_by_powers_of_two():
    """Follow its pattern: runs of 512, 256 and so on down to 4, then two, then one."""
    cut = make_splitter(PRETOKENIZERS["jais-2"].patterns)
    assert [len(piece) for piece in cut(" " * 1791)] == [512, 512, 512, 128, 64, 32, 16, 8, 4, 2, 1]
    assert [len(piece) for piece in cut(" " * 514)] == [512, 2]


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted({family: name for name, family in PRETOKENIZERS.items()}.values()))
def test_long_runs_are_split_in_linear_time(name: str):
    cut, length = make_splitter(PRETOKENIZERS[name].patterns), 100_000
    started = time.process_time()
    for unit in ("a", "A", " ", "1", "½", "中", "!", "\n"):
        for end in ("", "a", "中"):
            text = unit * length + end
            assert "".join(cut(text)) == text
    assert time.process_time() - started < 30, "half a second to two, if it takes as long as the text is"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "hybriddna"}, r"\(hybriddna, DNA k-mer\) is not supported"),
        ({"model": "bert", "unknown_token_id": -1}, "unknown_token_id must be set"),
        ({"model": "new\nkind"}, r"a name .found 'new\\nkind'"),
        ({"model": None}, r"tokenizer.ggml.model must be a string \(found missing\)"),
        ({"tokens": None}, r"tokens must be an array of strings \(found missing\)"),
        ({"tokens": []}, "tokens must be an array of strings"),
        ({"tokens": np.arange(4)}, "tokens must be an array of strings .found"),
        ({"token_type": np.ones(255, np.int32)}, "token_type: expected 256 values, one per token, found 255"),
        ({"token_type": np.ones(256, np.float32)}, "token_type must be an array of integers"),
        ({"token_type": 1}, "token_type must be an array of integers"),
        ({"token_type": np.full(256, BYTE)}, "token 0: expected a byte such as <0x0A>"),
        ({"merges": None}, r"merges must be an array of strings \(found missing\)"),
        ({"merges": ["Ġ Ġ", "ab"]}, "merges: entry 1: expected two tokens separated by a space, found 'ab'"),
        ({"merges": ["ab"]}, "merges: entry 0: expected two tokens separated by a space, found 'ab'"),
        ({"merges": [" a"]}, "merges: entry 0: expected two tokens separated by a space, found ' a'"),
        ({"merges": ["a b c"]}, "merges: entry 0: expected two tokens separated by a space, found 'a b c'"),
        ({"eos_token_id": -2}, r"eos_token_id must be a number from 0 to 255 \(found -2\)"),
        ({"eot_token_id": 1.5}, r"eot_token_id must be a number from 0 to 255 \(found 1.5\)"),
        ({"fim_pad_token_id": True}, r"fim_pad_token_id must be a number from 0 to 255 \(found True\)"),
        ({"model": ["gpt2"]}, "model must be a string"),
        ({"eos_token_id": np.arange(3)}, "eos_token_id must be a number from 0 to 255"),
        ({"add_bos_token": "yes"}, r"add_bos_token must be true or false \(found yes\)"),
        ({"add_bos_token": np.arange(3)}, "add_bos_token must be true or false"),
        ({"scores": np.zeros(3)}, "scores: expected 256 values, one per token, found 3"),
        ({"scores": np.full(256, np.nan)}, r"scores: expected a finite number, found nan \(token 0\)"),
    ],
)
def test_hostile_metadata_is_refused_in_one_line(changes: dict, message: str):
    metadata = byte_level() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_metadata(metadata)
    assert "\n" not in str(caught.value)


def test_missing_byte_tokens_do_no_harm():
    """Use a vocabulary like SmolLM's, which has no token for the bytes 4 and 255."""
    metadata = byte_level(["a b", "a b"], [("ab", NORMAL)])
    metadata["tokenizer.ggml.tokens"] = [*BYTE_PIECES[:4], *BYTE_PIECES[5:], "ab"]
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces_of(tokenizer, "a\4ab") == ["a", "ab"]


@pytest.mark.parametrize(("lacking", "byte"), [("Ċ", "<0x0A>"), ("!", "<0x21>")])
def test_a_vocabulary_without_a_byte_drops_it(lacking: str, byte: str):
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [f"x{lacking}x" if piece == lacking else piece for piece in tokens]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode("a\nb!c")) == "a\nb!c".replace("\n" if lacking == "Ċ" else lacking, "")
    assert tokenizer.warnings[-1] == f"the vocabulary lacks the byte {byte}: the model cannot read it"


def test_a_vocabulary_without_most_bytes_is_refused():
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [f"x{piece}" if piece.islower() else piece for piece in tokens]
    assert "lacks the byte <0x61> and 25 more" in Tokenizer.from_metadata(metadata).warnings[-1]
    metadata["tokenizer.ggml.tokens"] = [f"x{n}" for n, _ in enumerate(tokens)]
    with pytest.raises(ModelError, match="the byte <0x21> and 95 more"):
        Tokenizer.from_metadata(metadata)


def test_tokenizers_read_a_vocabulary_file_without_tensors(tmp_path: Path):
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def strings(texts: list[str]) -> bytes:
        return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(string, texts))

    entries = [
        string("tokenizer.ggml.model") + struct.pack("<I", 8) + string("gpt2"),
        string("tokenizer.ggml.pre") + struct.pack("<I", 8) + string("gpt-2"),
        string("tokenizer.ggml.tokens") + strings([*BYTE_PIECES, "ab"]),
        string("tokenizer.ggml.merges") + strings(["a b"]),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.encode("abc") == [256, ord("c")]


def test_importing_the_tokenizer_is_light():
    program = "import sys, localllm.text.tokenizer; print(sorted({'jinja2', 'numba', 'tokenizers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_rwkv_vocabulary_needs_all_bytes():
    """Keep text from vanishing at a byte without a token."""
    metadata = vocabularies.metadata("rwkv")
    metadata["tokenizer.ggml.tokens"] = [
        "[none]" if piece == "\\x8f" else piece for piece in metadata["tokenizer.ggml.tokens"]
    ]
    with pytest.raises(ModelError, match="lacks 0x8f"):
        Tokenizer(metadata)
    metadata["tokenizer.ggml.tokens"] = [
        "[nil]" if piece == "\\xf0" else piece for piece in metadata["tokenizer.ggml.tokens"]
    ]
    with pytest.raises(ModelError, match=r"lacks 0x8f and 1 more$"):
        Tokenizer(metadata)


@pytest.mark.parametrize(("piece", "data"), [
    ("a", b"a"), (r"\n", b"\n"), (r"\t\r", b"\t\r"),
    (r"\x8f", b"\x8f"), (r"a\x4Bb\xfFc", b"aKb\xffc"), (r"\\n", rb"\n"), ("", b""),
    (r"\'a", b"'a"), (r"\x4", b"x4"), ("a\\", b"a\\"),
    (r"\é", "é".encode()), ("\\\n", b"\n"), ("é\\n\ud800", "é\n?".encode()),
])  # fmt: skip
def test_rwkv_pieces_are_written_as_python_bytes(piece: str, data: bytes):
    assert unescape(piece) == data


def test_plamo_splits_with_the_best_score():
    """Prefer the longer first piece of equal scores; characters without a piece score below 0."""
    plamo = object.__new__(PlamoTokenizer)
    plamo._scores = {"a": -10000, "ab": -20000, "b": -10000, "abc": -5}
    plamo._lengths = {"a": [3, 2, 1], "b": [1]}
    for word, ends in (("ababcx", [2, 2, 5, 4, -5, -6]), ("xa", [-1, 2]), ("aab", [1, 3, 3]), ("", [])):
        assert plamo._find_best_ends(word) == ends
    halves = {0.4: 0, 0.5: 1, 1.5: 2, 1.49: 1, -0.4: 0, -0.5: -1, -1.5: -2, 2.0: 2, -2.0: -2, 0.0: 0}
    assert {x: round_half_away_from_zero(x) for x in halves} == halves


def test_long_words_are_merged_in_windows(monkeypatch):
    """Give the same as one merge; begin windows at symbols and merge equal ones once."""
    monkeypatch.setattr(subwords, "WINDOW", 16)
    monkeypatch.setattr(subwords, "MARGIN", 6)
    ranks, merged, random_ = {pair: n for n, pair in enumerate(("a b", "b a", "ab ab", "c c"))}, [], random.Random(1)
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 200):
        text = "".join(random_.choices("abc", k=length))
        assert merge_in_windows(text, ranks, " ") == merge_symbols(list(text), ranks, " ")

    def heard(symbols: list[str], *others) -> list[str]:
        merged.append("".join(symbols))
        return merge_symbols(symbols, *others)

    monkeypatch.setattr(subwords, "merge_symbols", heard)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    for text, windows in (
        (letters[:16], [letters[:16]]), (letters[:17], [letters[:16], letters[10:17]]),
        ("d" * 36, ["d" * 16, "d" * 16]),
        (letters, [letters[:16], letters[10:26], letters[20:36], letters[30:]]), ("e" * 37, ["e" * 16, "e" * 7]),
    ):  # fmt: skip
        merged.clear()
        assert merge_in_windows(text, {}, " ") == list(text) and merged == windows
    assert subwords._select_final_symbols(["a" * 16, "b"]) == (["a" * 16], 16)
    assert subwords._select_final_symbols(["abc", "defghij", "k"]) == (["abc", "defghij"], 10)


@pytest.mark.parametrize(("pieces", "text", "words"), [
    (["a"], "a▁b▁▁c▁", ["a", "▁b", "▁▁c", "▁"]), (["▁a", "▁▁"], "▁a▁▁b", ["▁a", "▁▁b"]),
    (["▁a", "b▁c", "-▁", "^▁"], "a▁b▁c-▁d▁▁e^▁f]▁g", ["a", "▁b▁c-▁d", "▁▁e^▁f]", "▁g"]),
])  # fmt: skip
def test_words_are_split_before_marked_spaces(pieces: list[str], text: str, words: list[str]):
    """Do not split where a piece continues across the space."""
    assert build_word_boundary(pieces).split(text) == words


def test_token_types_decide_their_bytes():
    kinds = [("<c>", CONTROL), ("<é>", USER_DEFINED), ("<k>", UNKNOWN), ("<n>", UNUSED), ("→", NORMAL), ("Ġa", NORMAL)]
    tokenizer = Tokenizer(byte_level(special=kinds))
    bytes_of_tokens = [tokenizer.token_bytes(token) for token in range(256, 262)]
    assert bytes_of_tokens == [b"", "<é>".encode(), b"", b"", "→".encode(), b" a"]
    assert [tokenizer.token_bytes(token, special=True) for token in (256, 257, 258, 259)] == [
        b"<c>", "<é>".encode(), b"<k>", b"",
    ]  # fmt: skip
