"""Test a conversation on a terminal: every command and key, at 40 and 120 columns, with wide characters."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from project import SUPPORT
from talker import MIXED
from terminal import PROMPT, Terminal, plain
from tiny_model import CHATML
from wcwidth import wcswidth

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")

TALKER = [sys.executable, str(SUPPORT / "talker.py")]
GREEDY = ["--temp", "0", "-n", "12"]
LONG = ["--temp", "0", "-n", "100000"]  # would take minutes


@pytest.fixture
def talk(tmp_path: Path, tiny: str, monkeypatch):
    """Return a function that starts a chat with tests/support/talker.py; the user's folders are in tmp_path."""
    chats: list[Terminal] = []

    def begin(*arguments: str, **more: str | int) -> Terminal:
        folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_STATE_HOME": str(tmp_path / "state")}
        chat = Terminal("chat", tiny, *arguments, program=TALKER, **{**folders, **more})
        chats.append(chat)
        return chat

    yield begin
    for chat in chats:
        assert "Traceback" not in chat.seen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the user's folders, and an editor that always writes the same."""
    folder = tmp_path_factory.mktemp("home")
    editor = folder / "editor"
    editor.write_text('#!/bin/sh\nprintf "written elsewhere" > "$1"\n')
    editor.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def running():
    chats: dict[str, Terminal] = {}
    yield chats
    for chat in chats.values():
        chat.type("\x04")
        assert chat.end() == 0


@pytest.fixture
def chat(running: dict[str, Terminal], home: Path, tiny: str, request: pytest.FixtureRequest):
    """Return a chat shared by several tests, each with a new conversation; restart it after a failed test."""
    if "chat" not in running:
        folders = {"XDG_DATA_HOME": str(home / "data"), "XDG_STATE_HOME": str(home / "state")}
        editor = {name: str(home / "editor") for name in ("EDITOR", "VISUAL")}
        running["chat"] = Terminal("chat", tiny, *THINKS, program=TALKER, **folders, **editor)
        running["chat"].prompt()
    failed = request.session.testsfailed
    assert "new conversation" in running["chat"].say("/clear")
    yield running["chat"]
    assert "Traceback" not in running["chat"].seen
    if request.session.testsfailed > failed:
        del running["chat"]


THINKS = ["--chat-template", CHATML + "{# </think> #}"]


def session_of(tmp_path: Path, name: str) -> list[dict]:
    path = tmp_path / "data" / "localllm" / "sessions" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(lines: list[dict]) -> list[str]:
    return [line["content"] for line in lines[1:]]


# ---- with a real model ----------------------------------------------------------------------------------------------


def test_chat_answers_continues_and_leaves_on_sigterm(tiny: str, tmp_path: Path):
    chat = Terminal("chat", tiny, *GREEDY, XDG_STATE_HOME=str(tmp_path))
    assert "Tiny Test · F32 · 200000 tokens of context · /help" in chat.prompt()
    assert "the answer reached 12 tokens, the limit of -n" in chat.say("Hi")
    assert chat.say("/continue").count("\n") >= 3
    assert "to leave, press Ctrl-D or type /exit" in chat.press("\x03")
    chat.signal(signal.SIGTERM)
    assert chat.end() == 128 + signal.SIGTERM
    assert "Traceback" not in chat.seen
    assert "\x1b[?2004l" in chat.seen[chat.seen.rindex("type /exit") :], "bracketed paste is still on"


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ([], "its first .* dropped"),
        (["--on-overflow", "shift"], "(64|128) tokens after the first .* were dropped"),
        (["--on-overflow", "error"], "error: the prompt has .* holds only"),
    ],
)
def test_a_conversation_too_long_is_cut_as_chosen(tiny: str, tmp_path: Path, choice: list[str], expected: str):
    chat = Terminal("chat", tiny, *GREEDY, "-c", "192", *choice, XDG_STATE_HOME=str(tmp_path))
    chat.prompt()
    for _ in range(2):
        chat.say("x" * 60)
    assert re.search(expected, chat.say("y" * 60), re.DOTALL)
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


def test_ctrl_c_stops_the_answer_but_not_the_conversation(tiny: str, tmp_path: Path):
    chat = Terminal("chat", tiny, *LONG, XDG_STATE_HOME=str(tmp_path))
    chat.prompt()
    chat.type("Hi\r")
    chat.expect("Hi(?s:.{400})")
    chat.type("\x03")
    chat.prompt()
    chat.type("/exit\r")
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


# ---- how it looks ---------------------------------------------------------------------------------------------------


def test_words_are_wrapped_whole_at_every_width(talk):
    """Resize the window in between."""
    chat = talk(columns=40)
    chat.prompt()
    words = [word for word in MIXED.split() if word.isascii() or "é" in word]
    for columns in (40, 120, 60):
        chat.resize(columns)
        shown = chat.say("mixed").split("> ")[0].strip("\n")
        assert max(map(wcswidth, shown.split("\n"))) <= columns
        assert shown.count("\n") == wcswidth(MIXED) // columns
        assert re.sub(r"\s+", "", shown) == re.sub(r"\s+", "", MIXED)
        assert all(word in shown for word in words)
        assert max(map(len, chat.say("/help").split("\n"))) <= columns
    chat.type("\x04")
    assert chat.end() == 0


def test_markdown_is_drawn_at_every_width(talk):
    chat = talk("--markdown", columns=40)
    chat.prompt()
    for columns in (40, 120):
        chat.resize(columns)
        shown = chat.say("colours")
        assert "\x1b[1mred\x1b[0m" in chat.drawn and "• " in shown
        assert "**" not in shown and "```" not in shown and "x = 1" in shown
        assert max(map(wcswidth, shown.split("\n"))) <= columns
        assert " ".join(shown.split()).count("One line of text.") >= 12
    chat.type("bye\r")
    assert chat.end() == 0


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"NO_COLOR": ""}, {"TERM": "dumb"}])
def test_colours_follow_no_color_and_term(talk, environment: dict[str, str]):
    chat = talk(**environment)
    if environment == {"TERM": "dumb"}:
        chat.expect("> ")
        chat.type("hello\n")
        chat.expect("HELLO")
        chat.expect("> ")
        chat.type('"""\na\nb\n"""\n')
        chat.expect("A\r\nB\r\n")
        chat.type("quit\n")
    else:
        chat.expect(">")
        chat.type("quit\r")
    assert chat.end() == 0
    colours = re.findall("\x1b\\[[0-9;]*[1-9][0-9;]*m", chat.seen)
    assert bool(colours) == (environment == {"NO_COLOR": ""})
    assert ("\x1b" in chat.seen) == ("TERM" not in environment)


@pytest.mark.parametrize("end", ["\r", "\n"])
def test_a_paste_of_three_lines_is_one_message_on_a_dumb_terminal(talk, end: str):
    chat = talk(TERM="dumb", timeout=20)
    chat.expect("> ")
    chat.type(end.join(("one", "two \\", "three", "")))
    chat.expect("ONE\r\nTWO \\\\\r\nTHREE\r\n")
    chat.expect("> ")
    chat.type(end.join(("four", "", "five")))
    chat.expect("five")
    chat.type("\x7fE\r")
    chat.expect("FOUR\r\n\r\nFIVE\r\n")


def test_control_bytes_are_dropped_on_a_dumb_terminal(talk):
    chat = talk(TERM="dumb", timeout=20)
    chat.expect("> ")
    chat.type("\x1b[Aa\x01\x00b\x1bOP\x1b[200~c\x1b[201~\x1bf\x1b]0;title\x07d\t\x1b[1;5C\u3000e")
    chat.expect("e")
    chat.type("\x1b")  # the escape key, alone
    time.sleep(0.1)
    chat.type("f\r")
    chat.expect("ABCD\t\u3000EF\r\n")


def test_control_bytes_of_a_paste_are_dropped(chat: Terminal):
    assert "ABC" in chat.press("\x1b[200~a\x01\x1b[31mb\x1b[0mc\x00\x1b[201~\r").splitlines()


def test_lines_typed_during_an_answer_stay_apart_on_a_dumb_terminal(talk):
    chat = talk(TERM="dumb", timeout=20)
    chat.expect("> ")
    chat.type("slowly\r")
    chat.expect("two")
    chat.type("first\rsecond\r")
    chat.expect("FIRST\r\n")
    chat.expect("SECOND\r\n")


SLOW = """
import sys, time
sys.path.insert(0, {support!r})
import talker
from localllm import api
from localllm.cli import main
def open_slowly(*arguments):
    time.sleep(0.5)
    return talker.open_talker(*arguments)
api.open_with_options = open_slowly
main.main()
"""


def test_keys_typed_while_the_model_loads_are_hidden_and_kept(tiny: str, tmp_path: Path):
    program = [sys.executable, "-c", SLOW.format(support=str(SUPPORT))]
    chat = Terminal("chat", tiny, program=program, XDG_STATE_HOME=str(tmp_path), timeout=20)
    chat.expect(r"\x1b\[\?2004h")  # keys are held back from here on
    chat.type("hello\r")
    assert "hello" not in chat.expect("/help")
    chat.expect("HELLO")
    chat.prompt()
    chat.type(f"/model {tiny}\r")
    chat.expect(r"\x1b\[\?2004l\s*\x1b\[\?2004h")
    chat.type("again\r")
    assert "again" not in chat.expect("tokens of context")
    chat.expect("AGAIN")
    chat.prompt()
    chat.type("\x04")
    assert chat.end() == 0


def test_a_question_can_be_asked_while_keys_are_held_back():
    script = (
        "import sys, termios\n"
        "from localllm.cli.open_model import confirm\n"
        "from localllm.cli.terminal.type_ahead import hold_keys\n"
        "def echoes(): return bool(termios.tcgetattr(0)[3] & termios.ECHO)\n"
        "with hold_keys(), hold_keys():\n"
        "    held = echoes()\n"
        "    answer = confirm('Really?')\n"
        "    print(held, answer, echoes())\n"
        "print(echoes())\n"
    )
    terminal = Terminal(program=[sys.executable, "-c", script], timeout=20)
    terminal.expect("y/N")
    terminal.type("yes\r")
    assert terminal.end() == 0 and plain(terminal.seen).split()[-5:] == ["yes", "False", "True", "False", "True"]


def test_think_shows_hides_or_turns_off_reasoning(chat: Terminal):
    chat.say("think")
    drawn = chat.drawn
    assert "\x1b[2mLet\x1b[0m" in drawn and "<think>" not in plain(drawn)
    assert "Let me see, what is it?\n\nIt is four.\n" in plain(drawn)
    assert "reasoning is hidden" in chat.say("/think hide")
    shown = chat.say("think")
    assert "Let me see" not in shown and "It is four." in shown
    assert "thinking is off" in chat.say("/think off")
    assert "thinking is auto; reasoning is shown" in chat.say("/think auto")
    assert "/think auto|on" in chat.say("/think perhaps")
    assert "--think on is ignored: the model's chat template has no thinking option" in chat.say("/think on")
    assert "the answer is empty: the model wrote only reasoning" in chat.say("ponder")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("markdown", [(), ("--markdown",)])
def test_headings_separate_reasoning_from_the_answer_without_colours(talk, environment: dict[str, str], markdown):
    chat = talk(*markdown, *THINKS, timeout=20, **environment)
    chat.expect(">")
    for question, shown in (
        ("think", "\nthinking:\nLet me see, what is it?\n\nanswer:\nIt is four.\n"),
        ("ponder", "\nthinking:\nLet me see, what is it?\nlocalllm: the answer is empty"),
    ):
        chat.type(f"{question}\r")
        chat.expect("thinking:")
        chat.expect(">")
        drawn_again = "answer:\nI\n"  # rich draws a growing block several times
        assert shown in plain(chat.seen).replace(drawn_again, "answer:\n")


def test_run_ends_reasoning_without_an_answer_with_a_line_break_and_a_word(tiny: str):
    for options, code, end in (
        ((), 0, "localllm: the answer is empty: the model wrote only reasoning\n"),
        (("-n", "15"), 7, "localllm: error: the answer is empty: its reasoning was cut off; raise -n or the context, "),
    ):
        run = Terminal(
            "run", tiny, "-p", "ponder", *THINKS, "-c", "512", *options, columns=200, program=TALKER, TERM="dumb"
        )
        assert run.end() == code
        assert re.fullmatch(rf"thinking:\nLet.*\n\n?{re.escape(end)}.*", plain(run.seen), re.DOTALL)
    run = Terminal("run", tiny, "-p", "think", *THINKS, "-c", "512", program=TALKER, TERM="dumb")
    assert run.end() == 0 and plain(run.seen) == "thinking:\nLet me see, what is it?\n\nanswer:\nIt is four.\n"
    run = Terminal("run", tiny, "-p", "think", *THINKS, "-c", "512", program=TALKER)
    assert run.end() == 0 and plain(run.seen) == "Let me see, what is it?\n\nIt is four.\n"


def test_run_reports_a_template_without_a_thinking_switch(tiny: str):
    message = "localllm: --think on is ignored: the model's chat template has no thinking option\n"
    for choice, begin in (("on", message), ("auto", ""), ("off", "")):
        run = Terminal("run", tiny, "-p", "hello", "-c", "512", "--think", choice, program=TALKER)
        assert run.end() == 0 and plain(run.seen) == f"{begin}HELLO\n"


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_edit_paste_complete_and_search(chat: Terminal, home: Path, talk):
    assert "FIRST\nSECOND\nTHIRD\n" in chat.say("first\\\rsecond\x1b\rthird")
    assert "\nA\nB\n\n" in chat.say('"""\ra\rb\r"""')
    assert "PASTED\n  LINES\n" in chat.say("\x1b[200~pasted\r  lines\x1b[201~")
    assert "removed: pasted lines" in chat.say("/und\t")
    assert "FIRST\nSECOND\nTHIRD\n" in chat.press("\x12econd\r")  # Ctrl-R
    assert "THIRDUP\n" in chat.press("\x1b[Aup\r"), "what was typed before can be changed"
    history = home / "state" / "localllm" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    typed = [json.loads(line) for line in history.read_text().splitlines()]
    assert "first\nsecond\nthird" in typed and typed[-1].endswith("up")
    again = talk(XDG_STATE_HOME=str(home / "state"))
    again.prompt()
    assert "PASTED\n  LINES\n" in again.press("\x12pasted\r")
    again.type("exit\r")
    assert again.end() == 0


@pytest.mark.slow
def test_lines_typed_during_an_answer_are_asked_next(chat: Terminal):
    chat.type("slowly\r")
    chat.expect("one two")
    chat.type("after\\\r\x1b[200~it\rall\x1b[201~\r")
    rest = plain(chat.expect("ten\r\n.*?" + PROMPT))
    assert re.sub(r"\s+", " ", rest).startswith(" three four five six seven eight nine ten")
    assert "AFTER\nIT\nALL\n" in plain(chat.expect("ALL\r\n"))
    chat.prompt()
    chat.type("slowly\r")
    chat.expect("one")
    chat.type("forgotten")
    chat.type("\x03")
    chat.prompt()
    assert "NEXT" in chat.say("next"), "Ctrl-C forgets what was typed"


def test_the_external_editor_writes_and_edits_a_question(chat: Terminal):
    chat.type("draft\x18\x05")  # what is written there is sent, as in a shell
    chat.expect("WRITTEN ELSEWHERE")
    chat.prompt()
    chat.say("/edit")
    assert "nothing changed" in chat.press("\x03")
    chat.say("/edit")
    assert "WRITTEN ELSEWHERE NOW" in chat.say(" now")
    assert "removed: written elsewhere now" in chat.say("/undo")
    assert "the conversation has no question to undo" in chat.say("/undo")
    assert "no question to edit yet" in chat.say("/edit")
    assert "no question to repeat yet" in chat.say("/retry")
    assert "no answer to continue" in chat.say("/continue")


# ---- commands -------------------------------------------------------------------------------------------------------


def test_set_changes_options_and_refuses_invalid_ones(chat: Terminal):
    assert "temperature = 0.5" in chat.say("/set temp 0.5")
    assert "top_p must be above 0" in chat.say("/set top_p 7")
    assert "unknown option 'colour'" in chat.say("/set colour 7")
    assert "seed must be an integer" in chat.say("/set seed x")
    assert "/set OPTION VALUE" in chat.say("/set")
    chat.say("/set temp default")


def test_stats_are_shown_after_an_answer_when_on(chat: Terminal):
    assert "statistics are on" in chat.say("/stats")
    assert re.search(r"tokens generated · .* tokens/s · context \d+ of 4096", chat.say("two"))
    assert "/stats on|off" in chat.say("/stats perhaps")
    assert "statistics are off" in chat.say("/stats off")


def test_retry_and_undo_apply_to_the_last_question(chat: Terminal):
    chat.say("one")
    chat.say("two")
    assert "\nTWO\n" in chat.say("/retry")
    assert "removed: two" in chat.say("/undo")


def test_read_sends_a_file_with_the_next_question(chat: Terminal, tmp_path: Path):
    (tmp_path / "notes über.txt").write_text("what is in it")
    assert "13 characters of notes über.txt" in chat.say(f"/read {tmp_path}/not\t")
    assert "13 characters for the next question" in chat.say("/show")
    assert "THREE\n\nWHAT IS IN IT\n" in chat.say("three")
    assert "cannot read" in chat.say(f"/read {tmp_path}/nothing")


def test_continue_resumes_an_answer_cut_by_max_tokens(chat: Terminal):
    chat.say("/set max_tokens 5")
    cut = "localllm: the answer reached 5 tokens, the limit of -n; /continue resumes it"
    assert f"\nABCDE\n{cut}\n" in chat.say("abcdefghij")
    assert "\nFGHIJ\nlocalllm: the answer reached" in chat.say("/continue")
    chat.say("/set max_tokens default")


def test_show_lists_model_system_message_and_options(talk):
    chat = talk("--temp", "0.5", columns=120)
    chat.prompt()
    chat.say("/set max_tokens 5")
    assert "system message set" in chat.say("/system Be brief.")
    shown = chat.say("/show")
    for words in ("Tiny Test · F32", "Be brief.", "max_tokens = 5, temperature = 0.5", "context   "):
        assert words in shown
    assert "new conversation" in chat.say("/clear")
    assert "0 of 4096 tokens, in 1 message" in chat.say("/show")
    assert "no longer" not in chat.say("/system")


def test_unknown_commands_are_refused_and_an_indented_slash_is_text(chat: Terminal):
    assert "unknown command /nonsense" in chat.say("/nonsense")
    assert "\n /FOUR\n" in chat.say(" /four")


def test_model_switches_the_model_and_keeps_the_conversation(talk, tiny: str):
    chat = talk("--temp", "0", columns=120)
    chat.prompt()
    chat.say("four")
    assert "Tiny Test" in chat.say(f"/model {tiny}")
    assert "error" in chat.say("/model nothing.gguf")
    assert "\nFIVE\n" in chat.say("five")
    assert "in 4 messages" in chat.say("/show")
    chat.type("quit\r")
    assert chat.end() == 0


@pytest.fixture
def trip(talk, tmp_path: Path, monkeypatch) -> Terminal:
    """Return a chat with the session trip, which has one turn and a branch `other` with another turn."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    chat = talk("--session", "trip", "-sys", "Be brief.", "--temp", "0")
    chat.prompt()
    chat.say("one")
    assert "new branch other" in chat.say("/branch other")
    chat.say("three")
    return chat


@pytest.mark.sampled
@pytest.mark.slow
def test_turns_are_saved_in_the_session_and_its_branches(trip: Terminal, tmp_path: Path):
    saved = session_of(tmp_path, "trip")
    assert saved[0]["model"]["name"] == "Tiny Test" and saved[0]["settings"] == {"temperature": 0.0}
    assert contents(saved) == ["Be brief.", "one", "ONE"]
    assert "  trip" in (listed := trip.say("/branch")) and "* other" in listed
    assert "switched to branch trip" in trip.say("/branch trip")
    trip.say("two")
    trip.say("/undo")
    assert contents(session_of(tmp_path, "trip")) == ["Be brief.", "one", "ONE"]
    trip.say("four")
    assert contents(session_of(tmp_path, "trip"))[-2:] == ["four", "FOUR"]
    assert contents(session_of(tmp_path, "other")) == ["Be brief.", "one", "ONE", "three", "THREE"]


@pytest.mark.sampled
@pytest.mark.slow
def test_a_session_is_locked_and_its_commands_refuse_other_names(trip: Terminal, talk):
    trip.say("/branch trip")
    second = talk("--session", "trip")
    assert "error: --session 'trip' is open in another chat" in second.expect("chat\r\n")
    assert second.end() == 2
    assert "is open in another chat" not in trip.say("/load trip")
    assert "Tiny Test" in trip.say("/sessions")
    assert "session 'other' already exists" in trip.say("/save other")
    assert "not a valid session name" in trip.say("/save ../evil")
    assert "unknown session 'none'" in trip.say("/load none")


@pytest.mark.sampled
@pytest.mark.slow
def test_continue_resumes_the_session_used_last_by_a_killed_chat(trip: Terminal, tmp_path: Path):
    trip.say("/branch trip")
    trip.say("four")
    assert "session   other · 5 messages" in trip.say("/load oth\t")
    trip.signal(signal.SIGKILL)
    assert trip.end() == -signal.SIGKILL
    again = Terminal("chat", "--continue", program=TALKER, XDG_DATA_HOME=str(tmp_path / "data"))  # its model
    assert "Tiny Test" in (begun := again.prompt()) and "session other · 5 messages" in begun
    assert "removed: three" in again.say("/undo"), "the latest that was used, not written"
    assert "temperature = 0.0" in again.say("/show"), "a session's options hold again"
    again.type("/exit\r")
    assert again.end() == 0


@pytest.mark.sampled
@pytest.mark.slow
def test_sessions_are_listed_shown_and_removed_by_the_command(trip: Terminal, cli):
    trip.say("/branch trip")
    trip.say("four")
    trip.type("/exit\r")
    assert trip.end() == 0
    code, out, _ = cli("sessions")
    assert code == 0 and re.search(r"^trip +\d{4}-\d\d-\d\d \d\d:\d\d +5  one +Tiny Test$", out, re.MULTILINE)
    code, out, _ = cli("sessions", "show", "trip")
    assert (code, out) == (0, "system: Be brief.\n\nuser: one\n\nassistant: ONE\n\nuser: four\n\nassistant: FOUR\n")
    assert cli("sessions", "rm", "trip")[0] == 0
    assert cli("sessions", "show", "trip")[0] == 2


def test_branches_without_a_session_stay_in_memory(chat: Terminal, home: Path):
    chat.say("one")
    chat.say("/branch wild")
    chat.say("two")
    assert "switched to branch main" in chat.say("/branch main")
    assert "removed: one" in chat.say("/undo")
    chat.say("/branch wild")
    assert "removed: two" in chat.say("/undo")
    assert "saved as session kept" in chat.say("/save kept")
    assert contents(session_of(home, "kept")) == ["one", "ONE"]
    assert "session kept is unchanged" in chat.say("/clear")


def test_a_chat_with_a_session_needs_a_terminal(cli, refused, tiny: str):
    refused(["chat", tiny, "--session", "x"], "sessions need a terminal", stdin=b"Hi")
    assert cli("chat", tiny, "--session", "x", "--continue", stdin=b"Hi")[0] == 2


def test_a_question_without_an_answer_is_withdrawn(chat: Terminal, home: Path):
    """Withdraw it after Ctrl-C before the first token, and if it does not fit."""
    chat.say("/save short")
    chat.say("one")
    chat.say("/set on_overflow error")
    assert "error: the prompt has" in chat.press(f"\x1b[200~{'x' * 4200}\x1b[201~\r")
    chat.say("/set on_overflow default")
    assert "\nONE\n" in chat.say("/retry")
    chat.type("waiting\r")
    chat.expect("\x1b\\[\\?2004l\x1b\\[\\?2004h")
    chat.type("\x03")
    chat.prompt()
    assert contents(session_of(home, "short")) == ["one", "ONE"]
    assert "in 2 messages" in chat.say("/show")
