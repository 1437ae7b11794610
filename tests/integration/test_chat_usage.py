"""Test what people do in a chat, on terminals of 40 and 80 columns."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from talker import MIXED
from terminal import Terminal, drawn, plain
from wcwidth import wcswidth

from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.interactive import state_commands
from tests.integration.test_chat import TALKER, talk  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")


def test_branches_of_a_session_are_kept(talk):  # noqa: F811
    chat = talk("--session", "A")
    chat.prompt()
    chat.say("one")
    assert "new branch B" in chat.say("/branch B")
    chat.say("two")
    assert "switched to branch A" in chat.say("/branch A")
    shown = chat.say("/branch")
    assert "* A" in shown and "  B" in shown
    assert "switched to branch B" in chat.say("/branch B")
    assert "* B" in chat.say("/branch")
    chat.say("/branch C")
    chat.type("bye\r")
    assert chat.end() == 0
    again = talk("--session", "C")
    again.prompt()
    assert [line.split() for line in again.say("/branch").splitlines()[-4:-1]] == [["A"], ["B"], ["*", "C"]]
    assert "switched to branch B" in again.say("/branch B")
    assert "removed: two" in again.say("/undo")


def test_branches_of_an_empty_session_are_kept(talk):  # noqa: F811
    chat = talk("--session", "A")
    chat.prompt()
    chat.say("/branch B")
    assert "switched to branch A" in chat.say("/branch A")


def test_a_file_too_long_is_refused_and_others_can_be_undone(talk, tmp_path: Path):  # noqa: F811
    (tmp_path / "long").write_text("word " * 2000)
    (tmp_path / "short").write_text("word")
    chat = talk("-c", "400")
    chat.prompt()
    chat.say("one")
    shown = chat.say(f"/read {tmp_path}/long")
    assert "long has " in shown and "of the context of 400 are free" in shown
    assert "/undo removes them" in chat.say(f"/read {tmp_path}/short")
    assert "removed: a file of 4 characters" in chat.say("/undo")
    assert "TWO" in chat.say("two") and "WORD" not in chat.drawn
    assert "removed: two" in chat.say("/undo")


def test_undo_removes_several_turns_and_shows_the_answer_before(talk):  # noqa: F811
    chat = talk("--stats")
    chat.prompt()
    for question in ("one", "two", "three", "four"):
        chat.say(question)
    shown = chat.say("/undo 2")
    assert "removed: four" in shown and "removed: three" in shown
    assert "1 token read in" in chat.say("/retry")
    assert "/undo N removes the last N questions" in chat.say("/undo x")


def test_ctrl_c_explains_how_to_continue(talk):  # noqa: F811
    chat = talk()
    chat.prompt()
    chat.type("slowly\r")
    chat.expect("one")
    chat.type("\x03")
    assert "interrupted; /continue continues the answer" in plain(chat.prompt())


def test_chat_takes_a_first_question_on_the_command_line(talk):  # noqa: F811
    chat = talk("-p", "hello")
    assert "HELLO" in plain(chat.prompt())
    assert "did you mean temperature?" in chat.say("/set temperatur 1")
    assert "did you mean /help?" in chat.say("/hlep")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_run_without_a_prompt_starts_a_conversation_on_a_terminal(tiny: str, tmp_path: Path, term: str):
    chat = Terminal("run", tiny, "-sys", "Be", "-n", "9", program=TALKER, XDG_STATE_HOME=str(tmp_path), TERM=term)
    chat.expect("/help")
    chat.expect("> ")
    chat.type("hello\r")
    chat.expect("HELLO")
    chat.expect("> ")
    chat.type("/bye\r")
    assert chat.end() == 0


@pytest.mark.parametrize("options", ["--raw", "--json", "--suffix x", "--no-stdin", "-x"])
def test_options_of_one_answer_need_a_prompt(tiny: str, options: str):
    run = Terminal("run", tiny, *options.split(), program=TALKER)
    assert run.end() == 2 and "the prompt is missing" in run.seen


@pytest.mark.parametrize("columns", [40, 80])
def test_lines_break_between_words(tiny: str, columns: int):
    words = ("-fa", "--mlock", "-b", "5", "-ub", "7", "--jinja", "--no-mmap", "--no-warmup", "--simple-io")
    run = Terminal("run", tiny, "-p", "mixed", *words, columns=columns, program=TALKER)
    assert run.end() == 0
    lines = plain(run.seen).splitlines()
    assert max(map(wcswidth, lines)) <= columns
    assert "ignored (no effect):" in " ".join(lines[:4])
    assert "".join(MIXED.split()) in "".join("".join(lines).split())


def test_show_prints_the_session_only_if_there_is_one(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(state_commands, "print_dim", lines.append)
    for file in (None, "x.jsonl"):
        chat_commands.show_session(SimpleNamespace(file=file, name="notes", lines=["a", "b"]))
    assert lines == ["session   notes · 2 messages"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("words", ["list --all", "config run", "inspect MODEL", "fit MODEL", "sessions"])
def test_tables_and_facts_are_no_wider_than_the_terminal(tiny: str, columns: int, words: str, tmp_path: Path):
    folder = tmp_path / "localllm" / "sessions"
    folder.mkdir(parents=True)
    model = {"name": "A model with a very long name", "path": "x", "fingerprint": "y"}
    header = {"session": 1, "created": "2026-11-22 10:34", "model": model, "settings": {}}
    messages = {"role": "user", "content": "Why is the sky blue, and the sea?"}, {"role": "assistant", "content": "So."}
    (folder / "one.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (header, *messages)))
    screen = Terminal(*words.replace("MODEL", tiny).split(), columns=columns, XDG_DATA_HOME=str(tmp_path))
    assert screen.end() == 0
    lines = drawn(screen.seen).splitlines()
    assert all(wcswidth(line) <= columns or " " not in line.strip() for line in lines), lines
    shown = {
        "list --all": "qwen3-4b ",
        "sessions": "Why is the sky" if columns == 80 else "2026-",
        "config run": "--temp ",
    }
    assert any(shown.get(words, "architecture  llama") in line for line in lines)
    if (words, columns) == ("list --all", 80):
        assert "A good first model" in drawn(screen.seen)


@pytest.mark.slow
def test_bench_shows_its_figures_on_a_narrow_terminal(tiny: str):
    screen = Terminal("bench", tiny, "-p", "8", "-n", "4", "-r", "1", columns=40)
    assert screen.end() == 0
    lines = drawn(screen.seen).splitlines()
    assert max(map(wcswidth, lines)) <= 40 and any("pp8" in line and " ± 0.00" in line for line in lines)
