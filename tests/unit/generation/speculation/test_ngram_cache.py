"""Test the n-gram cache of earlier texts: its index against brute force, its eviction, and its file."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from localllm import api
from localllm.files.cache import ngram_cache_file as written_file
from localllm.generation.speculation import ngram as written
from localllm.generation.speculation.acceptance import SURE
from localllm.generation.speculation.ngram import (
    GAP,
    GRAM,
    MIN_PASSAGE_TOKENS,
    NOTHING,
    NgramCache,
    NgramProposer,
    TokenCorpus,
    hash_vocabulary,
    make_text_proposers,
)


def corpus_of(*texts: list[int]) -> TokenCorpus:
    """Return a corpus of these texts, however short."""
    return TokenCorpus.from_tokens(np.array([token for text in texts for token in (*text, GAP)], np.int32))


def search_by_trying(tokens: list[int], ending: list[int]) -> tuple[int, int]:
    """Return the position that TokenCorpus.find promises: longest, then most frequent, then latest match."""
    best: dict[int, list[int]] = {}
    for place in range(GRAM, len(tokens)):
        if GAP in tokens[place - GRAM : place + 1]:
            continue
        agreed = 0
        while agreed < min(len(ending), place) and tokens[place - 1 - agreed] == ending[-1 - agreed]:
            agreed += 1
        if agreed >= GRAM:
            best.setdefault(agreed, []).append(place)
    if not best:
        return 0, 0
    longest = max(best)
    following = [tokens[place] for place in best[longest]]
    most = max(following.count(token) for token in following)
    return max(p for p in best[longest] if following.count(tokens[p]) == most), longest


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=4)


@given(TEXTS, st.lists(st.integers(0, 2), max_size=SURE))
def test_find_returns_the_longest_then_most_frequent_then_latest_match(texts, ending):
    earlier = corpus_of(*texts)
    assert earlier.find(ending) == search_by_trying(earlier.tokens.tolist(), ending)


@given(st.lists(st.lists(st.integers(0, 3), min_size=MIN_PASSAGE_TOKENS, max_size=80), max_size=4))
def test_a_growing_index_equals_one_built_anew(texts):
    grown = NOTHING
    for text in texts:
        grown = grown.add_text(np.array(text, np.int32))
    np.testing.assert_array_equal(grown.places, TokenCorpus.from_tokens(grown.tokens).places)


def numbers(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def test_a_repeated_text_is_stored_once():
    text = numbers(1, 200)
    earlier = NOTHING.add_text(np.array(text, np.int32))
    assert earlier.tokens.tolist() == [*text, GAP]
    assert earlier.add_text(np.array(text, np.int32)) is earlier
    longer = earlier.add_text(np.array([*text, *numbers(2, 50)], np.int32))
    again = text[-SURE - 1 :]  # the last was not known as one that something follows
    assert longer.tokens.tolist() == [*text, GAP, *again, *numbers(2, 50), GAP]
    assert longer.find(text[-SURE:]).place == len(text) + 1 + len(again)
    assert earlier.add_text(np.array(numbers(3, MIN_PASSAGE_TOKENS - 1), np.int32)) is earlier, "too short"


def test_the_oldest_text_is_evicted_from_the_corpus(monkeypatch):
    monkeypatch.setattr(written, "MAX_TOKENS", 1000)
    earlier = NOTHING
    for seed in range(30):
        earlier = earlier.add_text(np.array(numbers(seed, 100), np.int32))
        assert len(earlier.tokens) <= 1000
        assert earlier.find(numbers(seed, 100)[20:30]).agreed == 10
    assert earlier.find(numbers(0, 100)[20:30]).agreed == 0


def test_drafts_come_from_an_earlier_text():
    """Continue after a change; propose nothing after the text's end."""
    text, before = numbers(1, 60), NgramCache(1000, None)
    before.add(text)
    grams, copies = make_text_proposers(text[:20], before)
    assert [guess.token for guess in grams.propose()] == text[20:]
    for proposer in (grams, copies):
        proposer.push(text[20:25])
    assert (grams.agreed, next(grams.propose()).token) == (21, text[25])
    for proposer in (grams, copies):
        proposer.push([5000])
    assert [guess.token for guess in copies.propose()] == text[26:]


@given(TEXTS, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
@example([[0] * 5], [[0] * 4, [0]])  # to the end of an earlier text
def test_incremental_matching_equals_a_new_search(texts, pushes):
    """Extend the longest match by one token."""
    earlier = corpus_of(*texts)
    grams, pushed = NgramProposer(earlier), list[int]()
    for tokens in pushes:
        grams.push(tokens)
        pushed += tokens
        longest = max(earlier.find(pushed[-SURE:]).agreed, alone(pushed))
        assert min(grams.agreed, SURE) == min(longest, SURE)
        assert grams.agreed == 0 or grams.tokens[grams.place - 1] == pushed[-1]


def alone(tokens: list[int]) -> int:
    grams = NgramProposer()
    grams.push(tokens)
    return grams.agreed


def test_pending_texts_are_bounded_while_nobody_reads_them(monkeypatch):
    """Keep texts waiting as with many callers, where nothing is drafted."""
    monkeypatch.setattr("localllm.generation.speculation.ngram.MAX_TOKENS", 1000)
    before = NgramCache(5000, "v")
    for seed in range(40):
        before.add(numbers(seed, 100), is_kept=True)
        before.collect()
    for waiting in (before._waiting, before._unsaved):
        assert [list(text) for text in waiting] == [numbers(seed, 100) for seed in range(30, 40)]
    before.add(numbers(50, 2000))
    before.collect()
    assert len(before._waiting) == 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_PREFIX_GB", "1")
    return tmp_path / "written"


def test_a_later_process_reads_the_saved_corpus(cache):
    first, other = NgramCache(1000, "v"), NgramCache(1000, "v")
    first.add(numbers(1, 100), is_kept=True)
    other.add(numbers(2, 100), is_kept=True)
    other.add(numbers(3, 100))
    assert other.get_corpus().find(numbers(3, 100)[:SURE]).agreed == SURE
    first.save()
    other.save()  # both wrote
    later = NgramCache(1000, "v").get_corpus()
    assert [later.find(numbers(seed, 100)[:SURE]).agreed for seed in (1, 2, 3)] == [SURE, SURE, 0]
    assert NgramCache(1000, "w").get_corpus() is NOTHING
    assert [tokens for tokens, _, _ in written_file.list_files()] == [202]
    assert written_file.remove_all() > 0 and written_file.list_files() == [] and written_file.remove_all() == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "others"])
def test_a_damaged_corpus_file_is_ignored(cache, damage):
    first = NgramCache(1000, "v")
    first.add(numbers(1, 100), is_kept=True)
    first.save()
    path = cache / str(hash_vocabulary("v"))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-5]
    elif damage == "flipped":
        data[50] ^= 1
    elif damage == "empty":
        data = bytearray()
    vocab = 10 if damage == "others" else 1000  # tokens that this vocabulary does not have
    path.write_bytes(data)
    assert NgramCache(vocab, "v").get_corpus() is NOTHING


def test_an_unwritable_folder_leaves_the_corpus_empty(cache):
    cache.write_text("no folder")
    first = NgramCache(1000, "v")
    first.add(numbers(1, 100), is_kept=True)
    first.save()
    assert NgramCache(1000, "v").get_corpus() is NOTHING


def test_without_a_file_the_corpus_stays_in_the_process(cache):
    first = NgramCache(1000, None)
    first.add(numbers(1, 100), is_kept=True)
    first.save()
    assert not cache.exists()
    again = NgramCache(1000, None)
    again.add(numbers(1, 100))
    assert again.get_corpus().find(numbers(1, 100)[:SURE]).agreed == SURE


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_drafts_from_the_corpus_do_not_change_the_text(model, seed):
    """Continue this text or, for every other seed, another one."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    sequences, token_lists = model.session.cache, list[list[int]]()
    prompt = [token % model.engine.vocab_size for token in numbers(1, 30)]
    for how in ("off", "ngram"):
        sequences.ngrams = NgramCache(model.engine.vocab_size, None)
        sequences.ngrams.add([token % model.engine.vocab_size for token in numbers(7, 300)])
        if token_lists and seed != 3:
            sequences.ngrams.add([*prompt, *token_lists[0]])
        generation = model.generate(prompt, 60, speculate=how, **drawn)
        "".join(generation)
        token_lists.append(generation.tokens)
    assert token_lists[0] == token_lists[1]
    assert seed == 3 or len(token_lists[0]) < 10 or generation.accepted > 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with api.open_model(write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf"), 1, 300, cache=False) as opened:
        yield opened
