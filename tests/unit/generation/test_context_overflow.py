"""Test texts that outgrow their context: what is dropped, what is kept, and what the user is told."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import Free
from tiny_model import write_tiny_model

import localllm
from localllm.errors import ContextError, UsageError
from localllm.generation import context_overflow as overflow
from localllm.generation.context_overflow import ShiftedSequence, count_droppable, wrap_sequence
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.session import Session
from localllm.generation.speculation import speculator
from localllm.text.tokenizer import Tokenizer

GREEDY = SamplingOptions(temperature=0)
CONTEXT, KEEP = 256, 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def options(on_overflow: str | None, **more) -> GenerationOptions:
    return GenerationOptions(sampling=GREEDY, on_overflow=on_overflow, **more)


def conversation(tiny: Path, *answers: str) -> tuple[FakeEngine, Session, Tokenizer]:
    tokenizer = Tokenizer.from_file(tiny)
    engine = FakeEngine(tokenizer.vocab_size, saying(tokenizer, *answers), CONTEXT)
    return engine, Session(PrefixCache(engine), tokenizer), tokenizer


# ---- a rolling sequence ---------------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 400)),
    st.tuples(st.just("truncate"), st.integers(0, 1500)),
    st.tuples(st.just("fork"), st.just(0)),
)


@given(st.lists(STEPS, max_size=12), st.sampled_from([0, 1, KEEP, 64, 128]))
@settings(max_examples=60, deadline=None)
def test_a_shifted_sequence_appears_to_hold_all_tokens(steps, keep):
    engine = FakeEngine(12 * 400 + 1, lambda tokens: tokens[-1], CONTEXT)
    held = engine.sequence()
    sequence, all_tokens = ShiftedSequence(held, keep), list[int]()
    for step, count in steps:
        if step == "append":
            ids = list(range(len(all_tokens), len(all_tokens) + count))
            rows = sequence.append(ids, "all")
            all_tokens += ids
            np.testing.assert_array_equal(rows.argmax(axis=1), ids)
        elif step == "truncate":
            left = sequence.truncate(min(count, len(all_tokens)))
            assert left == min(count, len(all_tokens)) or left == min(count, keep)
            del all_tokens[left:]
        else:
            sequence = sequence.fork()
            held = engine.sequences[-1]
        assert sequence.tokens == all_tokens
        window = len(held.tokens) - keep
        assert window <= 0 or held.tokens == all_tokens[:keep] + all_tokens[-window:]
    assert np.argmax(sequence.append([7, 8])) == 8


def test_a_full_context_drops_half_at_once():
    held = FakeEngine(2000, lambda tokens: tokens[-1], CONTEXT).sequence()
    sequence = ShiftedSequence(held, KEEP)
    sequence.append(list(range(CONTEXT)), "none")
    assert sequence.dropped == 0
    sequence.append([CONTEXT])
    assert sequence.dropped == 64  # of 246, the half in whole pages
    assert held.tokens == [*range(KEEP), *range(KEEP + 64, CONTEXT + 1)]


@pytest.mark.parametrize(("length", "keep", "within", "count"), [
    (74, 10, (), 64), (73, 10, (), 63), (75, 10, (), 64), (137, 10, (), 64), (266, 10, (), 128), (265, 10, (), 64),
    (266, 10, (138,), 192), (266, 10, (138, 202), 256), (10, 10, (), 0),
])  # fmt: skip
def test_half_of_the_tokens_is_dropped_in_whole_pages(
    length: int, keep: int, within: tuple[int, ...], count: int, monkeypatch
):
    """Drop more where the cut would fall within an image."""
    monkeypatch.setattr(overflow, "cuts_image", lambda held, place: place in within)
    assert count_droppable([0] * length, keep) == count


def test_all_tokens_are_dropped_below_one_page():
    held = FakeEngine(2000, lambda tokens: tokens[-1], 60).sequence()
    sequence = ShiftedSequence(held, KEEP)
    sequence.append(list(range(60)), "none")
    with pytest.raises(ContextError, match=r"^an image of 51 tokens does not fit the context of 60: raise --ctx-size$"):
        sequence._drop_tokens(51)
    sequence._drop_tokens(50)
    assert (held.tokens, sequence.tokens, sequence.dropped) == ([*range(KEEP)], [*range(60)], 50)
    sequence.append([60], "none")
    assert (held.tokens, sequence.tokens) == ([*range(KEEP), 60], [*range(61)])


def test_a_sequence_stops_shifting_without_keep():
    engine = FakeEngine(2000, lambda tokens: tokens[-1], CONTEXT)
    full, held = engine.sequence(), engine.sequence()
    assert wrap_sequence(full, None) is full
    sequence = wrap_sequence(full, KEEP)
    assert wrap_sequence(sequence, KEEP) is sequence
    sequence.append(list(range(300)), "none")
    assert wrap_sequence(sequence, None) is full
    assert full.tokens == list(range(KEEP)), "what followed is not there any more"
    short = ShiftedSequence(held, KEEP)
    short.append(list(range(100)), "none")
    assert wrap_sequence(short, None).tokens == list(range(100))


# ---- generations and conversations ----------------------------------------------------------------------------------


def test_an_answer_may_outgrow_the_context(tiny):
    engine, session, _ = conversation(tiny, "x" * 900)
    answer = session.complete("x", options("shift", max_tokens=700))
    assert "".join(answer) == "x" * 700
    assert (answer.finish_reason, answer.is_full, answer.kept) == ("length", False, 4)
    assert answer.dropped >= 700 + 1 - CONTEXT
    assert all(len(sequence.tokens) <= CONTEXT for sequence in engine.sequences)
    ended = session.complete("x", options(None))
    assert len("".join(ended)) == CONTEXT - 1
    assert (ended.finish_reason, ended.is_full, ended.dropped) == ("length", True, 0)
    few = session.complete("x", options(None, max_tokens=5))
    assert ("".join(few), few.is_full) == ("xxxxx", False)


def test_a_prompt_may_outgrow_the_context(tiny):
    _, session, _ = conversation(tiny, "yes")
    with pytest.raises(ContextError, match="1000 tokens"):
        session.complete("x" * 1000, options("error"))
    answer = session.complete("x" * 1000, options("shift", max_tokens=3, keep=20))
    "".join(answer)
    assert answer.kept == 20
    assert answer.dropped >= 1000 - CONTEXT
    again = session.complete("x" * 1000 + "y", options("shift", max_tokens=3, keep=20))
    "".join(again)
    assert again.cached_tokens == 1000, "nothing is read again"


@pytest.mark.parametrize(("length", "keep"), [(256, 0), (257, 4), (300, KEEP), (1000, 20), (1000, 100), (5000, 64)])
def test_tokens_that_would_be_dropped_are_not_prefilled(length: int, keep: int):
    """Prefill only the first tokens and the tail that fits, however the prompt is chunked."""
    prompt = [number % 1999 for number in range(length)]
    for size in (length, 64, 7):
        reading = FakeEngine(2000, lambda tokens: tokens[-1], CONTEXT)
        held = reading.sequence()
        sequence = ShiftedSequence(held, keep)
        sequence.prepare_prompt(prompt)
        for place in range(0, length, size):
            rows = sequence.append(prompt[place : place + size], "last" if place + size >= length else "none")
        assert rows.argmax() == prompt[-1] and sequence.tokens == prompt
        assert held.tokens == prompt[:keep] + prompt[keep + sequence.dropped :], "no gap but one"
        assert sequence.skipped == sequence.dropped and sequence.dropped % 64 == 0
        assert sum(count for _, count in reading.calls) == length - sequence.skipped, "the others were never read"
        free = CONTEXT - len(held.tokens)
        assert (CONTEXT - keep) // 8 <= free < (CONTEXT - keep) // 8 + 64
    sequence.prepare_prompt([*prompt, 5])
    sequence.append([5])
    assert (sequence.skipped, sequence.dropped) == (0, 0), "it goes on from what it holds"


def test_a_cached_prefix_is_dropped_with_the_rest():
    """Drop what a longer prompt would drop, without prefilling the first tokens again."""
    reading = FakeEngine(2000, lambda tokens: tokens[-1], CONTEXT)
    held = reading.sequence()
    sequence = ShiftedSequence(held, KEEP)
    sequence.append([*range(100)], "none")
    sequence.prepare_prompt([*range(1000)])
    assert sequence.tokens == [*range(KEEP)]
    sequence.append([*range(KEEP, 1000)])
    assert held.tokens == [*range(KEEP), *range(KEEP + sequence.skipped, 1000)]


def test_a_conversation_shifts_and_keeps_its_system_message(tiny):
    """Prefill only each turn's own tokens, also after a shift."""
    engine, session, tokenizer = conversation(tiny, "an answer of thirty characters")
    engine.say = lambda tokens: 3 + ord("!") if tokens[-1] != 3 + ord("!") else tokenizer.eos_id
    session.system = "Remember me."
    dropped = 0
    for number in range(20):
        answer = session.ask(f"question number {number}", options("shift"))
        assert "".join(answer) == "!"
        dropped += answer.dropped
        assert not number or answer.cached_tokens > len(answer.prompt) - 60
        assert session.forgotten == 0
    assert len(session.messages) == 41
    assert dropped > 300
    (held,) = engine.open_sequences
    standing = tokenizer.encode("<|im_start|>system\nRemember me.<|im_end|>\n<|im_start|>user\n", special=True)
    assert held.tokens[: len(standing)] == standing
    assert answer.kept == len(standing)


@pytest.mark.parametrize("keep", [None, 7])
def test_a_continued_answer_keeps_the_system_message(tiny, keep):
    """Fill the context while it goes on; `keep` overrides the number of kept tokens."""
    engine, session, tokenizer = conversation(tiny, "x" * 900)
    session.system = "Remember me."
    "".join(session.ask("Go", options("shift", max_tokens=100, keep=keep)))
    answer = session.resume(options("shift", max_tokens=300, keep=keep))
    assert "".join(answer) == "x" * 300
    standing = tokenizer.encode("<|im_start|>system\nRemember me.<|im_end|>\n<|im_start|>user\n", special=True)
    assert answer.dropped > 0
    assert answer.kept == (len(standing) if keep is None else keep)
    (held,) = engine.open_sequences
    assert held.tokens[: answer.kept] == standing[: answer.kept]


def test_a_conversation_may_refuse_to_drop_turns(tiny):
    _, session, _ = conversation(tiny, "fine")
    with pytest.raises(ContextError):
        for number in range(20):
            "".join(session.ask(f"question number {number}", options("error")))
    assert 0 < number < 10
    assert len(session.messages) == 2 * number
    "".join(session.ask("another", options("drop-turns")))
    assert session.forgotten > 0


def test_given_messages_may_lose_their_oldest_turns(tiny):
    _, session, tokenizer = conversation(tiny, "fine")
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(20) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    with pytest.raises(ContextError):
        session.chat(messages, options(None))
    answer = session.chat(messages, options("drop-turns"))
    text = tokenizer.decode(answer.prompt, special=True)
    assert text.startswith("<|im_start|>system\nS<|im_end|>") and "last" in text and "user 0" not in text
    assert session.forgotten == 21 - text.count("<|im_start|>user")


@pytest.mark.parametrize(
    "wrong", [{"on_overflow": "ignore"}, {"keep": 5}, {"on_overflow": "shift", "keep": -1}], ids=str
)
def test_invalid_overflow_options_are_refused(wrong):
    with pytest.raises(UsageError, match=r"on_overflow|keep must"):
        GenerationOptions(**wrong)
    with pytest.raises(UsageError, match="cannot be combined with on_overflow=shift"):
        GenerationOptions(on_overflow="shift", speculate="mtp")
    GenerationOptions(on_overflow="drop-turns", speculate="mtp")
    GenerationOptions(on_overflow="shift", speculate="ngram")


def test_a_context_too_small_for_the_kept_tokens_is_refused(tiny):
    _, session, _ = conversation(tiny, "fine")
    with pytest.raises(ContextError, match="256 is too small to keep 200 tokens when shifting; use at least 328"):
        session.complete("x", options("shift", keep=200))


def test_generate_reports_kept_and_dropped_tokens(tiny):
    with localllm.open(tiny, context=192, backend="reference") as model:
        answer = model.generate("x" * 400, max_tokens=20, temperature=0, on_overflow="shift", keep=8)
        list(answer)
        assert (len(answer.tokens), answer.kept) == (20, 8)
        assert answer.dropped % 64 == 0 and answer.dropped > 0
        with pytest.raises(UsageError, match="several answers"):
            model.candidates("hello", n=2, on_overflow="shift")


# ---- what the user is told ------------------------------------------------------------------------------------------


def test_run_explains_how_to_fit_a_long_prompt(tiny, cli):
    long = ["run", tiny, "--raw", "-p", "x" * 400, "--temp", "0", "-n", "3", "-c", "256"]
    assert cli(*long)[0] == cli(*long, "--on-overflow", "drop-turns")[0] == 4
    shorter = "shorten it, set -c 401 or more (the model was trained for 512)"
    too_long = (
        "localllm: error: the prompt has 400 tokens, but the context holds only 256 with the answer, 145 too many: "
    )
    some = "or read some of it with --on-overflow head, tail, middle"
    assert cli(*long)[2] == f"{too_long}{shorter}, {some} or shift\n"
    assert cli(*long, "--n", "2")[2] == f"{too_long}{shorter}, {some.replace(', middle', ' or middle')}\n"
    parts = cli(*(each for each in long if each != "--raw"))[2]
    assert (
        f"{shorter.partition(',')[0]}, " in parts and "read all of it in chunks with --on-overflow chunks, or" in parts
    )
    assert cli(*long[:4], "x" * 600, *long[5:])[2].endswith(f", 345 too many: shorten it, {some} or shift\n")
    code, _, err = cli(*long, "--on-overflow", "shift", "--keep", "7")
    assert (code, err) == (
        0,
        "localllm: the context is full: 192 tokens after the first 7 were dropped; raise -c to keep more\n",
    )
    code, out, err = cli("run", tiny, "--raw", "-p", "x", "--temp", "0", "-c", "100", "--json")
    assert code == 0 and '"dropped_tokens": 0' in out
    code, out, _ = cli(*long, "--on-overflow", "shift", "--keep", "7", "--json")
    times = json.loads(out)
    assert code == 0 and times["timings"]["prefill_tps"] * times["timings"]["prefill_s"] == pytest.approx(
        400 - 192, rel=0.01
    )
    assert err == "localllm: the answer ended because the context is full; raise -c or use --on-overflow shift\n"
    code, _, err = cli("run", tiny, "-p", "x", "-n", "2", "--keep", "7")
    assert (code, err) == (0, "localllm: --keep is ignored: it needs --on-overflow shift\n")
    assert cli("run", tiny, "-p", "x", "--on-overflow", "forget")[0] == 2


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_drafts_do_not_move_the_shift(seed, monkeypatch):
    """Shift where the context is full, not where a draft would not fit."""
    monkeypatch.setattr(speculator, "StepCostModel", Free)
    drawn = {"temperature": 0} if seed is None else {"seed": seed}
    with localllm.open(localllm.builtin_model(), context=160, cache=False) as model:
        off, ngram = (
            model.generate("Hi", 320, on_overflow="shift", ignore_eos=True, speculate=how, **drawn)
            for how in ("off", "ngram")
        )
        assert "".join(ngram) == "".join(off) and ngram.tokens == off.tokens
        assert ngram.dropped == off.dropped > 0 and ngram.accepted > 0
