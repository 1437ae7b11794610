"""Generation: when it ends, what it shows, and that the cache and the list of its tokens never disagree."""

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from tiny_model import write_tiny_model

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.generation.generate import CachedSequence, Generation, GenerationOptions, StopFilter
from localllm.generation.sampling import SamplingOptions
from localllm.text.tokenizer import Tokenizer

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def start(tokenizer: Tokenizer, sequence: CachedSequence, prompt: list[int], **options) -> Generation:
    chosen = GenerationOptions(**{"sampling": GREEDY, **options})
    return Generation(sequence, tokenizer, prompt, tokenizer.stream(continued=True), chosen)


def engine(tokenizer: Tokenizer, answer: str, context: int = 512) -> FakeEngine:
    return FakeEngine(tokenizer.vocab_size, saying(tokenizer, answer), context)


def test_an_answer_until_the_end_token(tokenizer: Tokenizer):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "hello world")), [5])
    assert "".join(answer) == answer.text == "hello world"
    assert (answer.finish_reason, answer.tokens) == ("stop", tokenizer.encode("hello world"))
    assert 0 < answer.prefill_s <= answer.ttft_s
    assert answer.decode_s > 0


def test_pieces_are_never_half_characters(tokenizer: Tokenizer):
    text = "é€😀 naïve"
    pieces = list(start(tokenizer, CachedSequence(engine(tokenizer, text)), [5]))
    assert "".join(pieces) == text
    assert "�" not in text and all(pieces)
    assert "😀" in pieces


def test_a_character_that_max_tokens_cuts(tokenizer: Tokenizer):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "a😀")), [5], max_tokens=3)
    assert ("".join(answer), answer.finish_reason) == ("a�", "length")


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_max_tokens(tokenizer: Tokenizer, limit: int):
    fake = engine(tokenizer, "abcdefgh")
    answer = start(tokenizer, CachedSequence(fake), [5], max_tokens=limit)
    assert ("".join(answer), answer.finish_reason) == ("abcdefgh"[:limit], "length")
    assert len(fake.calls) == max(limit, 1), "no token is computed for nothing"


def test_an_answer_that_fits_exactly_has_ended(tokenizer: Tokenizer):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "abc")), [5], max_tokens=4)
    assert ("".join(answer), answer.finish_reason) == ("abc", "stop")


def test_the_context_ends_the_answer(tokenizer: Tokenizer):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "abcdefghijkl", context=9)), [5])
    assert ("".join(answer), answer.finish_reason) == ("abcdefgh", "length")


def test_a_prompt_that_does_not_fit(tokenizer: Tokenizer):
    fake = engine(tokenizer, "x", context=9)
    with pytest.raises(ContextError, match=r"9 tokens.*context of 9"):
        start(tokenizer, CachedSequence(fake), [5] * 9)
    assert fake.calls == []
    with pytest.raises(UsageError, match="empty"):
        start(tokenizer, CachedSequence(fake), [])


def test_the_prompt_is_read_in_chunks_with_progress(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: tokenizer.eos_id, context=2000)
    seen = []
    answer = start(tokenizer, CachedSequence(fake), [5] * 1100, on_progress=lambda *progress: seen.append(progress))
    assert list(answer) == []
    assert fake.calls == [(0, 512), (512, 512), (1024, 76)]
    assert seen == [(0, 1100), (512, 1100), (1024, 1100)]


def test_what_is_cached_is_not_read_again(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: tokenizer.eos_id)
    sequence = CachedSequence(fake)
    for prompt, position, cached in (([5, 6, 7], 0, 0), ([5, 6, 8, 9], 2, 2), ([5, 6, 8, 9], 3, 3), ([5], 0, 0)):
        answer = start(tokenizer, sequence, prompt)
        list(answer)
        assert fake.calls[-1] == (position, len(prompt) - position)
        assert answer.cached_tokens == cached
        assert sequence.tokens == fake.cache[: len(sequence.tokens)] == prompt


@pytest.mark.parametrize("when", ["prefill", "decode", "consumer"])
def test_an_interruption_leaves_a_cache_that_can_be_trusted(tokenizer: Tokenizer, when: str):
    fake = engine(tokenizer, "abcdef")
    sequence = CachedSequence(fake)
    sequence.forward([5, 6, 7, 8], 0, "none")
    answer = start(tokenizer, sequence, [5, 6, 9])
    with pytest.raises(KeyboardInterrupt):
        if when == "prefill":
            fake.fail = KeyboardInterrupt()
        for piece in answer:
            if when == "decode" and piece == "c":
                fake.fail = KeyboardInterrupt()
            if when == "consumer" and piece == "c":
                raise KeyboardInterrupt
    assert answer.finish_reason == "interrupted"
    assert sequence.tokens == fake.cache[: len(sequence.tokens)]
    assert -1 not in sequence.tokens
    assert sequence.tokens[:2] == [5, 6]
    follow_up = start(tokenizer, sequence, [5])
    assert "".join(follow_up) == "abcdef"


def test_an_older_answer_cannot_go_on(tokenizer: Tokenizer):
    sequence = CachedSequence(engine(tokenizer, "abc"))
    first = start(tokenizer, sequence, [5])
    assert next(first) == "a"
    assert "".join(start(tokenizer, sequence, [6])) == "abc"
    with pytest.raises(LocalllmError, match="something else"):
        next(first)


def test_a_closed_model(tokenizer: Tokenizer):
    fake = engine(tokenizer, "abc")
    sequence = CachedSequence(fake)
    answer = start(tokenizer, sequence, [5])
    assert next(answer) == "a"
    sequence.close()
    sequence.close()
    assert fake.closed == 1
    with pytest.raises(LocalllmError, match="closed"):
        next(answer)


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        ((" wor",), "hello"),
        (("world!", "ll"), "he"),
        (("worldx",), "hello world"),
        (("d",), "hello worl"),
        (("hello",), ""),
        (("o w", "ello world"), "h"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, stops: tuple[str, ...], shown: str):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "hello world")), [5], stop=stops)
    assert "".join(answer) == answer.text == shown
    assert answer.finish_reason == "stop"


def test_a_stop_filter_never_shows_a_part_of_a_stop_string():
    text, stop = "aabaabaaabaabb--STOP", "aabaabb"
    for size in range(1, 8):
        stops, shown = StopFilter([stop]), ""
        for begin in range(0, len(text), size):
            shown += stops.push(text[begin : begin + size])
            assert text[: text.index(stop)].startswith(shown)
            if stops.found:
                break
        assert stops.found
        assert shown == text[: text.index(stop)]


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer):
    answer = start(tokenizer, CachedSequence(engine(tokenizer, "say hel")), [5], stop="hello")
    assert list(answer)[-1] == "hel"
    assert answer.text == "say hel"


def test_penalties_see_the_prompt(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: 9)
    greedy = SamplingOptions(temperature=0, presence_penalty=100.0)
    (first,) = start(tokenizer, CachedSequence(fake), [5], sampling=greedy, max_tokens=1)
    assert first == tokenizer.decode([9])
    answer = start(tokenizer, CachedSequence(fake), [9], sampling=greedy, max_tokens=1)
    list(answer)
    assert answer.tokens != [9]


def test_padded_logits(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size + 50, lambda tokens: tokenizer.vocab_size + 7)
    answer = start(tokenizer, CachedSequence(fake), [5], max_tokens=3)
    list(answer)
    assert all(token < tokenizer.vocab_size for token in answer.tokens)


def test_a_damaged_model(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: 9)
    fake.forward = lambda ids, position, logits, verify: np.full((1, fake.vocab_size), np.nan, np.float32)
    with pytest.raises(LocalllmError, match="not numbers"):
        next(start(tokenizer, CachedSequence(fake), [5]))


@pytest.mark.parametrize("wrong", [{"max_tokens": -2}, {"stop": ("",)}, {"stop": ""}, {"stop": (1,)}], ids=str)
def test_options_that_make_no_sense(wrong: dict):
    with pytest.raises(UsageError):
        GenerationOptions(**wrong)
