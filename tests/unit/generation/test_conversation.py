"""Turns taken back, branches, answers that go on, conversations of an earlier process: what is read for them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from pooled import acquire
from tiny_hybrid import write_tiny_hybrid
from tiny_model import CHATML, write_tiny_model

import localllm
from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import UsageError
from localllm.files.cache import prefix_files
from localllm.generation import prefix_cache as waiting
from localllm.generation.constraints.constraint import constraint_of
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.session import Session
from localllm.text.tokenizer import Tokenizer

GREEDY = GenerationOptions(sampling=SamplingOptions(temperature=0))
SHORT = GenerationOptions(max_tokens=12, sampling=SamplingOptions(temperature=0))
LONG_TEXT = "It was a long story. " * 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=4096)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("models") / "hybrid.gguf", context=4096)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny)


def conversation(tokenizer: Tokenizer, *answers: str) -> tuple[FakeEngine, Session]:
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, *answers), 4096)
    return fake, Session(PrefixCache(fake), tokenizer)


def read(fake: FakeEngine, session: Session, question: str) -> int:
    """Ask; how many of the prompt's tokens were read."""
    answer = session.ask(question, GREEDY)
    "".join(answer)
    return len(answer.prompt) - answer.cached_tokens


def test_what_stays_is_not_read_again(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    costs = [read(fake, session, f"question {number}") for number in range(6)]
    assert len(fake.open_sequences[0].tokens) > PRECISE_TOKENS
    for number in (5, 4, 3):
        assert session.undo() == f"question {number}"
    assert read(fake, session, "question 3") == costs[3]
    assert session.undo() == "question 3"
    assert session.messages[-1]["content"] == f"Answer 2. {LONG_TEXT}"
    assert read(fake, session, "question X") == costs[3]
    assert len(fake.open_sequences) == 1, "nothing is kept for it"


def test_nothing_to_take_back(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "yes")
    session.system = "Be brief."
    assert session.undo() is None
    with pytest.raises(UsageError, match="no answer to continue"):
        session.resume(GREEDY)
    list(session.ask("Hi", GREEDY))
    assert (session.undo(), session.undo()) == ("Hi", None)
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_branches_are_not_read_again(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    costs = [read(fake, session, f"question {number}") for number in range(3)]
    trunk = session.messages
    session.cache.park()
    assert read(fake, session, "question 3") == costs[2]
    branch = session.messages
    for messages in (trunk, branch, trunk):
        session.cache.park()
        session.messages = messages
        assert read(fake, session, "question 9") == costs[2]
    for _ in range(20):
        session.cache.park()
    assert len(fake.open_sequences) == 1 + waiting.PARKED


def test_who_comes_back_takes_what_was_held(tokenizer: Tokenizer):
    """It waits no longer: another copy of it would take its memory."""
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    for number in range(3):
        read(fake, session, f"question {number}")
    trunk = session.messages
    session.cache.park()
    session.messages = []
    read(fake, session, "something else")
    assert len(fake.open_sequences) == 2
    session.messages = trunk
    read(fake, session, "question 9")
    assert len(fake.open_sequences) == 1


def test_what_is_held_leaves_room_for_a_whole_context(tokenizer: Tokenizer, monkeypatch):
    fake, session = conversation(tokenizer, "yes")
    read(fake, session, "Hi")
    used = len(fake.open_sequences[0].tokens)
    for places, held in ((used + fake.context - 1, 1), (used + fake.context, 2)):
        monkeypatch.setattr(fake, "cache_usage", lambda places=places: (used, places))
        session.cache.park()
        assert len(fake.open_sequences) == held


def test_an_answer_goes_on(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, "abcdefghijkl", "next")
    three = GenerationOptions(max_tokens=3, sampling=SamplingOptions(temperature=0))
    assert "".join(session.ask("Hi", three)) == "abc"
    fake.calls.clear()
    assert "".join(session.resume(three)) == "def"
    assert fake.calls[0][1] <= 2, "the answer's last token, which was not read yet"
    assert session.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "abcdef"}]
    again = Session(PrefixCache(FakeEngine(tokenizer.vocab_size, fake.say, 4096)), tokenizer)
    again.messages = session.messages
    assert "".join(again.resume(GREEDY)) == "ghijkl", "of an answer that another process has given"
    assert "".join(again.resume(GREEDY)) == "" and again.messages[-1]["content"] == "abcdefghijkl"
    assert "".join(again.ask("More", GREEDY)) == "next"
    assert again.undo() == "More"
    assert again.messages[-1]["content"] == "abcdefghijkl"


def test_an_answer_that_must_look_like_something_does_not_go_on(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "aaaa")
    list(session.ask("Hi", SHORT))
    with pytest.raises(UsageError, match="with a regex cannot be continued"):
        session.resume(replace(SHORT, constraint=constraint_of(regex="a+")))
    assert session.messages[-1]["content"] == "aaaa"


def test_a_thought_goes_on(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, "<think>Hm, well.</think>Four."), 4096)
    session = Session(PrefixCache(fake), tokenizer, CHATML + "{# </think> #}")
    list(session.ask("2 + 2", GenerationOptions(max_tokens=9, sampling=SamplingOptions(temperature=0))))
    assert session.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert "".join(session.resume(GREEDY)) == "Four."
    said = session.messages[-1]
    assert (said["content"], said["reasoning_content"].replace(" ", "")) == ("Four.", "Hm,well.")


@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_it_is_as_if_the_turn_had_not_been(model: str, request):
    """To the bit: where the model goes on is what it was. Without guesses: how many are read together is a matter of
    time, and attention of ten tokens has another order of sums than that of six and of four."""
    path = request.getfixturevalue(model)
    rows, plain = [], replace(SHORT, speculate="off")
    for detour in (False, True):
        with localllm.open(path, threads=1) as opened:
            session = opened.session
            for number in range(2):
                list(session.ask(f"{LONG_TEXT} {number}", plain))
            if detour:
                list(session.ask(f"A detour. {LONG_TEXT}", plain))
                session.undo()
            answer = session.ask("And then?", plain)
            list(answer)
            assert len(answer.prompt) - answer.cached_tokens < 60
            with acquire(session.cache, [*answer.prompt, *answer.tokens, 5]) as (sequence, _):
                rows.append((answer.tokens, sequence.append([5])))
    assert rows[0][0] == rows[1][0]
    np.testing.assert_array_equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_a_conversation_of_an_earlier_process(model: str, request, tmp_path: Path, monkeypatch):
    """Read turn by turn, kept in files, and gone on with by a process that reads only what is new."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "folder", lambda: tmp_path / "prefixes")
    path = request.getfixturevalue(model)
    with localllm.open(path, threads=1) as opened:
        session = opened.session
        for number in range(4):
            latest = session.ask(f"{LONG_TEXT} {number}", SHORT)
            list(latest)
        messages, held = session.messages, len(latest.prompt) + len(latest.tokens)
        session.cache.write_conversation()
        answer = session.ask("And then?", SHORT)
        said = "".join(answer)
    assert held > 1024
    with localllm.open(path, threads=1) as opened:
        session = opened.session
        session.messages = messages
        session.earlier = held
        again = session.ask("And then?", SHORT)
        assert "".join(again) == said
        assert again.cached_tokens >= (1024 if model == "tiny" else 512)
        assert session.undo() == "And then?"
        other = session.ask("What else?", SHORT)
        list(other)
        assert other.cached_tokens >= again.cached_tokens
    with localllm.open(path, threads=1) as opened:
        unaware = opened.session.chat([*messages, {"role": "user", "content": "And then?"}], SHORT)
        list(unaware)
        assert unaware.cached_tokens == 0, "other prompts do not go on there"
