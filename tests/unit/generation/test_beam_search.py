"""Several answers: n-best against single generations, beam search against a naive one, and no sequence left open.

One stays open: what has read the prompt, for the next one.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_sequences import FakeSequences
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.generation import beam_search, scheduler
from localllm.generation.beam_search import Answer, generate_answers, log_sum_exp, select_best
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.request import PromptTask
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.scheduler import Generation
from localllm.text.tokenizer import StreamDecoder

Row = Callable[[tuple[int, ...]], np.ndarray]

PIECES = [b"", b"", b"a", b"b", b"\xc3", b"\xa9", b"ab", b" c"]  # the first two may end an answer
VOCAB = len(PIECES)


class Letters:
    """A tokenizer with the tokens above."""

    vocab_size = VOCAB

    def __init__(self, end_ids: frozenset[int] = frozenset([0])):
        self.end_ids = end_ids

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self, special=False, strips_space=False)

    def token_bytes(self, token: int, special: bool) -> bytes:
        return PIECES[token]


def random_table(seed: int, levels: int = 5, ending: float = 0.0) -> Row:
    """Return a model as a table of random logits with few distinct values, so that scores are often equal."""
    rows = np.random.RandomState(seed).randint(0, levels, (61, VOCAB)).astype(np.float32) / 2
    rows[np.random.RandomState(seed + 1).rand(61, VOCAB) < 0.1] = -np.inf
    rows[:, 3] = np.maximum(rows[:, 3], 0)  # something is always possible
    rows[:, :2] += ending
    return lambda tokens: rows[hash(tokens) % 61]


def run_search(engine: FakeSequences, tokenizer: Letters, prompt: list[int], n: int = 1, beams: int = 0, **options):
    chosen, sequences = GenerationOptions(**options), PrefixCache(engine)
    try:
        return generate_answers(sequences, tokenizer, PromptTask(prompt, tokenizer.stream(), chosen), n, beams)
    finally:
        sequences.collect()


# Sampled ones.


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    ending=st.sampled_from([-1.0, 0.0, 2.0]),
    max_tokens=st.sampled_from([None, 0, 1, 7]),
    stop=st.sampled_from([(), ("ab",), ("b", " cé")]),
    penalty=st.sampled_from([1.0, 1.5]),
)
def test_each_of_n_answers_equals_the_one_generated_alone(
    seed: int, n: int, ending: float, max_tokens, stop, penalty: float
):
    row, prompt = random_table(seed, ending=ending), [3, 2, 7]
    engine, tokenizer = FakeSequences(VOCAB, row, context=20), Letters()
    sampling = SamplingOptions(seed=seed, temperature=1.5, repeat_penalty=penalty)
    options = GenerationOptions(max_tokens, stop, sampling, speculate="off")
    results = generate_answers(PrefixCache(engine), tokenizer, PromptTask(prompt, tokenizer.stream(), options), n)
    assert sorted(answer.seed for answer in results if answer.seed is not None) == [
        seed + number for number in range(n)
    ]
    assert results == sorted(results, key=per_token(tokenizer, row, prompt), reverse=True)
    for answer in results:
        chosen = replace(options, sampling=replace(sampling, seed=answer.seed))
        task = PromptTask(prompt, tokenizer.stream(), chosen)
        alone = Generation(PrefixCache(FakeSequences(VOCAB, row, 20)), tokenizer, task)
        assert "".join(alone) == answer.text
        assert (alone.tokens, alone.finish_reason) == (answer.tokens, answer.finish_reason)
    assert engine.read[0] == 3 and set(engine.read[1:]) <= {1}, "the prompt is read once"
    assert sum(engine.steps) + len(engine.read) - 1 == sum(
        max(0, len(answer.tokens) - (not has_drawn_end(answer, stop))) for answer in results
    )
    assert len(engine.made) <= n + 1
    assert engine.open() == 1


def has_drawn_end(answer: Answer, stop: tuple[str, ...]) -> bool:
    """Return whether an end token was drawn, in which case the last token has been run."""
    text = b"".join(PIECES[token] for token in answer.tokens).decode(errors="replace")
    return answer.finish_reason == "stop" and not any(word in text for word in stop)


def per_token(tokenizer: Letters, row: Row, prompt: list[int]) -> Callable[[Answer], float]:
    """Score an answer per token, to within rounding, from its own log probabilities."""

    def score(answer: Answer) -> float:
        total = sum_of(row, prompt, answer.tokens)
        end = answer.finish_reason == "stop" and abs(total - answer.logprob) > 1e-9
        return round(answer.logprob / max(1, len(answer.tokens) + end), 9)

    return score


def test_answers_without_a_seed_get_one():
    row = random_table(5)
    first = run_search(FakeSequences(VOCAB, row), Letters(), [2], n=3, max_tokens=9)
    seed = min(answer.seed for answer in first)
    assert (
        run_search(FakeSequences(VOCAB, row), Letters(), [2], n=3, max_tokens=9, sampling=SamplingOptions(seed=seed))
        == first
    )


def test_the_prompt_is_prefilled_in_chunks_with_progress():
    engine, seen = FakeSequences(VOCAB, random_table(1), context=2000), []
    run_search(engine, Letters(), [2] * 1100, n=2, max_tokens=2, on_progress=lambda *progress: seen.append(progress))
    assert engine.read[:3] == [512, 512, 76]
    assert seen == [(0, 1100), (512, 1100), (1024, 1100)]


# Beam search.


def logprob_of(row: Row, tokens: list[int], token: int) -> float:
    logits = row(tuple(tokens))
    return float(logits[token]) - log_sum_exp(logits)


def sum_of(row: Row, prompt: list[int], tokens: list[int]) -> float:
    total = 0.0
    for index, token in enumerate(tokens):
        total += logprob_of(row, prompt + tokens[:index], token)
    return total


class NaiveBeams:
    """Beam search by definition: each hypothesis is a list of tokens, and all else is computed anew."""

    def __init__(self, row: Row, prompt: list[int], end_ids: frozenset[int], stop: tuple[str, ...]):
        self.row, self.prompt, self.end_ids, self.stop = row, prompt, end_ids, stop

    def text(self, tokens: list[int]) -> str:
        return b"".join(PIECES[token] for token in tokens if token not in self.end_ids).decode(errors="replace")

    def finished(self, tokens: list[int]) -> bool:
        return tokens[-1:] != [] and (
            tokens[-1] in self.end_ids or any(word in self.text(tokens) for word in self.stop)
        )

    def total(self, tokens: list[int]) -> float:
        return sum_of(self.row, self.prompt, tokens)

    def distinct(self, some: list[list[int]], count: int) -> list[list[int]]:
        """Return the likeliest hypotheses with distinct texts."""
        texts = {}
        for tokens in sorted(some, key=self.total, reverse=True):
            texts.setdefault(self.answer(tokens).text, tokens)
        return [*texts.values()][:count]

    def search(self, beams: int, limit: int) -> list[Answer]:
        going, done = [[]], []
        for _ in range(limit):
            ways = [[*tokens, token] for token in range(VOCAB) for tokens in going]
            ways = [tokens for tokens in ways if self.total(tokens) > -np.inf]
            ways.sort(key=self.total, reverse=True)  # stable: the lower token, then the better hypothesis
            ways = ways[: beams * (2 + len(self.end_ids))]
            ranks = {}
            for rank, tokens in enumerate(ways):
                if not self.finished(tokens):
                    ranks.setdefault(b"".join(PIECES[token] for token in tokens), rank)
            open_ranks = [*ranks.values()][:beams]
            last = open_ranks[-1] if len(open_ranks) == beams else len(ways)
            done += [tokens for rank, tokens in enumerate(ways[:last]) if rank < beams and self.finished(tokens)]
            done = self.distinct(done, beams)
            going = [ways[rank] for rank in open_ranks]
            if not going or (len(done) == beams and self.total(done[-1]) >= self.total(going[0])):
                break
        return [self.answer(tokens) for tokens in self.distinct(done + going, beams)]

    def answer(self, tokens: list[int]) -> Answer:
        text = self.text(tokens)
        cuts = [text.index(word) for word in self.stop if word in text]
        kept = [token for token in tokens if token not in self.end_ids]
        reason = "stop" if self.finished(tokens) else "length"
        return Answer(text[: min(cuts, default=None)], kept, self.total(tokens), reason)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([1, 2, 5, 100]),
    ending=st.integers(-8, 8).map(lambda quarters: quarters / 4),  # logits that rounding cannot make equal
    end_ids=st.sampled_from([frozenset(), frozenset([0]), frozenset([0, 1])]),
    prompt=st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=4),
    beams=st.integers(1, 5),
    max_tokens=st.sampled_from([None, 0, 1, 4]),
    stop=st.sampled_from([(), ("ab",), ("b", " cé")]),
)
def test_beam_search_equals_its_definition(seed, levels, ending, end_ids, prompt, beams, max_tokens, stop):
    row, tokenizer = random_table(seed, levels, ending), Letters(end_ids)
    engine = FakeSequences(VOCAB, row, context=12)
    results = run_search(engine, tokenizer, prompt, n=beams, beams=beams, max_tokens=max_tokens, stop=stop)
    limit = 12 - len(prompt) if max_tokens is None else min(12 - len(prompt), max_tokens)
    naive = NaiveBeams(row, prompt, end_ids, stop)
    assert results == naive.search(beams, limit)
    assert engine.open() == 1
    assert all(count <= beams for count in engine.steps)
    assert len(engine.steps) <= max(0, limit - 1), "no token is computed for nothing"
    assert run_search(engine, tokenizer, prompt, beams=beams, max_tokens=max_tokens, stop=stop) == results[:1]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_length_penalty_ranks_beams_by_their_length(penalty: float):
    row, prompt, tokenizer = random_table(31, levels=50, ending=1.0), [3, 2], Letters()
    task = PromptTask(prompt, tokenizer.stream(), GenerationOptions(8))
    answers = generate_answers(PrefixCache(FakeSequences(VOCAB, row)), tokenizer, task, 6, 6, penalty)
    per_length = [
        answer.logprob / (len(answer.tokens) + (answer.finish_reason == "stop")) ** penalty for answer in answers
    ]
    assert per_length == sorted(per_length, reverse=True) and len({len(answer.tokens) for answer in answers}) > 1


def test_a_high_length_penalty_gives_longer_answers():
    row, tokenizer = random_table(31, levels=10, ending=1.0), Letters()
    task = PromptTask([3, 2], tokenizer.stream(), GenerationOptions(8))
    lengths = [
        len(generate_answers(PrefixCache(FakeSequences(VOCAB, row)), tokenizer, task, 1, 6, penalty)[0].tokens)
        for penalty in (-2.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize(("penalty", "beams"), [("1", 2), (True, 2), (float("nan"), 2), (1.0, 0)])
def test_a_wrong_length_penalty_is_refused(penalty, beams: int):
    task = PromptTask([3, 2], Letters().stream(), GenerationOptions(8))
    with pytest.raises(UsageError, match=r"^length_penalty "):
        generate_answers(PrefixCache(FakeSequences(VOCAB, random_table(1))), Letters(), task, 1, beams, penalty)


def test_equal_texts_count_as_one_answer():
    """Keep the better one, also if its tokens differ."""
    candidates = [
        Answer(text, [number], -number, "stop") for number, text in enumerate(["yes", "no", "yes", "maybe", "no"])
    ]
    assert [answer.tokens for answer in select_best(candidates[::-1], 3)] == [[0], [1], [3]]


def test_an_exhaustive_beam_search_finds_the_likeliest_answer():
    letters, any_row = [2, 3, 7], random_table(77, levels=100)  # whose texts all differ

    def row(tokens: tuple[int, ...]) -> np.ndarray:
        return np.where(np.isin(np.arange(VOCAB), letters), any_row(tokens), np.float32(-np.inf))

    results = run_search(FakeSequences(VOCAB, row), Letters(frozenset()), [2], n=27, beams=27, max_tokens=3)
    everything = [[a, b, c] for a in letters for b in letters for c in letters]
    naive = NaiveBeams(row, [2], frozenset(), ())
    totals = sorted((total for total in map(naive.total, everything) if total > -np.inf), reverse=True)
    assert [answer.logprob for answer in results] == totals


def test_longer_answers_do_not_displace_a_better_ending():
    """Rank by the log probability of the whole answer."""
    ways = {(2,): {2: -2.0, 3: -0.2}, (2, 2): {0: -0.1}}  # "a" and an end, or one of many that begin with "b"

    def row(tokens: tuple[int, ...]) -> np.ndarray:
        chosen = ways.get(tokens, {6: -1.0, 7: -1.1} if len(tokens) < 6 else {0: -0.1})
        return np.array([chosen.get(token, -40) for token in range(VOCAB)], np.float32)

    results = run_search(FakeSequences(VOCAB, row), Letters(), [2], n=4, beams=4)
    assert results[0].text == "a"
    assert [answer.logprob for answer in results] == sorted((answer.logprob for answer in results), reverse=True)
    assert len({answer.text for answer in results}) == 4


def test_one_beam_is_greedy():
    for seed in range(20):
        row = random_table(seed, levels=100, ending=1.0)
        greedy = run_search(
            FakeSequences(VOCAB, row, 40), Letters(), [2, 3], sampling=SamplingOptions(temperature=0, seed=1)
        )
        (result,) = run_search(FakeSequences(VOCAB, row, 40), Letters(), [2, 3], beams=1)
        assert result == replace(greedy[0], seed=None)


def test_equal_scores_prefer_the_lower_ids():
    engine = FakeSequences(VOCAB, lambda tokens: np.zeros(VOCAB, np.float32))
    results = run_search(engine, Letters(frozenset()), [2], n=3, beams=3, max_tokens=2)
    assert [answer.tokens for answer in results] == [[0, 0], [2, 0], [3, 0]], "and 1 says what 0 says"
    assert results[0].logprob == pytest.approx(-2 * np.log(VOCAB))


def test_an_ending_finishes_only_among_the_likeliest():
    def row(tokens: tuple[int, ...]) -> np.ndarray:
        ending, other, late_ending, last = 3, 2.9, 2.8, 2.7
        return np.array([ending, late_ending, other, last, 0, 0, 0, 0] if len(tokens) == 1 else [0] * 8, np.float32)

    results = run_search(FakeSequences(VOCAB, row), Letters(frozenset([0, 1])), [2], n=2, beams=2, max_tokens=2)
    assert [answer.tokens for answer in results] == [[], [2]], "the second ending was the third likeliest"


def test_only_a_beam_with_several_children_forks():
    follow = {2: 3, 3: 2}  # two chains that never meet again

    def row(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.full(VOCAB, -20, np.float32)
        logits[[2, 3] if len(tokens) == 1 else follow[tokens[-1]]] = 0
        return logits

    engine = FakeSequences(VOCAB, row)
    results = run_search(engine, Letters(), [7], n=2, beams=2, max_tokens=10)
    assert [answer.text for answer in results] == ["bababababa", "ababababab"]
    assert len(engine.made) == 3
    assert engine.steps == [2] * 9
    assert [len(one.tokens) for one in engine.made] == [1, 10, 10]


def test_dropped_hypotheses_are_closed_at_once():
    seen = []

    class Watched(FakeSequences):
        def run(self, requests, logits, precise, kernel_tokens=()):
            seen.append((self.open(), len(requests)))
            return super().run(requests, logits, precise)

    for seed in range(10):
        run_search(Watched(VOCAB, random_table(seed, 100), 40), Letters(), [2], n=4, beams=4)
        assert seen[1:] and all(held == used + 1 for held, used in seen[1:])
        seen.clear()
        run_search(Watched(VOCAB, random_table(seed, 100), 40), Letters(), [2], n=4)
        assert all(used <= held <= used + 1 for held, used in seen), "and one that has ended, for others"
        seen.clear()


# Interruptions and refusals.


SEARCHES = [{"n": 3, "sampling": SamplingOptions(seed=3, temperature=2.0)}, {"n": 3, "beams": 3}]


@pytest.mark.parametrize("search", SEARCHES, ids=["n-best", "beams"])
def test_ctrl_c_in_the_engine_leaves_no_sequence_open(search: dict):
    calm = FakeSequences(VOCAB, random_table(2), context=12)
    run_search(calm, Letters(), [2, 3], **search)
    for moment in range(1, calm.moments + 1):
        engine = FakeSequences(VOCAB, random_table(2), context=12)
        engine.interrupt_at = moment
        with pytest.raises(KeyboardInterrupt):
            run_search(engine, Letters(), [2, 3], **search)
        assert engine.open() <= 1


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES, ids=["n-best", "beams"])
def test_ctrl_c_on_any_line_leaves_no_sequence_open(search: dict):
    for line in lines_that_run(lambda engine: run_search(engine, Letters(), [2, 3], **search)):
        engine = FakeSequences(VOCAB, random_table(2), context=6)
        with interrupted_at(line), pytest.raises(KeyboardInterrupt):
            run_search(engine, Letters(), [2, 3], **search)
        assert engine.open() <= 1, f"interrupted at the {line}th line"


def lines_that_run(search: Callable[[FakeSequences], object]) -> Iterator[int]:
    with interrupted_at(0) as counter:
        search(FakeSequences(VOCAB, random_table(2), context=6))
    assert counter.lines > 100
    yield from range(1, counter.lines + 1)


class interrupted_at:  # noqa: N801
    """Raise KeyboardInterrupt before the n-th executed line of the modules, or count the lines."""

    def __init__(self, number: int):
        self.number, self.lines = number, 0

    def __enter__(self) -> "interrupted_at":
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame, event: str, argument: object):
        return self._line if frame.f_code.co_filename in (beam_search.__file__, scheduler.__file__) else None

    def _line(self, frame, event: str, argument: object):
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("search", SEARCHES, ids=["n-best", "beams"])
def test_logits_that_are_nan_raise_and_close_sequences(search: dict):
    engine = FakeSequences(VOCAB, lambda tokens: np.full(VOCAB, np.nan if len(tokens) > 4 else 0, np.float32))
    with pytest.raises(LocalllmError, match="not finite"):
        run_search(engine, Letters(frozenset()), [2, 3], **search)
    assert engine.open() <= 1


def test_padded_logits_are_ignored():
    engine = FakeSequences(VOCAB + 5, lambda tokens: np.arange(VOCAB + 5, dtype=np.float32))
    (result,) = run_search(engine, Letters(), [2], beams=1, max_tokens=3)
    assert result.tokens == [VOCAB - 1] * 3
    logits = np.arange(VOCAB)
    assert result.logprob == pytest.approx(3 * (VOCAB - 1 - np.log(np.exp(logits).sum())))


@pytest.mark.parametrize("counts", [{"n": 0}, {"beams": -1}, {"n": 3, "beams": 2}], ids=str)
def test_invalid_counts_of_answers_and_beams_are_refused(counts: dict):
    with pytest.raises(UsageError):
        run_search(FakeSequences(VOCAB, random_table(1)), Letters(), [2], **counts)


def test_a_prompt_beyond_the_context_is_refused():
    engine = FakeSequences(VOCAB, random_table(1), context=4)
    with pytest.raises(ContextError, match=r"4 tokens.*holds only 4 "):
        run_search(engine, Letters(), [2] * 4)
    with pytest.raises(UsageError, match="empty"):
        run_search(engine, Letters(), [])
    assert engine.made == []
