"""Texts from strangers: however long, they are cut in linear time, into the same tokens."""

import random
import time

import pytest
import vocabularies

from localllm.text import pretokenize as words
from localllm.text import subwords
from localllm.text.pretokenize import PRETOKENIZERS
from localllm.text.tokenizer import Tokenizer

FAMILIES = sorted({family: name for name, family in PRETOKENIZERS.items()}.values())


def sample(draw: random.Random, length: int) -> str:
    """Write prose with runs of spaces, digits, letters, signs and newlines in it."""
    prose = vocabularies.PROSE
    parts = []
    while sum(map(len, parts)) < length:
        start = draw.randrange(len(prose) - 400)
        parts.append(prose[start : start + draw.randrange(400)])
        parts.append(draw.choice([" ", "\t ", "7", "ab", "!?", "\n", "\r\n", "É", "中", "' '"]) * draw.randrange(40))
    return "".join(parts)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "superbpe"])  # whose words are paragraphs
def test_windows_split_into_the_same_words(monkeypatch, name: str):
    text = sample(random.Random(7), 30_000)
    expected = words.make_splitter(PRETOKENIZERS[name].patterns)(text)
    monkeypatch.setattr(words, "WINDOW", 2000)
    monkeypatch.setattr(words, "MARGIN", 500)
    assert words.make_splitter(PRETOKENIZERS[name].patterns)(text) == expected


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return Tokenizer.from_metadata(vocabularies.metadata("llama-bpe"))


@pytest.mark.parametrize("alphabet", ["a", "ab", "abcdefghijklmnopqrstuvwxyz", "aeiou", "é中", "x_", "-"])
def test_windows_merge_into_the_same_tokens(llama, monkeypatch, alphabet: str):
    draw = random.Random(3)
    text = "".join(draw.choices(alphabet, k=6000))
    whole = subwords.merge_in_windows(text, llama._subwords.vocabulary.ranks, " ")
    monkeypatch.setattr(subwords, "WINDOW", 1024)
    assert subwords.merge_in_windows(text, llama._subwords.vocabulary.ranks, " ") == whole


@pytest.mark.sampled
@pytest.mark.parametrize("unit", [" ", "a", "\n", "1", "!", "ab", "中"])
def test_long_runs_are_tokenized_in_linear_time(llama, unit: str):
    """Encode ten million spaces, at which the regex library panicked, and a megabyte of one letter, which took 9 s."""
    text = unit * (1_500_000 // len(unit.encode())) + "1"
    start = time.process_time()
    ids = llama.encode(text)
    assert time.process_time() - start < 15, "0.5 to 3 s"
    assert llama.decode(ids) == text


def test_many_spaces_before_a_digit_take_linear_time(llama):
    other = Tokenizer.from_metadata(vocabularies.metadata("llama-spm"))
    for tokenizer in (llama, other):
        start = time.process_time()
        tokenizer.encode(" " * 60_000 + "1")
        assert time.process_time() - start < 4
