"""Test what `chat` does with each line, with a scripted model: no terminal, no kernels."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.interactive import conversation
from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.interactive.conversation import TerminalConversation, format_statistics
from localllm.cli.interactive.slash_commands import CommandTools, ExitChat, complete_line, execute
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import LocalllmError, UsageError
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.conversation import Conversation, PartialAnswer
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import ANSWER, REASONING
from localllm.generation.sampling.options import OPTIONS, SamplingOptions
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.services import sessions
from localllm.services.sessions import SessionModel


class Answer:
    """A scripted answer: its parts and finish reason; a KeyboardInterrupt among the parts is raised."""

    prompt_tokens, completion_tokens, cached_tokens, prefill_s, decode_s, dropped, kept = 5, 3, 1, 0.5, 2.0, 0, None

    def __init__(self, *parts: Any, reason: str = "stop", calls: Any = (), is_full: bool = False):
        self._parts, self.ends, self.calls, self.is_full = parts, reason, list(calls), is_full
        self.text = self.thinking = ""
        self.finish_reason = "interrupted"

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        for part in self._parts:
            if isinstance(part, BaseException):
                raise part
            kind, text = part if isinstance(part, tuple) else (ANSWER, part)
            self.thinking += text if kind == REASONING else ""
            self.text += text if kind == ANSWER else ""
            yield kind, text
        self.finish_reason = self.ends

    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self.text}

    def close(self) -> None:
        pass


class Session(Conversation):
    """A session that gives scripted answers; an error is raised instead."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked, self.did = list[Any](), list[Any](), list[str]()

    def _start_answer(self, system: Any, history: Any, options: GenerationOptions, is_own: bool) -> Any:
        self.asked.append(([each["content"] for each in [*system, *history]], options))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return history, answer

    def resume(self, options: GenerationOptions) -> Answer:
        *history, last = self._build_history()
        begun = PartialAnswer(last["content"], last.get("reasoning_content", ""))
        self._history, self._answer, self._earlier_part = history, self.answers.pop(0), begun
        return self._answer

    def count(self, text: str) -> int:
        return len(text.split())

    def park(self) -> None:
        self.did.append("park")

    def leave(self) -> None:
        self.did.append("leave")


class Model(SimpleNamespace):
    def __init__(self, name: str = "m", context: int = 80):
        super().__init__(
            session=Session(), context=context, file=None, name=name, path=f"/{name}.gguf", file_type="Q8_0", closed=0
        )

    def close(self) -> None:
        self.closed += 1


Say = Callable[..., str]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch) -> None:
    """Set a private folder of sessions and a terminal of 200 columns."""
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr(terminal, "get_size", lambda stream: (200, 24))
    for name, value in {"XDG_DATA_HOME": str(tmp_path / "data"), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def talk() -> TerminalConversation:
    return TerminalConversation(Model(), GenerationOptions(), ProgressLine())


@pytest.fixture
def say(talk: TerminalConversation, capsys) -> Say:
    """Type a line and answer it; return what is shown."""

    def told(text: str, *answers: Any, open: Any = None, edit: Any = lambda text: None) -> str:
        talk.model.session.answers += answers
        if not execute(talk, text, CommandTools(open or (lambda name: Model(name)), edit)):
            talk.ask(text)
        out, err = capsys.readouterr()
        return out + err

    return told


def texts(talk: TerminalConversation) -> list[str]:
    return [line["content"] for line in talk.lines]


def agrees(talk: TerminalConversation) -> bool:
    """Return whether the model's session equals the conversation."""
    return talk.model.session.messages == sessions.select_visible_fields(talk.lines)


# ---- questions and answers


def test_questions_and_answers_become_lines_with_token_counts(talk: TerminalConversation, say: Say):
    assert "Hello\n" in say("Hi", Answer("Hel", "lo"))
    say("And?", Answer("Yes", reason="length"))
    assert talk.lines == [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "finish": "stop", "tokens": 8},
        {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes", "finish": "length", "tokens": 8},
    ]  # fmt: skip
    assert agrees(talk) and talk.used == 8


def test_chat_tells_when_an_answer_was_cut_interrupted_or_turns_were_dropped(talk: TerminalConversation, say: Say):
    cut = "the answer reached 3 tokens, the limit of -n; /continue resumes it"
    assert cut in say("a", Answer("x", reason="length")) and cut not in say("b", Answer("x"))
    assert cut not in say("c", Answer("x", reason="length", is_full=True))
    assert "interrupted; /continue continues the answer" in say("d", Answer("x", KeyboardInterrupt()))
    assert "interrupted" not in say("e", Answer(KeyboardInterrupt()))
    talk.model.session.forgotten = 1
    assert "exceeds the context: its first turn was dropped" in say("f", Answer("x"))
    talk.model.session.forgotten = 2
    assert "its first 2 turns were dropped" in say("g", Answer("x"))
    assert (
        "tokens/s" in (say("/stats on"), say("h", Answer("x")))[1]
        and "tokens/s" not in (say("/stats"), say("i", Answer("x")))[1]
    )


def test_statistics_count_read_and_generated_tokens():
    answer: Any = Answer()
    assert (
        format_statistics(answer, 80) == "4 tokens read in 0.50 s · 3 tokens generated · 1.0 tokens/s · context 8 of 80"
    )
    answer.completion_tokens, answer.cached_tokens = 1, 4
    assert format_statistics(answer, 0) == "1 token read in 0.50 s · 1 token generated · context 6"
    answer.completion_tokens, answer.decode_s = 2, 0.0
    assert "tokens/s" not in format_statistics(answer, 0)


def test_reasoning_is_shown_or_hidden(talk: TerminalConversation, say: Say, monkeypatch):
    shown = list[Any]()
    drawn = SimpleNamespace(
        push=lambda text, is_thought: shown.append((text, is_thought)), end=lambda: shown.append("end")
    )
    monkeypatch.setattr(conversation, "make_page", lambda markdown, names_answer: drawn)
    say("a", Answer((REASONING, "Hm"), "Yes"))
    assert shown == [("Hm", True), ("Yes", False), "end"]
    shown.clear()
    say("/think hide")
    say("b", Answer((REASONING, "Hm"), "Yes"))
    say("c", Answer(KeyboardInterrupt()))
    assert shown == [("Yes", False), "end"] and "reasoning is shown" in say("/think show")
    assert "thinking is off; reasoning is shown" in say("/think off") and talk.options.think == "off"
    with pytest.raises(UsageError, match="/think "):
        say("/think maybe")


def test_hidden_reasoning_shows_its_progress(talk: TerminalConversation, say: Say, monkeypatch):
    """Erase the progress line before anything else is shown."""
    shown = list[str]()
    drawn = SimpleNamespace(push=lambda text, is_thought: shown.append(text), end=lambda: shown.append("end"))
    monkeypatch.setattr(conversation, "make_page", lambda markdown, names_answer: drawn)
    talk._line = SimpleNamespace(show=shown.append, clear=lambda: shown.append("clear"))
    talk.shows_reasoning = False
    say("q", Answer((REASONING, "Hm"), (REASONING, "."), "Yes"))
    thinking = ["clear", "thinking: 3 tokens"]
    assert shown == [*thinking, *thinking, "clear", "Yes", "clear", "end", "clear"]
    shown.clear()
    say("r", LocalllmError("no"))
    assert shown == ["clear"]


def test_a_constrained_answer_that_was_cut_is_reported(talk: TerminalConversation, say: Say):
    talk.options = GenerationOptions(constraint=make_constraint(regex="a"))
    shown = say("q", Answer("x", reason="length"))
    assert "as -n says" not in shown and "the answer was cut" in shown


def test_an_unanswered_question_leaves_no_line(talk: TerminalConversation, say: Say):
    say("a", Answer("x"))
    before = list(talk.lines)
    assert "error: broken" in say("b", LocalllmError("broken")) and talk.lines == before
    say("c", Answer(KeyboardInterrupt()))
    assert talk.lines == before and agrees(talk)
    say("d", Answer("begun", LocalllmError("broken")))  # what was said stays
    assert texts(talk)[2:] == ["d", "begun"] and talk.lines[-1]["finish"] == "interrupted" and agrees(talk)


def test_files_are_sent_with_the_next_question(talk: TerminalConversation, say: Say, tmp_path: Path):
    (tmp_path / "f.txt").write_text("one two three\n")
    assert "13 characters of f.txt will be sent with the next question" in say(f"/read {tmp_path / 'f.txt'}")
    say("lost", LocalllmError("x"))
    assert talk.texts == ["one two three"]  # it waits for an answer
    say("Hi", Answer("x"))
    assert texts(talk) == ["Hi\n\none two three", "x"] and talk.texts == []


def refusal_of(say: Say, text: str) -> str:
    """Return the message with which a command is refused."""
    with pytest.raises(UsageError) as error:
        say(text)
    return str(error.value)


def test_passages_of_a_folder_are_sent_with_questions(
    talk: TerminalConversation, say: Say, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "f.md").write_text("# Boats\n\nThe ferry leaves at nine.\n\n# Trains\n\nAt ten.\n")
    assert "no such file or folder" in refusal_of(say, "/files none")
    assert "are added to each question" in say(f"/files {tmp_path / 'notes'}")
    say("when does the ferry leave?", Answer("At nine."))
    place = f"==> {tmp_path / 'notes' / 'f.md'}:1 <=="
    assert texts(talk)[0] == f"{place}\n# Boats\n\nThe ferry leaves at nine.\n\nwhen does the ferry leave?"
    assert "no passages are added" in say("/files")
    say("and trains?", Answer("x"))
    assert texts(talk)[2] == "and trains?"


def test_write_saves_the_answer_or_its_code(talk: TerminalConversation, say: Say, tmp_path: Path):
    assert "there is no answer yet" in refusal_of(say, "/write x")
    say("Hi", Answer("So:\n```sh\nls\n```\n"))
    say(f"/write {tmp_path / 'all.md'}")
    say(f"/write code {tmp_path / 'a.sh'}")
    assert (tmp_path / "all.md").read_text() == "So:\n```sh\nls\n```\n" and (tmp_path / "a.sh").read_text() == "ls\n"
    assert "exists already; give another name" in refusal_of(say, f"/write {tmp_path / 'a.sh'}")
    assert "usage: /write FILE, or /write code FILE" in refusal_of(say, "/write")
    say("Hi", Answer("none"))
    assert "the last answer has no code block" in refusal_of(say, f"/write code {tmp_path / 'b.sh'}")


def test_copy_puts_the_answer_on_the_clipboard(talk: TerminalConversation, say: Say, tmp_path: Path, monkeypatch):
    program = tmp_path / "bin" / "xclip"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {tmp_path / 'clipboard'}\n")
    program.chmod(0o755)
    say("Hi", Answer("So:\n```sh\nls\n```\n"))
    monkeypatch.setenv("PATH", str(program.parent) + os.pathsep + "/bin")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert "copied 2 characters" in say("/copy code")
    assert (tmp_path / "clipboard").read_text() == "ls"
    say("/copy")
    assert (tmp_path / "clipboard").read_text().startswith("So:")
    monkeypatch.delenv("DISPLAY")
    assert "no clipboard program found" in refusal_of(say, "/copy")
    assert "usage: /copy" in refusal_of(say, "/copy all")
    monkeypatch.setattr(chat_commands, "is_terminal", lambda stream: True)
    assert "\x1b]52;c;bHM=\x07" in say("/copy code")  # ls in base64


@pytest.mark.parametrize(("words", "system", "before", "fits"), [
    (70, 0, 0, True), (71, 0, 0, False), (60, 10, 0, True), (61, 10, 0, False), (40, 0, 30, True), (41, 0, 30, False),
])  # fmt: skip
def test_a_file_must_leave_an_eighth_of_the_context(
    talk: TerminalConversation, words: int, system: int, before: int, fits: bool
):
    if system:
        talk.model.session.system = "s " * system
    if before:
        talk.read("b " * before, "b.txt")
    if fits:
        talk.read("w " * words, "w.txt")
        assert len(talk.texts) == 1 + bool(before)
    else:
        with pytest.raises(UsageError, match=f"has {words} tokens, but only {words - 1} of the context of 80 are free"):
            talk.read("w " * words, "w.txt")


def test_files_need_room_if_no_turn_may_be_dropped(talk: TerminalConversation, say: Say):
    say("a", Answer("x"))
    talk.read("w " * 70, "w.txt")
    talk.texts, talk.options = [], GenerationOptions(on_overflow="error")
    talk.read("w " * 62, "w.txt")
    talk.texts = []
    with pytest.raises(UsageError, match="only 62 of"):
        talk.read("w " * 63, "w.txt")
    talk.model.context = 0  # a server that does not say
    talk.read("w " * 9999, "w.txt")
    assert talk.texts == ["w " * 9999]


def test_waiting_files_stay_with_their_conversation(talk: TerminalConversation, say: Say):
    for leaving, words in (("/clear", []), ("/branch b", ["q", "a"])):
        say("q", Answer("a"))
        talk.texts, talk.images = ["t"], ["/x.png"]
        say(leaving)
        if leaving == "/clear":
            assert (texts(talk), talk.texts, talk.images) == (words, [], [])
    assert (texts(talk), talk.texts, talk.images) == (["q", "a"], ["t"], ["/x.png"])  # which is a copy
    say("/branch main")
    assert (texts(talk), talk.texts, talk.images) == (["q", "a"], [], []) and agrees(talk)
    talk.texts = ["one", "two"]
    talk.model.session.answers.append(Answer("b"))
    talk.ask("")  # files without words of one's own
    assert texts(talk) == ["q", "a", "one\n\ntwo", "b"]


def test_files_longer_than_the_context_are_refused(talk: TerminalConversation, say: Say, tmp_path: Path):
    path = tmp_path / "f.txt"
    for size, fits in ((64 * 80, True), (64 * 80 + 1, False)):
        path.write_bytes(b"x" * size)
        if fits:
            say(f"/read {path}")
        else:
            with pytest.raises(UsageError, match="exceeds the context of 80 tokens"):
                say(f"/read {path}")
    with pytest.raises(UsageError, match="cannot read"):
        say(f"/read {tmp_path}/none")


# ---- taking back, asking again


def test_undo_removes_turns_and_waiting_files(talk: TerminalConversation, say: Say):
    assert "nothing to undo" in say("/undo")
    for number in range(3):
        say(f"q{number}", Answer(f"a{number}"))
    assert "removed: q2" in say("/undo") and texts(talk) == ["q0", "a0", "q1", "a1"] and agrees(talk)
    shown = say("/undo 5")
    assert "q1" in shown and "q0" in shown and "nothing to undo" not in shown and talk.lines == []
    talk.texts, talk.images = ["abc"], ["/x/y.png"]
    assert "the image y.png" in say("/undo") and "a file of 3 characters" in say("/undo") and not talk.texts
    for odd in ("0", "-1", "x", "1.5", "1000000000"):
        with pytest.raises(UsageError, match="/undo N removes the last N questions"):
            say(f"/undo {odd}")


def test_retry_draws_another_answer(talk: TerminalConversation, say: Say):
    assert "there is no question yet" in say("/retry")
    talk.options = GenerationOptions(sampling=SamplingOptions(seed=7, top_k=5))
    say("q", Answer("first"))
    say("/retry", Answer("second"))
    assert texts(talk) == ["q", "second"] and agrees(talk)
    asked, options = talk.model.session.asked[-1]
    assert asked == ["q"] and options.sampling == SamplingOptions(top_k=5)  # the same seed would say the same
    assert talk.options.sampling.seed == 7
    for lost in (LocalllmError("x"), Answer(KeyboardInterrupt())):  # the old answer stays
        say("/retry", lost)
        assert texts(talk) == ["q", "second"] and agrees(talk)

    def ask(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    talk.model.session.ask = ask  # Ctrl-C while the question is read
    with pytest.raises(KeyboardInterrupt):
        say("/retry")
    assert texts(talk) == ["q", "second"] and agrees(talk)


def test_retry_sends_the_images_of_the_question_again(talk: TerminalConversation, say: Say):
    seen = list[Any]()
    asking = talk.model.session.ask
    talk.model.session.ask = lambda text, options, *images: seen.append((text, *images)) or asking(text, options)
    for name in ("x", "y"):
        talk.images = [f"/{name}.png"]
        say(name, Answer("a"))
    say("/retry", Answer("b"))
    say("z", Answer("c"))
    say("/retry", Answer("d"))
    assert seen == [("x", ["/x.png"]), ("y", ["/y.png"]), ("y", ["/y.png"]), ("z",), ("z",)]
    assert [line.get("images") for line in talk.lines[::2]] == [["/x.png"], ["/y.png"], None]


def test_edit_replaces_the_last_question(talk: TerminalConversation, say: Say):
    assert "there is no question yet" in say("/edit")
    talk.options = GenerationOptions(sampling=SamplingOptions(seed=7))
    say("q", Answer("a"))
    for changed in (None, "  \n"):
        assert "nothing changed" in say("/edit", edit=lambda text, changed=changed: changed)
    say("/edit", Answer("b"), edit=lambda text: text + "!")
    assert texts(talk) == ["q!", "b"] and talk.model.session.asked[-1][1].sampling.seed == 7


def test_continue_extends_the_last_answer(talk: TerminalConversation, say: Say):
    say("q", Answer("one ", reason="length"))
    assert "two" in say("/continue", Answer("two"))
    assert texts(talk) == ["q", "one two"] and talk.lines[-1]["finish"] == "stop" and agrees(talk)


def test_system_sets_or_removes_the_system_message(talk: TerminalConversation, say: Say):
    say("q", Answer("a"))
    assert "message set" in say("/system Be short.") and texts(talk) == ["Be short.", "q", "a"] and agrees(talk)
    say("/system Be long.")
    assert texts(talk) == ["Be long.", "q", "a"] and agrees(talk)
    say("/clear")
    assert texts(talk) == ["Be long."] and agrees(talk)
    assert "system message removed" in say("/system") and talk.lines == [] and talk.model.session.system is None


# ---- tools


class Calls:
    """Tools that answer calls with their names."""

    def __init__(self) -> None:
        self.noted, self.questions = list[Any](), list[Any]()

    def refresh(self, options: Any) -> Any:
        return options

    def log_question(self, messages: list[Any]) -> None:
        self.questions.append(messages)

    def note(self, message: dict[str, Any], finish: str) -> None:
        self.noted.append((message["content"], finish))

    def run_calls(self, calls: list[ToolCall]) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": call.id, "content": f"did {call.name}"} for call in calls]


def test_calls_are_answered_until_the_model_answers(talk: TerminalConversation, say: Say):
    talk.tools = tools = Calls()
    one, two = ToolCall("one", ["{}"]), ToolCall("two", ["{}"])
    say("q", Answer("look", calls=[one, two]), Answer("", calls=[one]), Answer("done"))
    assert texts(talk) == ["q", "look", "did one", "did two", "", "did one", "done"] and agrees(talk)
    assert tools.noted == [("look", "stop"), ("", "stop"), ("done", "stop")] and talk.lines[-1]["finish"] == "stop"
    assert tools.questions == [[{"role": "user", "content": "q"}]]
    say("r", Answer("look", KeyboardInterrupt(), calls=[one]))  # nothing is called then
    assert texts(talk)[-2:] == ["r", "look"]
    say("s", Answer("look", calls=[one]), LocalllmError("broken"))  # what was said stays
    assert texts(talk)[-2:] == ["s", "look"]


# ---- sessions and branches


def test_save_writes_a_session_that_follows_the_chat(talk: TerminalConversation, say: Say):
    say("before", Answer("a"))
    assert "saved as session trip" in say("/save trip")
    say("q", Answer("b"))
    assert [each["content"] for each in sessions.read_session("trip").messages] == ["before", "a", "q", "b"]
    say("/set top_k 3")
    chat = sessions.read_session("trip")
    assert (
        chat.settings == {"top_k": 3} and chat.model == SessionModel("m", "/m.gguf", "endpoint m") and chat.trunk == ""
    )
    with sessions.SessionFile("there") as other:
        other.rewrite()
    with pytest.raises(UsageError, match="session 'there' already exists"):
        say("/save there")
    sessions.remove_session("there")  # which nobody has open
    say("/undo")
    assert [each["content"] for each in sessions.read_session("trip").messages] == ["before", "a"]
    assert "session trip is unchanged" in say("/clear") and talk.file is None and talk.name == "main"
    assert talk.model.session.did[-1] == "leave"
    talk.options = GenerationOptions()
    assert "trip · 2 messages" in say("/load trip") and talk.options.sampling.top_k == 3 and agrees(talk)
    assert say("/load trip").count("trip") == 1
    with pytest.raises(UsageError, match="unknown session 'other'"):
        say("/load other")
    assert talk.name == "trip" and talk.file and sessions.list_names() == ["trip"]
    talk.leave()


def test_loading_a_session_of_another_model_warns(talk: TerminalConversation, say: Say):
    say("q", Answer("a"))
    say("/save trip")
    first = talk.model
    assert "n · Q8_0 · 80 tokens of context" in say("/model n") and first.closed == 1 and talk.model.name == "n"
    assert sessions.read_session("trip").model.name == "n" and agrees(talk)
    talk.leave()
    other = TerminalConversation(Model("o"), GenerationOptions(), ProgressLine())
    other.load("trip")
    assert other.model.session.earlier == 8 and other.model.session.did == ["park"]
    other.leave()


def test_load_tells_of_removed_turns_and_changed_settings(talk: TerminalConversation, say: Say):
    say("q", Answer("a"))
    say("/save trip")
    talk.leave()
    path = sessions.get_path("trip")
    path.write_bytes(path.read_bytes() + b'{"role": "user", "content": "torn"}\n')
    talk.model = Model("n")
    shown = say("/load trip")
    assert "the last turn of session 'trip' was incomplete and has been removed" in shown
    assert "was started with another model, m; it continues with n" in shown and texts(talk) == ["q", "a"]
    talk.leave()
    assert "warning" not in (say("/clear"), setattr(talk, "model", Model("m")), say("/load trip"))[2]
    talk.leave()


def test_branches_of_an_unsaved_conversation_stay_in_memory(talk: TerminalConversation, say: Say):
    say("q", Answer("a"))
    assert "new branch b: further messages" in say("/branch b")
    say("r", Answer("c"))
    assert "switched to branch main" in say("/branch main") and texts(talk) == ["q", "a"] and agrees(talk)
    assert say("/branch").split() == ["b", "*", "main"]
    say("/branch b")
    assert texts(talk) == ["q", "a", "r", "c"] and agrees(talk) and talk.model.session.did == ["park"] * 3
    say("/branch b")
    assert talk.name == "b" and talk.model.session.did == ["park"] * 3
    say("/clear")
    assert talk.branches == {} and talk.name == "main"


def test_branches_of_a_session_are_saved(talk: TerminalConversation, say: Say):
    say("/save trip")
    say("q", Answer("a"))
    say("/branch b")
    say("r", Answer("c"))
    assert sessions.read_session("b").trunk == "trip" and texts(talk) == ["q", "a", "r", "c"]
    say("/branch d")
    assert sessions.read_session("d").trunk == "trip" and say("/branch").split() == ["b", "*", "d", "trip"]
    say("/branch trip")
    assert texts(talk) == ["q", "a"] and talk.name == "trip" and agrees(talk)
    talk.leave()


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise LocalllmError("no space")

    monkeypatch.setattr(sessions, "_append", fail)
    monkeypatch.setattr(sessions, "SafeFile", fail)


def test_a_session_that_cannot_be_written_is_reported(talk: TerminalConversation, say: Say, monkeypatch):
    say("/save trip")
    full_disk(monkeypatch)
    assert "error: no space" in say("q", Answer("a")) and texts(talk) == ["q", "a"]
    assert "error: no space" in say("r", Answer("b"))
    assert "session 'trip' could not be saved completely: it lacks the last messages" in say("/clear") and talk.unsaved


def test_save_on_a_full_disk_is_retried_after_every_answer(talk: TerminalConversation, say: Say, monkeypatch):
    say("q", Answer("a"))
    with monkeypatch.context() as full:
        full_disk(full)
        with pytest.raises(LocalllmError, match="no space; saving is tried again after every answer"):
            say("/save other")
        assert "error: no space" in say("r", Answer("b"))
    assert "error" not in say("s", Answer("c"))
    talk.leave()
    assert [each["content"] for each in sessions.read_session("other").messages] == ["q", "a", "r", "b", "s", "c"]
    assert not talk.unsaved


def test_a_session_continues_if_another_cannot_be_started(talk: TerminalConversation, say: Say, monkeypatch):
    say("q", Answer("a"))
    say("/save trip")
    with monkeypatch.context() as full:
        full_disk(full)
        for command in ("/save other", "/branch other"):
            with pytest.raises(LocalllmError, match=r"no space$"):
                say(command)
    assert talk.name == "trip" and talk.file
    say("r", Answer("b"))
    talk.leave()
    assert sessions.list_names() == ["trip"] and len(sessions.read_session("trip").messages) == 4 and not talk.unsaved


def test_a_session_is_saved_at_the_end_once_the_disk_has_room(talk: TerminalConversation, say: Say, monkeypatch):
    assert "will be saved as session trip" in say("/save trip")
    with monkeypatch.context() as full:
        full_disk(full)
        say("q", Answer("a"))
    talk.leave()
    assert not talk.unsaved and [each["content"] for each in sessions.read_session("trip").messages] == ["q", "a"]


# ---- commands


def test_an_answer_with_reasoning_only_is_kept(talk: TerminalConversation, say: Say, monkeypatch):
    shown = list[str]()
    drawn = SimpleNamespace(push=lambda text, is_thought: None, end=lambda: shown.append("end"))
    monkeypatch.setattr(conversation, "make_page", lambda markdown, names_answer: drawn)
    say("q", Answer((REASONING, "Hm"), KeyboardInterrupt()))  # nothing was said
    assert talk.lines == [] and shown == ["end"]
    say("r", Answer("a", KeyboardInterrupt()))
    say("s", Answer())  # nothing to say, but to the end
    assert texts(talk) == ["r", "a", "s", ""] and shown == ["end"] * 3


@pytest.mark.parametrize("begun", ["", (REASONING, "Hm")])
def test_continuing_and_stopping_at_once_changes_nothing(talk: TerminalConversation, say: Say, begun: Any):
    """Keep the question, its reasoning and the earlier turns."""
    for number in (2, 4):
        say("q", Answer(begun, reason="length"))
        say("/continue", Answer(KeyboardInterrupt()))
        assert texts(talk) == ["q", ""] * (number // 2) and talk.lines[-1]["finish"] == "interrupted" and agrees(talk)
        assert talk.lines[-1].get("reasoning_content") == ("Hm" if begun else None)


def test_continue_runs_no_tools(talk: TerminalConversation, say: Say):
    say("q", Answer("one ", reason="length"))
    talk.tools = tools = Calls()
    say("/continue", Answer("two"))
    assert texts(talk) == ["q", "one two"] and tools.questions == [[]] and agrees(talk)


def test_an_answer_interrupted_before_its_first_token_runs_no_call(talk: TerminalConversation, say: Say):
    talk.tools = Calls()
    say("q", Answer("look", calls=[ToolCall("one", ["{}"])]), Answer(KeyboardInterrupt()))
    assert texts(talk) == ["q", "look", "did one"] and agrees(talk)


def test_stats_turns_statistics_on_and_off(talk: TerminalConversation, say: Say):
    assert "tokens read" not in say("q", Answer("a"))
    assert "statistics are on" in say("/stats") and "statistics are off" in say("/stats")
    assert "statistics are off" in say("/stats off") and "statistics are on" in say("/stats on")


def test_leaving_unlocks_the_session(talk: TerminalConversation, say: Say):
    say("/save trip")
    say("/clear")
    with sessions.SessionFile("trip") as file:
        assert file.is_new
    assert "no sessions yet" in say("/sessions")


def test_only_slash_commands_and_leaving_words_are_commands(talk: TerminalConversation, say: Say):
    for leaving in ("bye", " quit ", "exit", "/exit"):
        with pytest.raises(ExitChat):
            say(leaving)
    say(" /help is a command", Answer("Yes"))
    assert texts(talk) == [" /help is a command", "Yes"]
    with pytest.raises(UsageError, match=r"unknown command /retri; .*/retry"):
        say("/retri")
    with pytest.raises(UsageError, match="unknown command /zzzzzz; /help lists the commands"):
        say("/zzzzzz")
    for bare, usage in (
        ("/read", "/read FILE"),
        ("/save", "/save NAME"),
        ("/set", "/set OPTION VALUE"),
        ("/set top_k", "/set top_k VALUE"),
    ):
        with pytest.raises(UsageError, match=usage):
            say(bare)
    with pytest.raises(UsageError, match=r"/stats on\|off"):
        say("/stats maybe")
    assert "top_k = 5" in say("/set top_k 5") and "defaults" in say("/set top_k default")


def test_show_lists_model_context_system_message_and_waiting_files(talk: TerminalConversation, say: Say):
    say("/system Be short.")
    say("q", Answer("a"))
    talk.texts, talk.images = ["abc", "d"], ["x"]
    shown = say("/show")
    for part in (
        "m · Q8_0 · /m.gguf",
        "8 of 80 tokens, in 3 messages",
        "Be short.",
        "4 characters",
        "1 for the next question",
        "defaults",
    ):
        assert part in shown
    talk.lines, talk.model.context = talk.lines[:1], 0
    assert "0 tokens, in 1 message\n" in say("/show") and "session" not in say("/show")


def test_images_that_cannot_be_encoded_are_refused_at_once(talk: TerminalConversation, tmp_path: Path):
    """Ask the projector of a local model; check only the file type for an endpoint."""
    pytest.importorskip("PIL.Image")
    (tmp_path / "x.png").write_bytes(b"no image")

    def look(path: str) -> None:
        if path != "good.png":
            raise UsageError("there is no projector")

    with pytest.raises(LocalllmError, match=r"x\.png"):
        talk.attach_image(str(tmp_path / "x.png"))
    talk.model.file, talk.model.vision = object(), SimpleNamespace(encode=look)
    with pytest.raises(UsageError, match="no projector"):
        talk.attach_image("other.png")
    assert talk.images == []
    talk.attach_image("good.png")
    assert talk.images == [os.path.abspath("good.png")]


def test_a_model_without_a_name_shows_its_path(talk: TerminalConversation, say: Say):
    talk.model.name, talk.model.path = "", "/models/tiny.gguf"
    assert "tiny · Q8_0 · /models/tiny.gguf" in say("/show")
    assert "tiny · Q8_0 · 80 tokens of context\n" in say("/model")
    talk.model.context = 0
    assert "tiny · Q8_0\n" in say("/model")


@pytest.mark.parametrize(
    ("text", "shown"), [("x" * 60, "x" * 60), ("x" * 61, "x" * 59 + "…"), (" a\n\tb ", "a b"), ("", "")]
)
def test_a_question_is_shortened_to_60_characters(text: str, shown: str):
    assert chat_commands.shorten(text) == shown


@pytest.mark.parametrize("columns", [40, 200])
def test_help_is_no_wider_than_the_terminal(say: Say, monkeypatch, columns: int):
    monkeypatch.setattr(chat_commands, "get_width", lambda: columns)
    shown = say("/help")
    assert all(len(line) <= columns for line in shown.splitlines() if not line.startswith("/")) and "Ctrl-D" in shown


def test_tab_completes_commands_files_and_branches(talk: TerminalConversation, tmp_path: Path, monkeypatch):
    for name in ("a.txt", "ab", ".hidden"):
        (tmp_path / name).write_text("")
    (tmp_path / "az").mkdir()
    monkeypatch.chdir(tmp_path)

    def tab(line: str) -> list[str]:
        begins = {begin for _, begin in complete_line(talk, line)}
        assert len(begins) <= 1 and (not begins or begins == {0 if " " not in line else line.index(" ") + 1})
        return [text for text, _ in complete_line(talk, line)]

    assert tab("/st") == ["/stats"] and tab("st") == tab("/st\n") == tab("/none x") == []
    assert tab("/read a") == ["a.txt", "ab", "az/"] and tab("/read .") == [".hidden"] and "a.txt" in tab("/read ")
    assert ".hidden" not in tab("/read ") and tab(f"/read {tmp_path}/ab") == [f"{tmp_path}/ab"]
    assert (
        tab("/read none/") == []
        and tab("/stats o") == ["on", "off"]
        and tab("/set top_") == [name for name in OPTIONS if name.startswith("top_")]
    )
    assert tab("/clear ") == []


def test_image_waits_for_the_next_question(talk: TerminalConversation, say: Say, tmp_path: Path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (2, 2)).save(tmp_path / "x.png")
    monkeypatch.chdir(tmp_path)
    assert "x.png will be sent with the next question" in say("/image x.png") and talk.images == [
        os.path.join(os.getcwd(), "x.png")
    ]
    say("lost", LocalllmError("no"))
    assert len(talk.images) == 1
    say("What?", Answer("a"))
    assert talk.images == [] and talk.lines[0]["images"] == [os.path.join(os.getcwd(), "x.png")]
    say("/retry", Answer("b"))
    assert talk.lines[0]["images"] and texts(talk) == ["What?", "b"]
