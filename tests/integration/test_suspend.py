"""Test Ctrl-Z and signals in a chat under a shell with job control, also on dumb terminals."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from terminal import PROGRAM, PROMPT, Terminal

from localllm.files.gguf.file import GGUFFile

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here"),
]
SHELL = ["bash", "--norc", "--noprofile", "-i"]
MODES = "stty -a | tr ';' ' ' | grep -owE -- '-?(icanon|echo|icrnl|isig)' | sort | tr '\\n' ' '\r"
USUAL = "echo icanon icrnl isig "


class Shell(Terminal):
    """A shell in which a chat was started."""

    def __init__(self, tmp_path: Path, tiny: str, term: str, *arguments: str):
        folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_STATE_HOME": str(tmp_path / "state")}
        super().__init__(program=SHELL, PS1="SH> ", TERM=term, **folders)
        self.ready = "> " if term == "dumb" else PROMPT
        words = [*PROGRAM, "chat", tiny, "--session", "s", "--temp", "0", *arguments]
        self.type(" ".join(words) + "\r")
        self.expect("/help")
        self.expect(self.ready)

    def stop_and_return(self) -> None:
        """Press Ctrl-Z, check the terminal's modes, and resume by fg."""
        self.type("\x1a")
        self.expect("Stopped")
        self.expect("SH> ")
        self.type(MODES)
        self.expect("sort")  # the words as they are typed
        self.expect(USUAL)
        self.type("fg\r")
        self.expect("--session")

    def said(self, tmp_path: Path) -> list[str]:
        """Return the questions recorded in the session."""
        [file] = (tmp_path / "data").rglob("s.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        return [line["content"] for line in lines if line.get("role") == "user"]


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_z_at_the_prompt_suspends_and_resumes(tmp_path: Path, tiny: str, term: str):
    chat = Shell(tmp_path, tiny, term, "-n", "4")
    chat.type("What is")
    chat.expect("What is")
    chat.stop_and_return()
    chat.expect("What is")
    chat.type(" it?\r")
    chat.expect("reached 4 tokens")
    chat.expect(chat.ready)
    assert chat.said(tmp_path) == ["What is it?"]
    chat.stop_and_return()
    chat.expect(chat.ready)
    chat.type("\x04")
    chat.expect("SH> ")
    chat.type(MODES + "exit\r")
    chat.expect(USUAL)
    chat.end()


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_z_in_an_answer_suspends_and_resumes(tmp_path: Path, tiny: str, term: str):
    """Continue after fg, keep held keys, and keep Ctrl-Z out of the next question."""
    chat = Shell(tmp_path, tiny, term, "-n", "100000", "-c", "100000")
    chat.type("Go\r")
    chat.expect("\ufffd{3}")
    for _ in range(2):
        chat.stop_and_return()
        chat.expect("\\S{9}")
    chat.type("next")
    chat.type("\x03")
    chat.expect("interrupted")
    chat.expect(chat.ready)
    chat.type("then\r")
    chat.expect("\ufffd{3}")
    chat.type("\x03")
    chat.expect("interrupted")
    chat.expect(chat.ready)
    assert chat.said(tmp_path) == ["Go", "then"]
    chat.type("\x04")
    chat.expect("SH> ")
    chat.type(MODES + "exit\r")
    chat.expect(USUAL)
    chat.end()


@pytest.mark.slow
def test_a_long_line_can_be_typed_and_edited_on_a_dumb_terminal(tmp_path: Path, tiny: str):
    """Exceed a terminal's own limit of 4095 bytes."""
    chat = Shell(tmp_path, tiny, "dumb", "-n", "2", "-c", "30000", "--seed", "1")
    words = " ".join(f"wörd{number}" for number in range(1200))
    chat.type(words + "\r")
    chat.expect("reached 2 tokens")
    chat.expect("> ")
    chat.type("wrong\x15one twp\x7fo thre\x17three\r")
    chat.expect("reached 2 tokens")
    chat.expect("> ")
    chat.type("a\\\r")
    chat.expect("  ")
    chat.type("b\r")
    chat.expect("reached 2 tokens")
    chat.expect("> ")  # the session is written before it
    assert len(words) > 6000 and chat.said(tmp_path) == [words, "one two three", "a\nb"]
    assert "\x1b" not in re.sub("\x1b\\[\\?2004[hl]", "", chat.seen)
    chat.type("\x04")
    chat.expect("SH> ")
    chat.type("exit\r")
    chat.end()


@pytest.mark.parametrize(
    ("number", "name"), [(15, "Q4_K_M"), (1024 + 18, "Q6_K"), (999, "F32"), ("x", "F32"), (None, "F32")]
)
def test_chat_shows_the_declared_type_of_its_file(tiny: str, number: object, name: str):
    """Show its maker's name for it, whatever format most weights have."""
    with GGUFFile.open(tiny) as file:
        file.metadata["general.file_type"] = number
        assert (file.type_name, file.main_format) == (name, "F32")


def test_the_header_of_chat_shows_a_mixed_type(tmp_path: Path, tiny: str):
    other = tmp_path / "mixed.gguf"
    data = bytearray(Path(tiny).read_bytes())
    key = data.index(b"general.file_type") + len(b"general.file_type") + 4
    data[key : key + 4] = (15).to_bytes(4, "little")
    other.write_bytes(data)
    chat = Terminal("chat", str(other), XDG_DATA_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    assert " · Q4_K_M · " in chat.expect("/help")
    chat.prompt()
    assert "Q4_K_M" in chat.say("/show")
    chat.type("\x04")
    assert chat.end() == 0


ENDED_BY_ITSELF = """
import os, signal, sys, termios
from localllm.cli.terminal.output import exit_on_signals
from localllm.cli.terminal.type_ahead import hold_keys
from localllm.system.processes import list_fatal_signals
before = termios.tcgetattr(0)
for number in list_fatal_signals():
    if (child := os.fork()) == 0:
        exit_on_signals()
        try:
            with hold_keys():
                os.kill(os.getpid(), number)
        except SystemExit as end:
            os._exit(end.code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(number, code - 128 == number and termios.tcgetattr(0) == before)
    termios.tcsetattr(0, termios.TCSANOW, before)
"""


def test_every_fatal_signal_restores_the_terminal():
    shell = Terminal(program=[sys.executable, "-c", ENDED_BY_ITSELF])
    assert shell.end() == 0
    restored = dict(re.findall(r"(\d+) (True|False)", shell.seen))
    assert {*restored.values()} == {"True"}
    names = "SIGHUP", "SIGQUIT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGVTALRM", "SIGPROF"
    assert {str(int(getattr(signal, name))) for name in names} <= restored.keys()
    assert shell.seen.count("\x1b[?2004h") == len(restored) and shell.seen.count("\x1b[?2004l") >= len(restored)


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT"])
def test_a_signal_at_the_prompt_restores_the_terminal(tmp_path: Path, tiny: str, term: str, name: str):
    chat = Shell(tmp_path, tiny, term, "-n", "4")
    chat.type("\x1a")
    chat.expect("SH> ")
    # By Python: after bash's own kill a stopped job goes on, and may have ended before fg.
    kill = f'{sys.executable} -c "import os; os.kill($(jobs -p), {getattr(signal, name):d})"'
    chat.type(f"{kill}; fg; echo the code is $?; {MODES}")
    chat.expect(f"the code is {128 + getattr(signal, name)}\r")
    chat.expect(USUAL)
    chat.type("exit\r")
    chat.end()


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_backslash_in_an_answer_restores_the_terminal(tmp_path: Path, tiny: str, term: str):
    chat = Shell(tmp_path, tiny, term, "-n", "100000", "-c", "100000")
    chat.type("Go\r")
    chat.expect("\ufffd{3}")
    chat.type("\x1c")
    chat.expect("SH> ")
    chat.type(f"echo the code is $?; {MODES}")
    chat.expect(f"the code is {128 + signal.SIGQUIT}\r")
    chat.expect(USUAL)
    chat.type("exit\r")
    chat.end()
