"""Vocabularies whose strings are found in the file at the second start."""

import itertools
import mmap
import shutil
from pathlib import Path
from zlib import crc32

import pytest
import vocabularies
from tiny_model import write_tiny_model

from localllm.files.gguf import metadata
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata import MappedStrings, StringIndex, build_table, load_strings, save_strings
from localllm.text.tokenizer import Tokenizer

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
TEXTS = ["Hello world", "  12 345\n\n", "naïve Ωmega 你好 🙂", "<|im_start|>user\n<|im_end|>", "\\xff \udcff", ""]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata, "MIN_STRINGS", 1)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path, tiny) -> Path:
    return Path(shutil.copy(tiny, tmp_path / "model.gguf"))


def opened(path: Path) -> Tokenizer:
    return Tokenizer.from_file(path)


def is_kept(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.pieces, MappedStrings)


def require_same(kept: Tokenizer, made: Tokenizer) -> None:
    assert kept.pieces[:] == made.pieces and len(kept.pieces) == len(made.pieces) and kept.pieces[-1] == made.pieces[-1]
    for text, special in itertools.product(TEXTS, (False, True)):
        assert kept.encode(text, special) == made.encode(text, special)
    assert kept.decode(range(kept.vocab_size), special=True) == made.decode(range(made.vocab_size), special=True)
    for name in ("ids", "ranks"):
        found, expected = (getattr(each._subwords.vocabulary, name) for each in (kept, made))
        assert dict(found.items()) == expected and len(found) == len(expected) and set(found) == set(expected)
        assert all(found[text] == place and text in found for text, place in itertools.islice(expected.items(), 300))


def test_the_second_start_finds_the_first_starts_strings(model):
    first, second = opened(model), opened(model)
    assert not is_kept(first) and is_kept(second)
    require_same(second, first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
def test_kept_vocabularies_equal_made_ones(tmp_path, name: str):
    path = vocabularies.write_vocabulary(vocabularies.metadata(name), tmp_path / "vocabulary.gguf")
    first, second = opened(path), opened(path)
    assert is_kept(second)
    require_same(second, first)


def test_vocabularies_of_other_kinds_are_made_each_time(tmp_path):
    path = vocabularies.write_vocabulary(vocabularies.metadata("llama-spm"), tmp_path / "vocabulary.gguf")
    opened(path)
    assert not is_kept(opened(path))


def test_reading_all_strings_returns_a_list(model):
    opened(model)
    with GGUFFile.open(model) as kept, GGUFFile.open(model, needed=()) as made:
        assert kept.metadata.kept.keys() == {TOKENS, MERGES}
        assert kept.metadata[TOKENS] == made.metadata[TOKENS] and kept.metadata[MERGES] == made.metadata[MERGES]
        assert kept.metadata.count_strings(TOKENS) == len(kept.metadata[TOKENS])
        kept.metadata["general.name"] = "another"
        assert not kept.metadata.kept


@pytest.mark.parametrize("place", [0, 31, 32, 40, 1000, -1])
def test_a_damaged_file_is_not_believed(model, cache_folder, place: int):
    first = opened(model)
    (kept,) = (cache_folder / "vocabularies").iterdir()
    content = bytearray(kept.read_bytes())
    content[place] ^= 1
    kept.write_bytes(content)
    second = opened(model)
    assert not is_kept(second) and second.pieces == first.pieces
    assert is_kept(opened(model)), "it has been written anew"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 70, 2000])
def test_a_cut_file_is_not_believed(model, cache_folder, length: int):
    opened(model)
    (kept,) = (cache_folder / "vocabularies").iterdir()
    kept.write_bytes(kept.read_bytes()[:length])
    assert not is_kept(opened(model))


def test_a_file_that_others_could_have_written_is_not_believed(model, cache_folder):
    opened(model)
    (cache_folder / "vocabularies").chmod(0o777)
    assert not is_kept(opened(model))


def test_strings_are_forgotten_when_the_checks_change(model, monkeypatch):
    opened(model)
    monkeypatch.setattr(metadata, "hash_sources", lambda *folders: "another")
    assert not is_kept(opened(model))


def test_strings_of_another_header_are_not_believed(model):
    """Change one merge, so that the file is as long and begins like the kept one."""
    opened(model)
    with GGUFFile.open(model) as file:
        end = file.metadata.places[MERGES].stop
    content = bytearray(model.read_bytes())
    assert content[end - 1] != ord("e")
    before = content[:]
    content[end - 1] = ord("e")
    model.write_bytes(content)
    with GGUFFile.open(model) as file:
        assert not file.metadata.kept
    model.write_bytes(before)
    assert is_kept(opened(model))


def test_only_the_latest_files_are_kept(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setattr(metadata, "MAX_FILES", 4)
    for number in range(6):
        opened(write_tiny_model(tmp_path / f"{number}.gguf", context=512 + number))
    assert is_kept(opened(tmp_path / "5.gguf")) and not is_kept(opened(tmp_path / "0.gguf"))
    assert 1 < len(list((cache_folder / "vocabularies").iterdir())) <= 4


def placed(texts: list[bytes]) -> tuple[bytes, slice]:
    """Return strings as files have them, and their place."""
    data = b"before" + b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    return data, slice(len(b"before"), len(data))


def found_in(texts: list[str]) -> MappedStrings:
    data, place = placed([text.encode() for text in texts])
    table = build_table(place, texts)
    assert table is not None
    return MappedStrings(data, table)


def test_a_string_that_comes_twice_is_found_at_its_first_place():
    index = StringIndex(found_in(["a b", "c d", "a b"]))
    assert index["a b"] == 0 and index.get("c d") == 1 and dict(index.items()) == {"a b": 0, "c d": 1}
    assert index.get("a b", 5) == 0 and index.get("none") is None and index.get("none", 5) == 5


def test_mapped_strings_behave_like_a_list_and_a_dictionary():
    mapped = found_in(["a b", "c d", "a b", "é"])
    assert (len(mapped), mapped[0], mapped[-1], mapped[1:3], mapped[::-2]) == (
        4,
        "a b",
        "é",
        ["c d", "a b"],
        ["é", "c d"],
    )
    assert ["a b" in mapped, "é" in mapped, "none" in mapped, 5 in mapped] == [True, True, False, False]
    places = StringIndex(mapped)
    assert [places["é"], [*places], "c d" in places, "none" in places] == [3, ["a b", "c d", "é"], True, False]
    assert dict(places.items()) == {"a b": 0, "c d": 1, "é": 3}
    with pytest.raises(KeyError, match="none"):
        places["none"]
    del places["a b"]
    assert [[*places], places.get("a b"), "a b" in places, dict(places.items())] == [
        ["c d", "é"], None, False, {"c d": 1, "é": 3},
    ]  # fmt: skip


def test_the_index_becomes_a_dictionary_after_many_lookups(monkeypatch):
    monkeypatch.setattr(metadata, "LOOKUPS", 3)
    texts = [f"text {number}" for number in range(10)]
    index = StringIndex(found_in(texts))
    del index["text 7"]
    for _ in range(2):
        assert [index.get(text) for text in texts] == [0, 1, 2, 3, 4, 5, 6, None, 8, 9]
        assert index.get("none") is None and index.get("none", 5) == 5 and "text 7" not in index
    assert index.get.__self__ == {text: place for place, text in enumerate(texts) if place != 7}


def test_strings_that_cannot_be_mapped_make_no_table():
    assert build_table(placed([b"a", b""])[1], ["a", ""]) is None, "an empty string has another name in a vocabulary"
    assert build_table(placed([b"a", b"\xff"])[1], ["a", "\\xff"]) is None, "it is not in the file as it is shown"
    alike = [text for text in map("".join, itertools.product("ab", repeat=3))]
    assert build_table(placed([text.encode() for text in alike])[1], alike) is not None
    same = ["one"] * (metadata.MAX_EQUAL_CHECKSUMS + 1)
    assert build_table(placed([text.encode() for text in same])[1], same) is None, (
        "they would be looked through, each time"
    )


def test_strings_with_the_same_checksum_are_distinguished(monkeypatch):
    monkeypatch.setattr(metadata, "crc32", lambda text: crc32(text) & 1)
    texts = [f"{number}" for number in range(8)]
    mapped = found_in(texts)
    assert [mapped.find(text) for text in texts] == list(range(8)) and mapped.find("8") is None


def test_nothing_is_kept_where_nothing_can_be_written(model, monkeypatch):
    monkeypatch.setenv("LOCALLLM_CACHE", "/proc/nowhere")
    assert not is_kept(opened(model)) and not is_kept(opened(model))


def test_small_vocabularies_are_not_kept(model, monkeypatch, cache_folder):
    monkeypatch.setattr(metadata, "MIN_STRINGS", 10_000)
    opened(model)
    assert not (cache_folder / "vocabularies").exists()


def test_a_failed_save_leaves_the_kept_strings(model):
    opened(model)
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        save_strings(data, [(slice(0, 8), ["not there"])])
        assert len(load_strings(data)) == 2
