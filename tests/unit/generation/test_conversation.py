"""Test undone turns, branches, continued answers and restored conversations by what they prefill."""

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
from localllm.generation.constraints.constraint import make_constraint
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


def count_prefilled(fake: FakeEngine, session: Session, question: str) -> int:
    """Ask and return the number of prompt tokens that were prefilled."""
    answer = session.ask(question, GREEDY)
    "".join(answer)
    return len(answer.prompt) - answer.cached_tokens


def test_undoing_turns_keeps_the_rest_prefilled(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    costs = [count_prefilled(fake, session, f"question {number}") for number in range(6)]
    assert len(fake.open_sequences[0].tokens) > PRECISE_TOKENS
    for number in (5, 4, 3):
        assert session.undo() == f"question {number}"
    assert count_prefilled(fake, session, "question 3") == costs[3]
    assert session.undo() == "question 3"
    assert session.messages[-1]["content"] == f"Answer 2. {LONG_TEXT}"
    assert count_prefilled(fake, session, "question X") == costs[3]
    assert len(fake.open_sequences) == 1, "nothing is kept for it"


def test_undo_without_a_turn_returns_none(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "yes")
    session.system = "Be brief."
    assert session.undo() is None
    with pytest.raises(UsageError, match="no answer to continue"):
        session.resume(GREEDY)
    list(session.ask("Hi", GREEDY))
    assert (session.undo(), session.undo()) == ("Hi", None)
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_branches_reuse_their_common_prefix(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    costs = [count_prefilled(fake, session, f"question {number}") for number in range(3)]
    trunk = session.messages
    session.cache.park()
    assert count_prefilled(fake, session, "question 3") == costs[2]
    branch = session.messages
    for messages in (trunk, branch, trunk):
        session.cache.park()
        session.messages = messages
        assert count_prefilled(fake, session, "question 9") == costs[2]
    for _ in range(20):
        session.cache.park()
    assert len(fake.open_sequences) == 1 + waiting.PARKED


def test_returning_to_a_branch_takes_its_parked_sequence(tokenizer: Tokenizer):
    """Hold no second copy in memory."""
    fake, session = conversation(tokenizer, *(f"Answer {number}. {LONG_TEXT}" for number in range(8)))
    for number in range(3):
        count_prefilled(fake, session, f"question {number}")
    trunk = session.messages
    session.cache.park()
    session.messages = []
    count_prefilled(fake, session, "something else")
    assert len(fake.open_sequences) == 2
    session.messages = trunk
    count_prefilled(fake, session, "question 9")
    assert len(fake.open_sequences) == 1


def test_parked_sequences_leave_room_for_a_whole_context(tokenizer: Tokenizer, monkeypatch):
    fake, session = conversation(tokenizer, "yes")
    count_prefilled(fake, session, "Hi")
    used = len(fake.open_sequences[0].tokens)
    for places, held in ((used + fake.context - 1, 1), (used + fake.context, 2)):
        monkeypatch.setattr(fake, "get_cache_usage", lambda places=places: (used, places))
        session.cache.park()
        assert len(fake.open_sequences) == held


def test_resume_continues_an_answer(tokenizer: Tokenizer):
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


def test_resume_refuses_a_constrained_answer(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "aaaa")
    list(session.ask("Hi", SHORT))
    with pytest.raises(UsageError, match="with a regex cannot be continued"):
        session.resume(replace(SHORT, constraint=make_constraint(regex="a+")))
    assert session.messages[-1]["content"] == "aaaa"


def test_resume_continues_a_reasoning(tokenizer: Tokenizer):
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, "<think>Hm, well.</think>Four."), 4096)
    session = Session(PrefixCache(fake), tokenizer, CHATML + "{# </think> #}")
    list(session.ask("2 + 2", GenerationOptions(max_tokens=9, sampling=SamplingOptions(temperature=0))))
    assert session.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert "".join(session.resume(GREEDY)) == "Four."
    message = session.messages[-1]
    assert (message["content"], message["reasoning_content"].replace(" ", "")) == ("Four.", "Hm,well.")


@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_an_undone_turn_leaves_no_trace(model: str, request):
    """Compare to the bit, without drafts.

    How many drafted tokens share a step depends on time, and attention of ten tokens sums in another order than that
    of six and of four.
    """
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
def test_a_conversation_of_an_earlier_process_is_restored(model: str, request, tmp_path: Path, monkeypatch):
    """Prefill only the new tokens, and read the others from files."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path / "prefixes")
    path = request.getfixturevalue(model)
    with localllm.open(path, threads=1) as opened:
        session = opened.session
        for number in range(4):
            latest = session.ask(f"{LONG_TEXT} {number}", SHORT)
            list(latest)
        messages, held = session.messages, len(latest.prompt) + len(latest.tokens)
        session.cache.write_conversation()
        answer = session.ask("And then?", SHORT)
        text = "".join(answer)
    assert held > 1024
    with localllm.open(path, threads=1) as opened:
        session = opened.session
        session.messages = messages
        session.earlier = held
        again = session.ask("And then?", SHORT)
        assert "".join(again) == text
        assert again.cached_tokens >= (1024 if model == "tiny" else 512)
        assert session.undo() == "And then?"
        other = session.ask("What else?", SHORT)
        list(other)
        assert other.cached_tokens >= again.cached_tokens
    with localllm.open(path, threads=1) as opened:
        unaware = opened.session.chat([*messages, {"role": "user", "content": "And then?"}], SHORT)
        list(unaware)
        assert unaware.cached_tokens == 0, "other prompts do not go on there"
