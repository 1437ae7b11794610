"""Test generation: when it ends, what it streams, and what it prefills again."""

import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, saying
from tiny_model import write_tiny_model

from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.generation.answer_state import StopFilter, Transcript
from localllm.generation.context_overflow import ShiftedSequence
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache, count_common
from localllm.generation.reasoning import ANSWER, TextPart
from localllm.generation.request import PromptTask
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.scheduler import Generation
from localllm.generation.speculation import speculator as leaps
from localllm.generation.speculation.acceptance import Drafter
from localllm.generation.speculation.speculator import Speculator, get_head_budget
from localllm.generation.tools.tool_grammar import ToolUse
from localllm.text.tokenizer import Tokenizer

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def start(tokenizer: Tokenizer, sequences: PrefixCache, prompt: list[int], **options) -> Generation:
    chosen = GenerationOptions(**{"sampling": GREEDY, **options})
    return Generation(sequences, tokenizer, PromptTask(prompt, tokenizer.stream(continued=True), chosen))


def engine(tokenizer: Tokenizer, answer: str, context: int = 512) -> FakeEngine:
    return FakeEngine(tokenizer.vocab_size, saying(tokenizer, answer), context)


def test_an_answer_ends_at_the_end_token(tokenizer: Tokenizer):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "hello world")), [5])
    assert "".join(answer) == answer.text == "hello world"
    assert (answer.finish_reason, answer.tokens) == ("stop", tokenizer.encode("hello world"))
    assert 0 < answer.prefill_s <= answer.ttft_s
    assert answer.decode_s > 0


def test_streamed_chunks_never_split_a_character(tokenizer: Tokenizer):
    text = "é€😀 naïve"
    pieces = list(start(tokenizer, PrefixCache(engine(tokenizer, text)), [5]))
    assert "".join(pieces) == text
    assert "�" not in text and all(pieces)
    assert "😀" in pieces


def test_a_character_cut_by_max_tokens_is_replaced(tokenizer: Tokenizer):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "a😀")), [5], max_tokens=3)
    assert ("".join(answer), answer.finish_reason) == ("a�", "length")


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_max_tokens_limits_the_answer_and_the_steps(tokenizer: Tokenizer, limit: int):
    fake = engine(tokenizer, "abcdefgh")
    answer = start(tokenizer, PrefixCache(fake), [5], max_tokens=limit)
    assert ("".join(answer), answer.finish_reason) == ("abcdefgh"[:limit], "length")
    assert len(fake.calls) == max(limit, 1), "no token is computed for nothing"


def test_an_answer_of_exactly_max_tokens_ends_with_stop(tokenizer: Tokenizer):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "abc")), [5], max_tokens=4)
    assert ("".join(answer), answer.finish_reason) == ("abc", "stop")


def test_a_full_context_ends_the_answer(tokenizer: Tokenizer):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "abcdefghijkl", context=9)), [5])
    assert ("".join(answer), answer.finish_reason) == ("abcdefgh", "length")


def test_a_prompt_beyond_the_context_is_refused(tokenizer: Tokenizer):
    fake = engine(tokenizer, "x", context=9)
    with pytest.raises(ContextError, match=r"9 tokens.*holds only 9"):
        start(tokenizer, PrefixCache(fake), [5] * 9)
    assert fake.calls == []
    with pytest.raises(UsageError, match="empty"):
        start(tokenizer, PrefixCache(fake), [])


def test_the_prompt_is_prefilled_in_chunks_with_progress(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: tokenizer.eos_id, context=2000)
    seen = []
    answer = start(tokenizer, PrefixCache(fake), [5] * 1100, on_progress=lambda *progress: seen.append(progress))
    assert list(answer) == []
    assert fake.calls == [(0, 512), (512, 512), (1024, 76)]
    assert seen == [(0, 1100), (512, 1100), (1024, 1100)]


def test_a_cached_prefix_is_not_prefilled_again(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: tokenizer.eos_id)
    sequences = PrefixCache(fake)
    for prompt, position, cached in (([5, 6, 7], 0, 0), ([5, 6, 8, 9], 2, 2), ([5, 6, 8, 9], 3, 3), ([5], 0, 0)):
        answer = start(tokenizer, sequences, prompt)
        list(answer)
        assert fake.calls[-1] == (position, len(prompt) - position)
        assert answer.cached_tokens == cached
        (kept,) = fake.open_sequences
        assert kept.tokens == prompt


@pytest.mark.parametrize("when", ["prefill", "decode", "consumer"])
def test_an_interruption_keeps_the_cached_prefix(tokenizer: Tokenizer, when: str):
    fake = engine(tokenizer, "abcdef")
    sequences = PrefixCache(fake)
    list(start(tokenizer, sequences, [5, 6, 7, 8]))
    answer = start(tokenizer, sequences, [5, 6, 9])
    with pytest.raises(KeyboardInterrupt):
        if when == "prefill":
            fake.fail = KeyboardInterrupt()
        for piece in answer:
            if when == "decode" and piece == "c":
                fake.fail = KeyboardInterrupt()
            if when == "consumer" and piece == "c":
                raise KeyboardInterrupt
    assert answer.finish_reason == "interrupted"
    answer.close()
    assert len(fake.open_sequences) == 1
    follow_up = start(tokenizer, sequences, [5, 6, 9])
    assert "".join(follow_up) == "cdef"
    assert follow_up.cached_tokens == 2


# ---- several answers ------------------------------------------------------------------------------------------------


def test_an_older_answer_continues_after_others(tokenizer: Tokenizer):
    """Give every answer its own sequence."""
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, "abc"))
    sequences = PrefixCache(fake)
    first, second = start(tokenizer, sequences, [5]), start(tokenizer, sequences, [6])
    assert next(first) == "a"
    assert next(second) == "a"
    assert "".join(start(tokenizer, sequences, [7])) == "abc"
    assert "".join(first) + "".join(second) == "bcbc"
    assert first.text == second.text == "abc"
    assert first.finish_reason == second.finish_reason == "stop"


def test_one_sequence_is_kept_and_the_others_are_closed(tokenizer: Tokenizer):
    fake = engine(tokenizer, "abc")
    sequences = PrefixCache(fake)
    answers = [start(tokenizer, sequences, [number, 9]) for number in range(5)]
    for answer in answers:
        next(answer)
    assert len(fake.open_sequences) == 5
    for answer in answers:
        answer.close()
    (kept,) = fake.open_sequences
    assert kept.tokens[:2] == [4, 9]
    again = start(tokenizer, sequences, [4, 9, 10])
    next(again)
    assert (again.cached_tokens, fake.open_sequences) == (2, [kept])


def test_an_answer_forks_from_a_running_one(tokenizer: Tokenizer):
    """Prefill the common prefix once."""
    fake = engine(tokenizer, "abcdefgh")
    sequences = PrefixCache(fake)
    first = start(tokenizer, sequences, [5, 6, 7, 8])
    next(first)
    second = start(tokenizer, sequences, [5, 6, 7, 9])
    next(second)
    assert (second.cached_tokens, fake.calls) == (3, [(0, 4), (3, 1)])
    assert "".join(first) == "".join(second)
    list(start(tokenizer, sequences, [5]))
    assert len(fake.open_sequences) == 1


def test_the_sequence_with_the_longest_prefix_is_taken(tokenizer: Tokenizer):
    """Choose between the retained sequence and those in use."""
    fake = engine(tokenizer, "abcdef")
    sequences = PrefixCache(fake)
    list(start(tokenizer, sequences, [5, 6, 7]))
    going_on = start(tokenizer, sequences, [8, 9, 10, 11])
    next(going_on)
    list(start(tokenizer, sequences, [5, 6, 7, 12]))
    cached = []
    for prompt in ([8, 9, 10, 13], [5, 6, 7, 14], [8, 9, 10, 15]):
        answer = start(tokenizer, sequences, prompt)
        next(answer)
        cached.append(answer.cached_tokens)
        answer.close()
    assert cached == [3, 0, 3]  # the kept one was given up for the fork
    assert "".join(going_on) == "ef"


def test_a_discarded_answer_gives_its_sequence_back(tokenizer: Tokenizer):
    fake = engine(tokenizer, "abcdef")
    sequences = PrefixCache(fake)
    next(start(tokenizer, sequences, [5, 6, 7]))
    answer = start(tokenizer, sequences, [5, 6, 7, 8])
    next(answer)
    assert answer.cached_tokens == 3
    assert len(fake.open_sequences) == 1


def test_the_common_prefix_excludes_the_last_token():
    """Leave the last token, whose logits are needed."""
    assert [count_common(tokens, [1, 2, 3]) for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 1])] == [
        *(0, 1, 2, 2, 2, 0)
    ]


def test_an_answer_of_a_closed_model_raises(tokenizer: Tokenizer):
    fake = engine(tokenizer, "abc")
    answer = start(tokenizer, PrefixCache(fake), [5])
    assert next(answer) == "a"
    fake.close()
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
def test_a_stop_string_ends_the_answer_before_it(tokenizer: Tokenizer, stops: tuple[str, ...], shown: str):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "hello world")), [5], stop=stops)
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


def test_held_text_is_streamed_at_the_end(tokenizer: Tokenizer):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, "say hel")), [5], stop="hello")
    assert list(answer)[-1] == "hel"
    assert answer.text == "say hel"


def test_penalties_apply_to_the_prompt(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, lambda tokens: 9)
    greedy = SamplingOptions(temperature=0, presence_penalty=100.0)
    (first,) = start(tokenizer, PrefixCache(fake), [5], sampling=greedy, max_tokens=1)
    assert first == tokenizer.decode([9])
    answer = start(tokenizer, PrefixCache(fake), [9], sampling=greedy, max_tokens=1)
    list(answer)
    assert answer.tokens != [9]


@pytest.mark.parametrize("wrong", [{"max_tokens": -2}, {"stop": ("",)}, {"stop": ""}, {"stop": (1,)}], ids=str)
def test_invalid_generation_options_are_refused(wrong: dict):
    with pytest.raises(UsageError):
        GenerationOptions(**wrong)


@pytest.mark.parametrize(("stop", "expected"), [
    ("ab", ("ab",)), (["a", "b"], ["a", "b"]), ((), ()), (5, "stop must be a list of strings, not 5"),
    (["a", ""], "stop must not be empty"), ("", "stop must not be empty"), ([5], "stop must be"),
    (b"ab", "stop must be"),
])  # fmt: skip
def test_stop_takes_a_string_or_a_list_of_strings(stop, expected):
    with pytest.raises(UsageError, match=f"^{expected}") if isinstance(expected, str) else nullcontext():
        assert GenerationOptions(stop=stop).stop == expected


@pytest.mark.parametrize(("most", "overflow", "room", "limit"), [
    (5, None, 9, 5), (5, None, 3, 3), (None, None, 3, 3), (5, "drop-turns", 3, 3), (5, "shift", 3, 5),
    (0, "shift", 3, 0), (None, "shift", 3, sys.maxsize),
])  # fmt: skip
def test_the_token_limit_depends_on_the_overflow_policy(most: int | None, overflow: str | None, room: int, limit: int):
    assert GenerationOptions(max_tokens=most, on_overflow=overflow).compute_limit(room) == limit


def test_a_prompt_without_room_for_an_answer_is_refused():
    PromptTask([1] * 3, None).require_room(4)
    for prompt, error, problem in (
        ([], UsageError, "the prompt is empty: it must have at least one token"),
        ([1] * 4, ContextError, "the prompt has 4 tokens, but the context holds only 4 with the answer"),
    ):
        with pytest.raises(error, match=f"^{problem}$"):
            PromptTask(prompt, None).require_room(4)


class Listening:
    """An engine or sequence that records its listener."""

    def __init__(self, has_draft_head: bool = True, listener: object = None):
        self.has_draft_head, self.listener, self.told = has_draft_head, listener, list[object]()
        self.attach_draft_head, self.detach_listener = (
            lambda sequence: self.told.append(sequence) or "follower",
            lambda: self.told.append(0),
        )


@pytest.mark.parametrize(("speculate", "has_layer", "heard", "lost", "images", "follows", "ends"), [
    ("mtp", True, None, 0, False, True, False), ("auto", True, None, 0, False, True, False),
    ("mtp", False, None, 0, False, True, False), ("auto", False, "x", 0, False, False, True),
    ("auto", False, None, 0, False, False, False), ("off", True, "x", 0, False, False, True),
    ("ngram", True, "x", 0, False, False, True), ("mtp", True, "x", 3, False, False, True),
    ("mtp", True, "x", 0, True, False, False),
])  # fmt: skip
def test_the_mtp_layer_is_attached_where_it_may_pay(
    speculate, has_layer, heard, lost, images, follows, ends, monkeypatch
):
    """Attach the MTP layer if speculation wants it and it may pay."""
    engine, sequence = Listening(has_layer), Listening(listener=heard)
    get_head_budget(engine).charge(lost)
    asking = pending_answer(speculate, sequence=sequence, ids=[1, 2])
    monkeypatch.setattr(leaps, "has_images", lambda ids: images)
    Speculator(engine, resources=ExitStack()).listen(asking)
    assert (engine.told, sequence.told) == ([sequence] * follows, [0] * ends)
    asking.sequence = ShiftedSequence.__new__(ShiftedSequence)
    Speculator(engine, resources=ExitStack()).listen(asking)
    assert engine.told == [sequence] * follows


@pytest.mark.parametrize(
    ("stops", "before", "expected"),
    [((), "ab", "abc"), (("bc",), "a", "a"), (("z",), "ab", "abc"), (("cd",), "ab", "abc")],
)
def test_text_held_by_the_tool_call_parser_is_streamed_at_the_end(
    tokenizer: Tokenizer, stops: tuple[str, ...], before: str, expected: str
):
    """Hold the very last character."""
    held = [""]

    def push(text: str) -> list[TextPart]:
        *ready, held[0] = [*held[0], *text]
        return [TextPart(ANSWER, "".join(ready))]

    reader = SimpleNamespace(is_marked=False, push=push, flush=lambda is_end: [TextPart(ANSWER, held[0])])
    calls = SimpleNamespace(
        create_parser=lambda: reader, make_json_parser=lambda: None, shown={}, plain={}, use=ToolUse([])
    )
    transcript = Transcript(tokenizer.stream(), stops, calls=calls)
    parts = [part for token in tokenizer.encode("abc") for part in transcript.push(token)]
    assert transcript.text == before
    parts += transcript.flush()
    assert transcript.text == "".join(part.text for part in parts) == expected


@pytest.mark.parametrize(("text", "context", "most", "is_full"), [
    ("abc", 512, None, False), ("abc", 512, 9, False), ("abc", 512, 3, False), ("abcdef", 512, 4, False),
    ("abcdefghijkl", 9, None, True), ("abcdefghijkl", 9, 9, True), ("abcdefghijkl", 9, 8, False),
])  # fmt: skip
def test_is_full_tells_whether_the_context_ended_the_answer(
    tokenizer: Tokenizer, text: str, context: int, most: int, is_full: bool
):
    answer = start(tokenizer, PrefixCache(engine(tokenizer, text, context)), [5], max_tokens=most)
    assert "".join(answer) in text and answer.is_full is is_full


@pytest.mark.parametrize(("text", "most", "drafts"), [
    ("abcdef", 1, []), ("abcdef", 2, [0]), ("abcdef", 4, [2, 1, 0]), ("", 4, []), ("ab", 9, [7, 6]),
])  # fmt: skip
def test_drafts_are_no_longer_than_the_remaining_answer(
    tokenizer: Tokenizer, text: str, most: int, drafts: list[int], monkeypatch
):
    """Draft nothing for an answer of one token."""
    asked, answers, learnt = [], [], []
    guesses = SimpleNamespace(draft=lambda most, others: asked.append(most) or [], push=learnt.append)
    monkeypatch.setattr(Speculator, "_choose_proposers", lambda speculator, answer: answers.append(answer) or guesses)
    answer = start(tokenizer, PrefixCache(engine(tokenizer, text)), [5], max_tokens=most)
    assert "".join(answer) == text[:most]
    assert (asked, len(answers)) == (drafts, bool(drafts))
    assert [token for drawn in learnt for token in drawn] == answer.tokens[1:] and len(learnt) == len(drafts)


class Drafting(Drafter):
    """A draft model that proposes what it was given."""

    def open_proposer(self, *arguments):
        return nullcontext(("drafter", *arguments))

    def collect(self):
        pass


@pytest.mark.parametrize("speculate", ["auto", "ngram", Drafting()], ids=["auto", "ngram", "model"])
@pytest.mark.parametrize("begin", [None, 0, 2])
@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize("is_alone", [False, True])
def test_free_proposers_come_first_and_a_draft_model_needs_a_single_answer(
    speculate, begin: int | None, is_guided: bool, is_alone: bool, monkeypatch
):
    for name in ("DraftModelProposer", "make_text_proposers", "ForcedTokensProposer"):
        monkeypatch.setattr(leaps, name, lambda *arguments, name=name: (name, *arguments))
    monkeypatch.setattr(leaps, "DraftSelector", lambda proposers, costs: proposers)
    monkeypatch.setattr(leaps, "has_images", lambda ids: False)
    engine, guide = Listening(False), SimpleNamespace(is_needed=is_guided)
    follower = None if begin is None else SimpleNamespace(begin=begin)
    asking = pending_answer(speculate, ids=[5, -3, 6, 7], sequence=Listening(listener=follower), guide=guide)
    asking.sampler, asking.end_ids = SimpleNamespace(vocab=9), "ends"
    with ExitStack() as held:
        started = Speculator(engine, "written", held if is_alone else None)._choose_proposers(asking)
    tokens, arguments = [5, 6, 7], (asking.sampler, "ends", guide)
    expected = [("ForcedTokensProposer", guide)] * is_guided + ["make_text_proposers", tokens, "written"]
    if isinstance(speculate, Drafter) and is_alone:
        expected.append(("drafter", tokens, *arguments))
    if begin is not None:
        known, account = tokens[begin:], get_head_budget(engine)
        expected.append(("DraftModelProposer", follower, known, asking.sampler, 9, "ends", guide, account))
    assert started == expected


@pytest.mark.parametrize(("speculate", "length", "is_kept"), [
    ("auto", 512, False), ("ngram", 513, True), ("off", 513, None), (None, 5, None),
])  # fmt: skip
def test_long_answers_are_added_to_the_ngram_cache(speculate: str | None, length: int, is_kept: bool | None):
    added, ids = list[tuple](), [5] * length + [6, 7]
    written: Any = (
        SimpleNamespace(add=lambda *arguments: added.append(arguments), collect=lambda: None) if speculate else None
    )
    answer = pending_answer(speculate, ids=ids, prompt=ids[:-2], cached_tokens=4, sequence=Listening(), segments=None)
    PrefixCache(FakeEngine(9, lambda tokens: 0), None, written).give_back(answer)
    assert answer.sequence is None and added == ([] if is_kept is None else [(ids, 4, is_kept)])


@pytest.mark.parametrize(("speculate", "others", "reads", "has_layer", "lost", "images", "listens"), [
    ("auto", 0, True, True, 0, False, True), ("mtp", 3, True, True, 0, False, True),
    ("mtp", 4, True, True, 0, False, False),
    ("ngram", 0, True, True, 0, False, False), ("off", 0, True, True, 0, False, False),
    ("auto", 0, False, True, 0, False, False), ("auto", 0, True, False, 0, False, False),
    ("auto", 0, True, True, 3, False, False), ("auto", 0, True, True, 0, True, False),
])  # fmt: skip
def test_the_mtp_layer_is_attached_beside_other_answers(
    speculate, others, reads, has_layer, lost, images, listens, monkeypatch
):
    engine = Listening(has_layer)
    get_head_budget(engine).charge(lost)
    monkeypatch.setattr(leaps, "has_images", lambda ids: images)
    sequence = Listening()
    asking = pending_answer(speculate, sequence=sequence if reads else None, ids=[1, 2])
    Speculator(engine).listen(asking, others)
    assert engine.told == [sequence] * listens


def pending_answer(speculate: Any, **more: Any) -> Any:
    """Return an unfinished answer."""
    return SimpleNamespace(
        **{"options": SimpleNamespace(speculate=speculate), "sequence": None, "number": 0, "ids": [3], **more}
    )


def test_drafts_of_several_answers_share_the_room():
    """Draft for few answers only."""
    guesses, off, auto, limits_of_drafts = (
        Speculator(Listening()),
        pending_answer("off"),
        pending_answer("auto"),
        list[tuple](),
    )
    assert [span.draft for span in guesses.add_drafts([auto] * 5)] == [[]] * 5 and auto.guesses is None
    several = [pending_answer("auto"), off, pending_answer("ngram")]
    for answering, left in ((several[0], 5), (several[2], 3)):
        answering.max_draft_length, answering.guesses = (
            left - 1,
            SimpleNamespace(draft=lambda *limits: limits_of_drafts.append(limits) or [7, 8]),
        )
    assert [span.ids for span in guesses.add_drafts(several)] == [[3, 7, 8], [3], [3, 7, 8]]
    assert limits_of_drafts == [(4, 2), (2, 4)]
