"""Test Unigram vocabularies against sentencepiece 0.2.3 and the tokenizers package, and hostile files.

unigram.json holds two models of 400 pieces that sentencepiece trained on 300 kB of Shakespeare, with normalization
rules of our own (accents, ligatures, jamos, spaces), and its ids for some texts. "keeping_spaces" was trained with
remove_extra_whitespaces off.
"""

import base64
import json
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from project import GOLDENS
from tokenizers import Tokenizer as Oracle
from tokenizers import models

from localllm.errors import ModelError
from localllm.text.tokenizer import Tokenizer
from localllm.text.unigram import CharsmapNormalizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
GIVEN = json.loads((GOLDENS / "unigram.json").read_text())


def unigram(pieces: list[str], scores: list[float], types: list[int] | None = None, **metadata) -> Tokenizer:
    """Return a T5 vocabulary; by default <pad>, </s> and <unk> come first."""
    first = [] if types else ["<pad>", "</s>", "<unk>"]
    kinds = types or [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(pieces)
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": first + pieces,
            "tokenizer.ggml.scores": np.array([0.0] * len(first) + scores, np.float32),
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        }
        | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    )


def charsmap() -> np.ndarray:
    return np.frombuffer(base64.b64decode(GIVEN["charsmap"]), np.uint8)


@pytest.mark.parametrize("merges_spaces", [True, False])
def test_ids_equal_those_of_sentencepiece(merges_spaces: bool):
    model = GIVEN if merges_spaces else GIVEN["keeping_spaces"]
    settings = {"add_space_prefix": True, "remove_extra_whitespaces": merges_spaces, "precompiled_charsmap": charsmap()}
    tokenizer = unigram(model["pieces"], model["scores"], GIVEN["types"], **settings)
    assert [tokenizer.encode(text) for text in GIVEN["texts"]] == model["ids"]
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.adds_eos, tokenizer.adds_bos) == (1, None, True, False)


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.dictionaries(st.text("ab▁", min_size=1, max_size=4), st.integers(-900, -1), min_size=1, max_size=20),
    st.lists(st.text("ab c", max_size=12), max_size=4),
)
def test_ids_equal_those_of_the_tokenizers_package(scores: dict[str, int], texts: list[str]):
    pieces, chosen = list(scores), [score / 7 for score in scores.values()]
    tokenizer = unigram(pieces, chosen)
    known = list(zip(pieces, np.array(chosen, np.float32).astype(float).tolist(), strict=True))
    oracle = Oracle(models.Unigram([("<unk>", 0.0), *known], unk_id=0))
    for text in texts:
        marked = text.replace(" ", "▁")
        expected = [2 + token for token in oracle.encode(marked).ids]
        assert tokenizer.encode(text) == expected


def test_spaces_are_marked_and_prefixed():
    pieces, scores = ["▁", "a", "▁a"], [-1.0, -2.0, -2.5]
    plain = unigram(pieces, scores)
    assert [plain.pieces[token] for token in plain.encode(" a  a")] == ["▁a", "▁", "▁a"]
    assert plain.decode(plain.encode(" a  a")) == " a  a"
    prefixing = unigram(pieces, scores, add_space_prefix=True)
    assert [prefixing.pieces[token] for token in prefixing.encode("a </s>a", special=True)] == ["▁a", "▁", "</s>", "▁a"]
    assert prefixing.encode("  ") == [3, 3]
    assert prefixing.decode(prefixing.encode(" a  a")) == " a  a"
    merging = unigram(pieces, scores, add_space_prefix=True, remove_extra_whitespaces=True)
    assert [merging.pieces[token] for token in merging.encode("  a   a  ")] == ["▁a", "▁a"]


def test_unknown_characters_become_one_unknown_token():
    tokenizer = unigram(["▁", "a"], [-1.0, -2.0])
    assert tokenizer.encode("xya é") == [2, 4, 3, 2]
    assert tokenizer.encode("</s>") == [2]  # a control token's text is text
    assert tokenizer.encode("<unk>", special=True) == [2]


def test_user_defined_tokens_cost_nothing():
    tokenizer = unigram(
        ["<pad>", "</s>", "<unk>", "a", "<a>"], [0.0, 0.0, 0.0, -1.0, -99.0], [CONTROL, CONTROL, UNKNOWN, NORMAL, 4]
    )
    assert tokenizer.encode("a<a>a") == [3, 4, 3]


def double_array(offset: int, leaf: bool, text: bytes = b"x\0", byte: int = ord("a"), value: int = 0) -> bytes:
    """Return a map of one byte."""
    nodes = [0] * 512
    nodes[0] = offset << 10
    nodes[offset ^ byte] = byte | leaf << 8 | (256 ^ offset ^ byte) << 10
    nodes[256] = value | 1 << 31
    return struct.pack("<I512I", 2048, *nodes) + text


def test_a_character_map_replaces_a_character():
    assert CharsmapNormalizer(double_array(0, True))("banana") == "bxnxnx"
    assert CharsmapNormalizer(b"")("a") == "a"


@pytest.mark.parametrize(
    "data",
    [
        b"\1",
        b"\0\0\0\0",
        struct.pack("<II", 4, 0),
        struct.pack("<I", 0xFFFFFFFC) + b"\0",
        struct.pack("<I", 3) + b"\0" * 9,
        double_array(0, True, b"x"),
    ],
)
def test_invalid_character_maps_are_refused(data: bytes):
    with pytest.raises(ModelError, match="the charsmap has"):
        unigram(["a"], [-1.0], precompiled_charsmap=np.frombuffer(data, np.uint8))


def test_a_character_map_pointing_outside_is_refused():
    tokenizer = unigram(["a"], [-1.0], precompiled_charsmap=np.frombuffer(double_array(0, True, value=2), np.uint8))
    with pytest.raises(ModelError, match="refers to bytes beyond its end"):
        tokenizer.encode("a")


@pytest.mark.parametrize("value", [[1, 2], "abc", np.zeros(4, np.float32), np.zeros((2, 2), np.uint8)])
def test_character_maps_of_other_types_are_refused(value):
    with pytest.raises(ModelError, match="precompiled_charsmap must be an array of bytes"):
        unigram(["a"], [-1.0], precompiled_charsmap=value)


@pytest.mark.sampled
@pytest.mark.slow
@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), st.text(max_size=30))
def test_random_character_maps_do_no_harm(nodes: list[int], text: str):
    data = struct.pack(f"<I{len(nodes)}I", 4 * len(nodes), *nodes) + b"x\0y\0"
    try:
        assert isinstance(CharsmapNormalizer(data)(text), str)
    except ModelError as error:
        assert "refers to bytes beyond its end" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", " ", "e\u0301", "中", "\u1100\u1161"])
def test_200_kilobytes_are_encoded_quickly(unit: str):
    settings = {"remove_extra_whitespaces": True, "precompiled_charsmap": charsmap()}
    tokenizer = unigram(GIVEN["pieces"], GIVEN["scores"], GIVEN["types"], **settings)
    started = time.process_time()
    tokenizer.encode(unit * (200_000 // len(unit)))
    assert time.process_time() - started < 20, "a second, if it takes as long as the text is"
