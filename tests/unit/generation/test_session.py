"""Test sessions: what the model is given, what is not prefilled twice, and what is dropped."""

import gc
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, saying
from tiny_model import damage, write_tiny_model

import localllm
from localllm.engine.image_tokens import ImageEmbedding
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, LocalllmError, ModelError, UsageError
from localllm.generation import image_encoder as eye
from localllm.generation.beam_search import Answer
from localllm.generation.constraints.constraint import Constraint
from localllm.generation.conversation import AnswerDefaults, Conversation, PartialAnswer, has_calls
from localllm.generation.image_encoder import ImageEncoder
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import SamplingOptions
from localllm.generation.scheduler import Generation
from localllm.generation.session import EncodedPrompt, Session, refuse_image
from localllm.generation.vision_adapter import VisionAdapter
from localllm.text import sandbox
from localllm.text.tokenizer import Tokenizer

GREEDY = GenerationOptions(sampling=SamplingOptions(temperature=0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny)


def conversation(tokenizer: Tokenizer, *answers: str, context: int = 512) -> tuple[FakeEngine, Session]:
    fake = FakeEngine(tokenizer.vocab_size, saying(tokenizer, *answers), context)
    return fake, Session(PrefixCache(fake), tokenizer)


def test_a_prompt_beyond_the_limits_of_templates_exceeds_the_context(tokenizer: Tokenizer, monkeypatch):
    text = "word " * 100
    small, large = (conversation(tokenizer, "Hi", context=context)[1] for context in (64, 4096))
    assert small.template and large.template  # whose checks need the usual limit
    monkeypatch.setattr(sandbox, "MAX_LENGTH", 200)
    length = len(tokenizer.encode(text))
    with pytest.raises(
        ContextError, match=f"the prompt has over {length} tokens, but the context holds only 64"
    ) as error:
        small.chat([{"role": "user", "content": text}], GREEDY)
    assert error.value.excess == length - 64 + 1
    with pytest.raises(ModelError, match="the chat template was stopped"):
        large.chat([{"role": "user", "content": text}], GREEDY)


def test_a_turn_prefills_only_its_own_tokens(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, "Hello!", "Fine.")
    session.system = "Be brief."
    assert "".join(session.ask("Hi", GREEDY)) == "Hello!"
    read = len(fake.open_sequences[0].tokens)
    answer = session.ask("How are you?", GREEDY)
    assert "".join(answer) == "Fine."
    assert answer.cached_tokens == read
    assert tokenizer.decode(answer.prompt, special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [message["content"] for message in session.messages] == [
        "Be brief.",
        "Hi",
        "Hello!",
        "How are you?",
        "Fine.",
    ]


def test_an_interrupted_answer_stays_in_the_conversation(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "abcdef", "ok")
    answer = session.ask("Hi", GREEDY)
    assert [next(answer), next(answer)] == ["a", "b"]
    assert session.messages[-1] == {"role": "assistant", "content": "ab"}
    assert "".join(session.ask("Go on", GREEDY)) == "ok"
    assert [message["content"] for message in session.messages] == ["Hi", "ab", "Go on", "ok"]


def test_a_question_without_an_answer_is_withdrawn(tokenizer: Tokenizer):
    fake, session = conversation(tokenizer, "one", "two")
    "".join(session.ask("first", GREEDY))
    fake.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        next(session.ask("second", GREEDY))
    assert [message["content"] for message in session.messages] == ["first", "one"]
    assert "".join(session.ask("third", GREEDY)) == "two"


def test_an_empty_answer_stays_in_the_conversation(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "")
    assert list(session.ask("Hi", GREEDY)) == []
    assert session.messages[-1] == {"role": "assistant", "content": ""}


def test_clear_keeps_the_system_message(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "yes")
    session.system = "S"
    "".join(session.ask("Hi", GREEDY))
    session.clear()
    assert session.messages == [{"role": "system", "content": "S"}]


def test_the_oldest_turns_are_dropped(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "an answer of thirty characters", context=400)
    session.system = "Remember me."
    dropped = []
    for number in range(12):
        "".join(session.ask(f"question {number}", GREEDY))
        dropped.append(session.forgotten)
        contents = [message["content"] for message in session.messages]
        assert contents[0] == "Remember me."
        assert contents[-2] == f"question {number}"
        assert len(session.encode_chat(session.messages)) < 400
    assert sum(dropped) == 12 - (len(session.messages) - 1) // 2
    assert 0 < sum(count > 0 for count in dropped) <= 4, "not at every turn: the rest must be read again"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_conversation_without_a_turn_to_drop_raises(tokenizer: Tokenizer, role: str):
    _, session = conversation(tokenizer, "fine", context=200)
    with pytest.raises(ContextError, match="holds only 200 "):
        session.chat([{"role": role, "content": "x" * 200}], GenerationOptions(on_overflow="drop-turns"))


def test_a_message_too_long_for_the_context_changes_nothing(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "fine", context=200)
    "".join(session.ask("Hi", GREEDY))
    before = session.messages
    with pytest.raises(ContextError, match=r"2\d\d tokens.*holds only 200 "):
        session.ask("x" * 200, GREEDY)
    assert session.messages == before
    assert "".join(session.ask("Hi again", GREEDY)) == "fine"


def test_chat_does_not_touch_the_conversation(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "yes")
    "".join(session.ask("Hi", GREEDY))
    before = session.messages
    assert "".join(session.chat([{"role": "user", "content": "Other"}], GREEDY)) == "yes"
    assert session.messages == before


@pytest.mark.parametrize("wrong", ["Hi", {"content": "Hi"}, {"role": 1, "content": "Hi"}], ids=str)
def test_invalid_messages_are_refused(tokenizer: Tokenizer, wrong):
    _, session = conversation(tokenizer, "yes")
    with pytest.raises(UsageError, match="message"):
        session.chat([wrong], GREEDY)


def test_complete_takes_text_or_ids(tokenizer: Tokenizer):
    _, session = conversation(tokenizer, "xy")
    assert "".join(session.complete("a", GREEDY)) == "xy"
    assert "".join(session.complete(tokenizer.encode("a"), GREEDY)) == "xy"
    with pytest.raises(UsageError, match="empty"):
        session.complete("", GREEDY)


# The Python API with a real file, on the reference backend.


def test_a_model_tokenizes_computes_logits_and_generates(tiny: Path):
    with localllm.open(tiny, context=64, kv_type="f32", backend="reference") as model:
        assert (model.arch, model.format, model.context, model.trained_context) == ("llama", "F32", 64, 512)
        ids = model.tokenize("<|im_start|>hello", special=True)
        assert ids[0] == 1
        assert model.detokenize(ids) == "hello"
        logits = model.logits(ids)
        assert (logits.shape, logits.dtype) == ((len(ids), model.tokenizer.vocab_size), np.float32)
        answer = model.generate("hello", max_tokens=5, temperature=0)
        pieces = list(answer)
        assert all(isinstance(piece, str) for piece in pieces)
        assert answer.tokens[0] == int(model.logits(model.tokenize("hello"))[-1].argmax())
        again = model.generate(model.tokenize("hello"), max_tokens=5, temperature=0)
        assert list(again) == pieces
        chat = model.chat([{"role": "user", "content": "Hi"}], max_tokens=5, seed=1)
        assert "".join(chat) == chat.text
        assert chat.finish_reason in ("length", "stop")
    with pytest.raises(LocalllmError, match="closed"):
        model.logits(ids)


def test_several_answers_of_one_model_continue_independently(tiny: Path):
    """Compare each with the one generated alone."""
    with localllm.open(tiny, backend="reference") as model:
        alone = ["".join(model.generate(prompt, max_tokens=6, temperature=0)) for prompt in ("hello", "world")]
        answers = [model.generate(prompt, max_tokens=6, temperature=0) for prompt in ("hello", "world")]
        for answer in answers:
            next(answer)
        model.logits([1, 2, 3])
        for answer in answers:
            list(answer)
        assert [answer.text for answer in answers] == alone


def test_discarded_answers_release_their_sequences(tiny: Path):
    """Queue the release at once; only cycles wait for the garbage collector."""
    with localllm.open(tiny, backend="reference") as model:
        sequences = model.session.cache

        def begin() -> Generation:
            answer = model.generate("hello", max_tokens=6, temperature=0)
            next(answer)
            return answer

        expected = "".join(model.generate("hello", max_tokens=6, temperature=0))

        gc.disable()
        try:
            for _ in range(3):
                begin()
                assert len(sequences._released) == 1
                sequences.collect()
                assert len(sequences._busy) == 0 and sequences.idle
            cycle = [begin()]
            cycle.append(cycle)
            assert len(sequences._busy) == 1
            del cycle
            with sequences.lock, model.engine.lock:
                collector = threading.Thread(target=gc.collect, daemon=True)
                collector.start()
                collector.join(10)
            assert not collector.is_alive(), "it waits for a lock that its own thread could hold"
        finally:
            gc.enable()
        assert "".join(model.generate("hello", max_tokens=6, temperature=0)) == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sequences_of_a_model_step_together_and_fork(tiny: Path, backend: str):
    """On CPUs with AMX, `logits` multiplies in tiles, a step does not."""
    with localllm.open(tiny, kv_type="f32", backend=backend) as model:
        first, second = model.sequence(), model.sequence()
        rows = model.step([(first, [5, 6]), (second, [7])])
        np.testing.assert_allclose(rows[0], model.logits([5, 6])[-1:], rtol=1e-4, atol=2e-4)
        fork = first.fork()
        rows = model.step([(fork, [8]), (first, [9])])
        np.testing.assert_allclose(rows[0], model.logits([5, 6, 8])[-1:], rtol=1e-4, atol=2e-4)
        assert (first.tokens, second.tokens, fork.tokens) == ([5, 6, 9], [7], [5, 6, 8])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_of_a_damaged_model_raise(tmp_path: Path, backend: str):
    path = damage(write_tiny_model(tmp_path / "tiny.gguf"))
    with localllm.open(path, backend=backend) as model:
        for use in (
            lambda: model.logits([5]),
            lambda: model.sequence().append([5]),
            lambda: model.step([(model.sequence(), [5])]),
            lambda: next(model.generate("Hi")),
            lambda: next(model.chat([{"role": "user", "content": "Hi"}])),
        ):
            with pytest.raises(ModelError, match=r"tiny\.gguf: .*not finite"):
                use()


def test_context_defaults_to_the_trained_one(tiny: Path):
    for asked, expected in ((None, 512), (0, 512), (100, 100), (1000, 1000)):
        with localllm.open(tiny, context=asked, backend="reference") as model:
            assert model.context == expected


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"context": -1}, {"kv_type": "f8"}, {"backend": "tpu"}], ids=str)
def test_invalid_arguments_of_open_are_refused(tiny: Path, wrong: dict):
    with pytest.raises(UsageError):
        localllm.open(tiny, **{"backend": "reference", **wrong})


def test_invalid_arguments_of_methods_are_refused(tiny: Path):
    with localllm.open(tiny, backend="reference") as model:
        with pytest.raises(UsageError, match="warmth"):
            model.generate("Hi", warmth=1)  # type: ignore[call-arg]
        with pytest.raises(UsageError):
            model.logits([10**6])
        with pytest.raises(UsageError):
            model.logits([-1])
        with pytest.raises(UsageError):
            model.logits([])
        with pytest.raises(UsageError, match="the prompt must be"):
            list(model.map([3]))
        with pytest.raises(ContextError):
            model.logits([5] * 5000)
        with pytest.raises(UsageError):
            model.detokenize([10**6])


def test_opening_a_missing_file_raises_model_error(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no\.gguf"):
        localllm.open(tmp_path / "no.gguf")


def test_the_package_exports_its_public_names():
    assert localllm.Tokenizer is Tokenizer
    assert localllm.builtin_model().name == "guide.gguf"
    assert issubclass(localllm.ContextError, localllm.LocalllmError)
    with pytest.raises(AttributeError):
        _ = localllm.nothing
    assert set(localllm.__all__) <= set(dir(localllm)) | {"open", "Model", "Tokenizer", "__version__"}


@pytest.mark.parametrize(("template", "stop", "expected"), [
    ("plain", (), "I am."), ("plain", ("am",), "I "), ("chatml", (), "I am.\nUser: And who am I?"),
])  # fmt: skip
def test_a_plain_conversation_stops_before_the_users_turn(tokenizer: Tokenizer, template, stop, expected):
    """Cut a base model's text where the user's name begins."""
    script, read = [*tokenizer.encode("I am.\nUser: And who am I?"), tokenizer.eos_id], list[int]()

    def go_on(tokens: list[int]) -> int | None:
        read.append(len(tokens))
        return script[min(len(tokens) - read[0], len(script) - 1)]

    session = Session(PrefixCache(FakeEngine(tokenizer.vocab_size, go_on, 512)), tokenizer, template)
    assert "".join(session.ask("Are you?", replace(GREEDY, stop=stop))) == expected


def test_hold_parks_and_leave_writes_the_conversation(tokenizer: Tokenizer):
    heard = list[str]()
    kept = SimpleNamespace(park=lambda: heard.append("hold"), write_conversation=lambda: heard.append("write"))
    session = Session(kept, tokenizer)
    session.park()
    assert heard == ["hold"]
    session.leave()
    assert heard == ["hold", "write"]
    assert session.count("Hello") == len(tokenizer.encode("Hello")) > 0
    other = Conversation()
    assert (other.park(), other.leave(), other.warning, other.is_single_turn, other.count("a b")) == (
        None, None, None, False, 0,
    )  # fmt: skip
    assert (other.messages, other.undo(), other.forgotten, other.earlier) == ([], None, 0, 0)


def test_images_need_a_projector_and_tool_messages_belong_to_the_turn():
    with pytest.raises(
        UsageError, match=r"^this model does not accept images: use a model with a projector \(mmproj\)$"
    ):
        refuse_image("x.png")
    calls = {"role": "assistant", "content": None, "tool_calls": [{}]}
    for message, expected in (
        (calls, True), ({"role": "tool", "content": "5"}, True), ({"role": "user", "content": "Hi"}, False),
        ({"role": "assistant", "content": "", "tool_calls": []}, False), ("Hi", False), ({}, False),
    ):  # fmt: skip
        assert has_calls(message) is expected


@pytest.mark.parametrize(("latest", "options", "problem"), [
    (None, {}, "there is no answer to continue"),
    ({"role": "user", "content": "Hi"}, {}, "there is no answer to continue"),
    ({"role": "assistant", "content": "a", "tool_calls": [{}]}, {}, "an answer with a tool call cannot be continued"),
    ({"role": "assistant", "content": "a"}, {"constraint": Constraint.from_regex("a")},
     "an answer with a regex cannot be continued"),
])  # fmt: skip
def test_resume_refuses_answers_that_cannot_continue(
    tokenizer: Tokenizer, latest: dict | None, options: dict, problem: str
):
    session = Session(PrefixCache(FakeEngine(tokenizer.vocab_size, saying(tokenizer, "b"))), tokenizer)
    session._history = [] if latest is None else [{"role": "user", "content": "Hi"}, latest]
    with pytest.raises(UsageError, match=f"^{problem}"):
        session.resume(GenerationOptions(**options))


class Scripted(Conversation):
    """A conversation with known answers that drops all but the last messages; `heard` records its calls."""

    most = 4

    def __init__(self, *answers: SimpleNamespace):
        super().__init__()
        self.answers, self.heard = iter(answers), list[tuple]()

    def _start_answer(self, system, history, options, is_own):
        self.heard.append((system, history, is_own))
        return history[-self.most :], next(self.answers)


def answered(text: str = "", thinking: str = "", calls: tuple = (), reason: str = "interrupted") -> SimpleNamespace:
    answer = SimpleNamespace(text=text, thinking=thinking, calls=calls, finish_reason=reason, closed=0)
    answer.message, answer.close = lambda: {"role": "assistant", "x": 1}, lambda: setattr(answer, "closed", 1)
    return answer


ASKED, RESULT = {"role": "user", "content": "Hi"}, {"role": "tool", "content": "5"}


@pytest.mark.parametrize(("answer", "expected_message"), [
    (answered("a"), {"content": "a"}), (answered("", "b", reason="stop"), {"content": "", "reasoning_content": "b"}),
    (answered("a", "b"), {"content": "a", "reasoning_content": "b"}), (answered("", "b"), None), (answered(), None),
    (answered(calls=("call",)), {"content": ""}), (answered(reason="length"), {"content": ""}),
])  # fmt: skip
def test_an_answer_leaves_its_message_and_a_withdrawn_one_none(answer: SimpleNamespace, expected_message: dict | None):
    """Withdraw a question whose answer had not begun, but keep tool results."""
    expected = [] if expected_message is None else [{"role": "assistant", "x": 1, **expected_message}]
    for message, stays in ((ASKED, expected_message is not None), (RESULT, True)):
        turns = Scripted(answer, answered())
        assert turns.continue_with([message]) is answer and turns.heard == [([], [message], True)]
        assert turns.messages == [message] * stays + expected
        turns.ask("And?", images=["x.png"])
        shown = {"role": "user", "content": "And?", "images": ["x.png"]}
        assert turns.heard[1][1] == [message] * stays + expected + [shown] and answer.closed


def test_turns_can_be_undone_and_set():
    turns = Scripted(answered("a"), answered("b"), answered("c"))
    assert turns.undo() is None and (turns.count("x"), turns.warning, turns.is_single_turn) == (0, None, False)
    turns.messages = [{"role": "system", "content": "S"}, ASKED]
    assert (turns.system, turns._history) == ("S", [ASKED])
    turns.ask("more")
    assert turns.heard == [([{"role": "system", "content": "S"}], [ASKED, {"role": "user", "content": "more"}], True)]
    turns.continue_with([RESULT])
    assert turns.undo() == "more", "with all that came of it"
    assert turns.messages == [{"role": "system", "content": "S"}, ASKED]
    turns._earlier_part, turns.earlier = PartialAnswer("x", "y"), 5
    assert turns.undo() == "Hi" and turns._earlier_part == PartialAnswer()
    assert (turns.undo(), turns.messages, turns.earlier) == (None, [{"role": "system", "content": "S"}], 5)
    turns.clear()
    assert (turns.system, turns.earlier) == ("S", 0)
    turns.messages = [ASKED]
    assert (turns.system, turns.messages) == (None, [ASKED])
    turns._answer, turns._earlier_part = answered("a", "b"), PartialAnswer("x", "y")
    assert turns.messages[1:] == [{"role": "assistant", "x": 1, "content": "xa", "reasoning_content": "yb"}]
    turns.messages = []
    assert turns.messages == []


def test_the_image_encoder_opens_lazily_and_is_replaced(monkeypatch):
    """Close the previous encoder when another projector is chosen."""
    encoders: list[Any] = []

    def opening(*arguments: Any) -> SimpleNamespace:
        encoders.append(
            SimpleNamespace(told=arguments, path=arguments[0], closed=0, encode=lambda image: (len(encoders), image))
        )
        encoders[-1].close = lambda eye=encoders[-1]: setattr(eye, "closed", eye.closed + 1)
        return encoders[-1]

    monkeypatch.setattr("localllm.generation.image_encoder.ImageEncoder", opening)
    monkeypatch.setattr("localllm.files.models_folder.find_projector", lambda path: f"beside {path}")
    monkeypatch.setattr("localllm.files.models_folder.get_projector_size", lambda path: len(path))
    sight = VisionAdapter("m.gguf", "engine", "tokenizer", 3, True)
    sight.close()
    assert (sight.encoder, sight.nbytes, encoders) == (None, 6, [])
    assert (sight.encode("a"), sight.encode("b")) == ((1, "a"), (1, "b"))
    assert encoders[0].told == ("beside m.gguf", "engine", "tokenizer", EngineOptions(3), True, False)
    assert (
        sight.open_projector(Path(__file__), pan_and_scan=True) is sight.encoder is encoders[1]
        and encoders[0].closed == 1
    )
    assert encoders[1].told == (str(Path(__file__)), "engine", "tokenizer", EngineOptions(3), True, True)
    assert sight.nbytes == Path(__file__).stat().st_size and encoders[1].closed == 0
    sight.close()
    assert (sight.encoder, encoders[1].closed) == (None, 1)
    assert VisionAdapter("m", "e", "t", None).open_projector("p") and encoders[2].told == (
        "p",
        "e",
        "t",
        EngineOptions(None),
        False,
        False,
    )


def session_by_length(context: int = 64, start: int | None = None) -> Any:
    """Return a session whose messages have one token per character."""
    session: Any = Session.__new__(Session)
    engine = SimpleNamespace(hyperparameters=SimpleNamespace(start_token=start))
    session.cache = SimpleNamespace(context=context, engine=engine)
    session.tokenizer = SimpleNamespace(encode=lambda text, **how: [*range(len(text)), *how], chat_templates={})
    session.template_choice = None
    session.defaults = AnswerDefaults(options=GenerationOptions(sampling=SamplingOptions(top_k=7)))
    session.__dict__["template"] = SimpleNamespace(stops=("\nUser:",), warning=None, source="")
    session._encode_conversation = lambda messages, options: EncodedPrompt(
        [ord(x) for message in messages for x in message["content"]], ()
    )
    return session


def messages_of(lengths: dict[str, int] | list[int]) -> list[dict]:
    """Return messages of these lengths, of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[number % 2], "content": "x" * size} for number, size in enumerate(lengths)]


@pytest.mark.parametrize(("lengths", "most", "kept"), [
    ([20, 10, 26], None, 3), ([20, 10, 27], None, 1), ([20, 10, 29], 5, 3), ([20, 10, 30], 5, 1), ([20, 10, 34], 0, 3),
    ([20, 10, 27], 99, 1), ([20, 10, 20, 2, 10], None, 3), ([20, 10, 20, 3, 10], None, 1), ([99], None, 1),
    ([9, 9, 60], None, 1), ([30, 2, 10, 2, 10, 2, 8], None, 5), ([30, 2, 10, 2, 10, 2, 9], None, 3),
])  # fmt: skip
def test_the_oldest_turns_are_dropped_until_half_is_free(lengths: list[int], most: int | None, kept: int):
    """Reserve an eighth, or the token limit, for the answer; keep the system message."""
    session, options = session_by_length(), GenerationOptions(max_tokens=most)
    stays, prompt = session._fit_history([], messages_of(lengths), options)
    assert (stays, len(prompt.ids)) == (messages_of(lengths)[len(lengths) - kept :], sum(lengths[-kept:]))
    system = [{"role": "system", "content": "x" * 8}]
    for last, length in ((18, 56), (19, 27)):  # it takes room, too
        assert len(session._fit_history(system, messages_of([20, 10, last]), GenerationOptions())[1].ids) == length
    answers = [{"role": "assistant", "content": "x" * 99}]
    assert session._fit_history([], answers, options)[0] == answers


@pytest.mark.parametrize(("own", "overflow", "keep", "forgotten", "length", "holds", "keeps"), [
    (True, None, None, 1, 27, 5, None), (False, None, None, 0, 57, 0, None),
    (False, "drop-turns", None, 1, 27, 0, None),
    (True, "error", None, 0, 57, 5, None), (True, "shift", None, 0, 57, 5, 4), (False, "shift", 9, 0, 57, 0, 9),
])  # fmt: skip
def test_overflow_drops_turns_shifts_or_refuses(own, overflow, keep, forgotten, length, holds, keeps, monkeypatch):
    """Drop only one's own turns; refuse others unless an overflow policy is set."""
    session, tasks = session_by_length(), list[tuple]()
    session.earlier = 5
    session._create_task = lambda prompt, options, decoder, earlier: (
        tasks.append((prompt, options, decoder, earlier)) or "task"
    )
    session._create_decoder = lambda options: "decoder"
    monkeypatch.setattr("localllm.generation.session.Generation", lambda *arguments: arguments)
    options = GenerationOptions(on_overflow=overflow, keep=keep)
    history = messages_of([20, 10, 27])
    kept, answer = session._start_answer([], history, options, own)
    assert (kept, answer) == (history[-1:] if forgotten else history, (session.cache, session.tokenizer, "task"))
    ((prompt, chosen, decoder, earlier),) = tasks
    assert (len(prompt.ids), decoder, earlier, session.forgotten) == (length, "decoder", holds, forgotten)
    assert (chosen.keep, chosen.sampling.top_k, chosen.on_overflow) == (keeps, 7, overflow)


@pytest.mark.parametrize(("system", "tokens"), [(9, 9), (4, 4), (3, 4), (0, 4)])
def test_a_system_message_stays_within_four_kept_tokens(system: int, tokens: int):
    assert (
        session_by_length()._count_shared_prefix([{"role": "system", "content": "x" * system}], GenerationOptions())
        == tokens
    )


def test_complete_candidates_and_request_encode_their_prompt(monkeypatch):
    session, calls, streams = session_by_length(), list[tuple](), list[bool]()
    twice = [Answer("a", [token], -token, "stop") for token in (1, 2)]
    session.tokenizer.stream = lambda continued: streams.append(continued) or "decoder"
    monkeypatch.setattr(
        "localllm.generation.beam_search.generate_answers", lambda *asked: calls.append(asked[2:]) or twice
    )
    monkeypatch.setattr("localllm.generation.session.Generation", lambda *calls: calls)
    assert (session.candidates("abc"), session.candidates([3], None, 2, 3)) == (twice, twice)
    assert [(task.prompt, *others) for task, *others in calls] == [
        ([0, 1, 2, "special", "bos"], 1, 0, 0.0), ([3], 2, 3, 0.0),
    ]  # fmt: skip
    alone, several = session.request([3, 4]), session.request([3], GenerationOptions(max_tokens=5), 2, "key")
    assert (alone.prompt, alone.n, alone.key, several.n, several.key) == ([3, 4], 1, None, 2, "key")
    assert (several.task.options.max_tokens, several.task.options.sampling.top_k) == (5, 7)
    sequences, tokenizer, task = session.complete([5], GenerationOptions(max_tokens=5))
    assert (sequences, tokenizer, task.prompt, task.decoder) == (session.cache, session.tokenizer, [5], "decoder")
    assert (task.options.max_tokens, task.options.sampling.top_k, streams) == (5, 7, [True] * 5)


def test_a_prompt_is_text_or_ids_with_special_tokens():
    session = session_by_length()
    assert session._get_ids("abc") == [0, 1, 2, "special", "bos"] and session_by_length(start=9)._get_ids("ab") == [
        0,
        1,
        "bos",
        "eos",
        9,
    ]
    assert session._get_ids([3, 4]) == [3, 4] == session_by_length(start=9)._get_ids((3, 4))
    for wrong in (b"ab", bytearray(b"ab"), memoryview(b"ab"), 5, None):
        with pytest.raises(UsageError, match=r"^the prompt must be"):
            session._get_ids(wrong)
    for overflow in ("shift", "drop-turns"):
        with pytest.raises(UsageError, match=f"^several answers cannot be combined with on_overflow={overflow}$"):
            session._prepare_task("a", GenerationOptions(on_overflow=overflow))


def test_template_markers_end_an_answer_too():
    session = session_by_length()
    assert session._add_stops(GenerationOptions(stop=("a",))).stop == ("a", "\nUser:")
    free = GenerationOptions(constraint=Constraint.from_regex("a"))
    assert session._add_stops(free) is free
    session.template.stops = ()
    assert session._add_stops(chosen := GenerationOptions(stop=("a",))) is chosen


def test_chat_answers_given_messages_only():
    session, heard = session_by_length(), list[tuple]()
    session._start_answer = lambda *arguments, is_own: heard.append((*arguments[:2], is_own)) or ("kept", "answer")
    system = {"role": "system", "content": "S"}
    for messages, first in (([system, ASKED], 1), ([ASKED, system], 0), ([], 0), ([system, system], 1), (["x"], 0)):
        assert session.chat(tuple(messages)) == "answer"
        assert heard.pop() == (messages[:first], messages[first:], False)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"), [("", "ab", True), ("", "a", False), ("t", "ab", True), ("t", "a", True)]
)
def test_reasoning_or_two_characters_count_as_a_begun_answer(thinking: str, text: str, expected: bool):
    session = session_by_length()
    session.tokenizer = SimpleNamespace(decode=lambda ids: "ab")
    assert session._is_exact_text(SimpleNamespace(thinking=thinking, text=text, tokens=[1])) is expected


class Kept(dict):
    """A store of image rows by digest."""

    find, keep = dict.get, dict.__setitem__

    def __bool__(self) -> bool:
        return True


def make_image_encoder(monkeypatch, is_gone: bool = False) -> tuple[ImageEncoder, list[Any]]:
    """Return an encoder with two images' rows, and the list of images that the engine registers."""
    sees, registered = ImageEncoder.__new__(ImageEncoder), []
    hyperparameters = SimpleNamespace(compute_mrope_positions=lambda picture: None, sees_ahead=True)
    rows = [np.ones((2, 5), np.float32), np.zeros((1, 5), np.float32)]
    sees._reader = SimpleNamespace(
        hyperparameters=hyperparameters, operations=(), encode_crops=lambda pictures, size: rows
    )
    sees._engine = SimpleNamespace(register_image=registered.append)
    sees._tokenizer = SimpleNamespace(encode=lambda text, special: [text, special])
    sees._prepared = lambda h, image: SimpleNamespace(pictures=["x", "y"], parts=["<", 1, ">", 0])
    sees.path, sees.encoded, sees._cache, sees._files = "p.gguf", 0, OrderedDict(), Kept()
    sees._file, sees._root = None, b""
    monkeypatch.setattr(eye, "load_image", lambda source: source)

    def fingerprint(*others: Any) -> bytes:
        if is_gone:
            raise FileNotFoundError
        return b"f"

    monkeypatch.setattr(eye, "compute_projector_fingerprint", fingerprint)
    return sees, registered


def picture(name: bytes, size: tuple[int, int] = (1, 1)) -> SimpleNamespace:
    return SimpleNamespace(size=size, tobytes=lambda: name)


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_image_is_encoded_once_and_stored(monkeypatch, is_gone: bool):
    """Reuse it in a later process, unless the projector's file is gone."""
    sees, registered = make_image_encoder(monkeypatch, is_gone)
    look = sees.encode(picture(b"a"))
    (digest,) = sees._cache
    expected = [ImageEmbedding(digest + bytes([n, 0]), np.zeros((2 - n, 5), np.float32), None, True) for n in (0, 1)]
    assert look.ids == ["<", True, *expected[1].ids, ">", True, *expected[0].ids]
    assert (
        registered == look.seen
        and [one.ids for one in registered] == [one.ids for one in expected]
        and registered[0].is_whole
    )
    assert registered[0].rows.all() and sees.encoded == 1 and sees._root == (b"p.gguf" if is_gone else b"f")
    assert sees.encode(picture(b"a")) is look and sees.encoded == 1 and len(registered) == 4
    for other in (picture(b"b"), picture(b"a", (1, 2))):
        assert sees.encode(other).ids != look.ids
    assert sees.encoded == 3
    if is_gone:
        assert sees._files is None
    else:
        files: Any = sees._files
        assert [*files] == [*sees._cache] and len(files) == 3
        sees._cache.clear()
        assert sees.encode(picture(b"a")).ids == look.ids and sees.encoded == 3


@pytest.mark.parametrize(("least", "most", "kept"), [
    (0, 180, b"bac"), (0, 179, b"ac"), (0, 119, b"c"), (2, 0, b"ac"), (3, 0, b"bac"), (0, 59, b""),
])  # fmt: skip
def test_the_least_recently_used_image_is_evicted(monkeypatch, least: int, most: int, kept: bytes):
    """Keep a minimum of images, and more while there is room."""
    monkeypatch.setattr(eye, "MIN_CACHED", 3)
    sees, _ = make_image_encoder(monkeypatch)
    for name in (b"a", b"b", b"a", b"c"):
        monkeypatch.setattr(eye, "MIN_CACHED", least if name == b"c" else 3)
        monkeypatch.setattr(eye, "MAX_BYTES", most)
        sees.encode(picture(name))
    files: Any = sees._files
    names = dict(zip(files, b"abc", strict=True))
    assert bytes(names[digest] for digest in sees._cache) == kept
