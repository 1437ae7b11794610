"""Test the terminal: closed streams, Ctrl-C, keys of the editor, and exit codes."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoked import Opened

from localllm.cli import main, map_run
from localllm.cli.commands import chat
from localllm.cli.interactive import slash_commands as chat_commands
from localllm.cli.terminal import line_editor, tool_calls, type_ahead
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.line_editor import LineEditor
from localllm.errors import (
    ContextError,
    CutError,
    LocalllmError,
    MemoryLimitError,
    ModelError,
    RecordsError,
    UsageError,
)
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.options import GenerationOptions

# ---- how it ends

NO_MEMORY = "not enough memory"


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (LocalllmError("x"), "x", 1), (UsageError("x"), "x", 2), (ModelError("x"), "x", 3), (ContextError("x"), "x", 4),
        (MemoryLimitError("x"), "x", 5), (RecordsError("x"), "x", 6), (CutError("x"), "x", 7),
        (OSError(28, "the disk is full"), "the disk is full", 1), (OSError("odd"), "odd", 1),
        (OSError(28, "the disk is full", "f"), "f: the disk is full", 1),
        (MemoryError("new thread"), f"{NO_MEMORY}, or too many threads", 5), (MemoryError(), NO_MEMORY, 5),
        (RuntimeError("can't start new thread"), f"{NO_MEMORY}, or too many threads", 5),
        (ImportError("x: failed to map segment from shared object"), NO_MEMORY, 5),
        (OSError("Cannot allocate memory"), NO_MEMORY, 5),
        (OSError("Could not find/load shared object file 'x'"), NO_MEMORY, 5),
        (ValueError("can't start new thread"), "internal error, please report it: ValueError: can't start new thread "
         "(set LOCALLLM_DEBUG=1 for details)", 1),
        (type("Typers", (Exception,), {"format_message": lambda self: "no such thing"})(), "no such thing", 2),
    ],
)  # fmt: skip
def test_every_error_has_its_message_and_exit_code(error: Exception, message: str, code: int):
    assert main.explain_error(error) == (message, code)


def test_exits_and_interruptions_print_nothing(capsys):
    interrupted = RuntimeError("a class was made")
    interrupted.__cause__ = KeyboardInterrupt()
    ends = [SystemExit(3), SystemExit(None), SystemExit("x"), KeyboardInterrupt(), interrupted]
    assert [main.report_error(each) for each in ends] == [3, 0, 1, 130, 130]
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_is_raised_again_where_python_cannot_raise_it(monkeypatch):
    """Report other errors that cannot be raised as Python does."""
    did: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", None)
    monkeypatch.setattr(sys, "__unraisablehook__", did.append)
    monkeypatch.setattr(main, "_thread", SimpleNamespace(start_new_thread=lambda do, arguments: do(*arguments)))
    monkeypatch.setattr(main, "sleep", lambda seconds: did.append(f"waited {seconds}"))
    monkeypatch.setattr(main, "interrupt_main", lambda: did.append("again"))
    main.reraise_ctrl_c()
    other = SimpleNamespace(exc_type=ValueError)
    for unraisable in (SimpleNamespace(exc_type=KeyboardInterrupt), other):
        sys.unraisablehook(unraisable)
    assert did == ["waited 0.01", "again", other]


def test_check_environment_opens_closed_streams_and_demands_memory(monkeypatch):
    """Replace closed streams, so that no file gets their descriptors."""
    opened: list[Any] = []
    monkeypatch.setattr(main, "os", SimpleNamespace(
        environ=os.environ, devnull=os.devnull, O_RDWR=os.O_RDWR, open=lambda *arguments: opened.append(arguments),
        fstat=lambda number: os.fstat(-1) if number in (0, 2) else None, set_inheritable=lambda *arguments: None,
    ))  # fmt: skip
    limits = [main.MIN_MEMORY]
    monkeypatch.setattr("localllm.system.memory.get_address_limit", lambda: limits[-1])
    main.check_environment()
    limits.append(main.MIN_MEMORY - 1)
    assert opened == [(os.devnull, os.O_RDWR)] * 2
    with pytest.raises(
        MemoryLimitError, match=r"^not enough memory: `ulimit -v` leaves only 0\.\d\d GB; raise this limit$"
    ):
        main.check_environment()
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(LocalllmError, match=r"^stdout is closed: open it or redirect it to a file$"):
        main.check_environment()


def test_missing_and_closed_streams_are_no_terminals():
    closed = io.StringIO()
    closed.close()
    for stream in (None, io.StringIO(), closed):
        assert not terminal.is_terminal(stream)


def test_nothing_is_written_after_the_end_of_output(tmp_path: Path, monkeypatch):
    with open(tmp_path / "out", "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        terminal.write("sa\udcffd ä")
        out.write("!")
        terminal.end_output()
        out.write("more")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "sa?d ä!"
    monkeypatch.setattr(sys, "stdout", None)
    terminal.discard_output()


@pytest.mark.parametrize("gone", [None, "closed"])
def test_messages_to_a_closed_stderr_are_dropped(gone: str | None, monkeypatch, capsys):
    stderr = io.StringIO()
    stderr.close()
    monkeypatch.setattr(sys, "stderr", gone and stderr)
    terminal.say("x")
    terminal.say_dim("x")
    assert capsys.readouterr().out == ""


def test_a_termination_signal_exits_with_its_code(monkeypatch):
    heard: list[Any] = []
    monkeypatch.setattr(terminal, "handle_termination", heard.append)
    terminal.exit_on_signals()
    with pytest.raises(SystemExit) as end:
        heard[0](15, None)
    assert end.value.code == 143


def test_ctrl_c_lets_running_work_finish_and_twice_interrupts(capfd, monkeypatch):
    """Restore the handler after the block."""
    stopped, before = [], lambda number, frame: None
    signal.signal(signal.SIGINT, before)
    for there, line in ((False, ""), (True, "\n")):
        monkeypatch.setattr(map_run, "is_terminal", lambda stream, there=there: there)
        with pytest.raises(KeyboardInterrupt), map_run.finish_on_ctrl_c(lambda: stopped.append(1)):
            signal.raise_signal(signal.SIGINT)
            assert stopped == [1]
            signal.raise_signal(signal.SIGINT)
        message = "localllm: finishing the running records; press Ctrl-C again to quit at once"
        assert capfd.readouterr().err.replace("\r\n", "\n") == f"{line}{message}\n"
        assert signal.getsignal(signal.SIGINT) == before
        stopped.clear()


def test_the_keyboard_is_opened_even_if_stdin_is_redirected(tmp_path: Path, monkeypatch):
    """Close what was opened if only one half of the terminal is available."""
    (tmp_path / "keys").write_text("YES\n")
    monkeypatch.setattr(tool_calls, "discard_input", lambda keys: None)
    monkeypatch.setattr(tool_calls, "KEYBOARD_PATH", str(tmp_path / "keys"))
    monkeypatch.setattr(tool_calls, "SCREEN_PATH", str(tmp_path / "none" / "screen"))
    assert tool_calls.ConsentTerminal.open() is None
    monkeypatch.setattr(tool_calls, "SCREEN_PATH", str(tmp_path / "screen"))
    keyboard = tool_calls.ConsentTerminal.open()
    assert keyboard is not None and keyboard.ask("allow it? ") == "yes"
    keyboard.close()
    assert (tmp_path / "screen").read_text() == "allow it? "
    monkeypatch.setattr(tool_calls, "KEYBOARD_PATH", str(tmp_path / "none"))
    assert tool_calls.ConsentTerminal.open() is None


@pytest.mark.parametrize(
    ("can", "screens", "dumb", "marked"),
    [
        (True, (True, True), False, (1, 0)), (True, (False, True), False, (0, 1)),
        (True, (False, False), False, (0, 0)), (True, (True, True), True, (0, 0)), (False, (True, True), False, (0, 0)),
    ],
)  # fmt: skip
def test_bracketed_paste_is_on_only_within_the_block(
    can: bool, screens: tuple, dumb: bool, marked: tuple, monkeypatch, capsys
):
    monkeypatch.setattr(type_ahead, "use_raw_keys", lambda *arguments: nullcontext(can))
    monkeypatch.setattr(type_ahead, "is_terminal", lambda stream: screens[stream is sys.stdout])
    monkeypatch.setattr(type_ahead, "is_dumb", lambda: dumb)
    with pytest.raises(ZeroDivisionError), type_ahead.hold_keys():
        out, err = capsys.readouterr()
        assert (err, out) == tuple("\x1b[?2004h" * each for each in marked)
        raise ZeroDivisionError
    out, err = capsys.readouterr()
    assert (err, out) == tuple("\x1b[?2004l" * each for each in marked)


# ---- the editor


@pytest.fixture
def type_in(tmp_path: Path, monkeypatch):
    """Return a function that types keys into the editor and returns the line."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(line_editor, "exit_on_signals", lambda: None)
    monkeypatch.setattr(line_editor, "can_handle_in_loop", lambda: False)

    def typed(keys: str, text: str = "", offers: tuple[str, ...] = ()) -> str:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            pipe.close()  # nothing more is typed: who waits for it gets EOFError
            return LineEditor(lambda line: ((offer, 0) for offer in offers if offer.startswith(line))).read(text)

    return typed


@pytest.mark.skipif(sys.platform == "win32", reason="keys of POSIX")
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\r", "one"), ("one\x1b\rtwo\r", "one\ntwo"), ("one\\\rtwo\r", "one\ntwo"), ('"""\ra\r\rb"""\r', "a\n\nb"),
        ("/c\t\r", "/clear"), ("/s\tx\r", "/sx"), ("/h\t\r", "/help"), ("\x12on\r", "one"),
    ],
)  # fmt: skip
def test_editor_keys_edit_complete_and_search(type_in, keys: str, text: str):
    """Complete the common prefix by Tab, and search the history by Ctrl-R."""
    if keys.startswith("\x12"):
        type_in("one\r")
    assert type_in(keys, "", ("/clear", "/help", "/save", "/stats")) == text


@pytest.mark.skipif(sys.platform == "win32", reason="keys of POSIX")
def test_ctrl_c_and_ctrl_d_leave_the_editor(type_in):
    assert type_in("!\r", "given") == "given!"
    for key, left in (("\x03", KeyboardInterrupt), ("\x04", EOFError)):
        with pytest.raises(left):
            type_in(key)


@pytest.mark.parametrize(
    ("text", "is_open", "inner"),
    [
        ("a", False, "a"), (" a ", False, " a "), ('a"""', False, 'a"""'), ('"""', True, '"""'), ('"""a', True, '"""a'),
        (' """a', True, ' """a'), ('"""a"', True, '"""a"'), ('"""a"""', False, "a"),
        (' """\n a \n\n""" ', False, " a "),
        ('""""""', False, ""), ('"""""', True, '"""""'), ('"""a"""b', True, '"""a"""b'), ('""a""', False, '""a""'),
        ('"""a\nb', True, '"""a\nb'), ('"""\na\n b\n"""', False, "a\n b"), ('say """x"""', False, 'say """x"""'),
        ('"""\n"""', False, ""), ('""', False, '""'), ('a """', False, 'a """'),
    ],
)  # fmt: skip
def test_text_between_triple_quotes_is_one_message(text: str, is_open: bool, inner: str):
    """Keep an unclosed text as it is, since Ctrl-D may end it."""
    assert (line_editor.has_open_quotes(text), line_editor.strip_quotes(text)) == (is_open, inner)


def test_chat_continues_after_errors_until_ctrl_d(monkeypatch, capsys):
    """End one line by Ctrl-C or an error; ignore blank lines."""
    lines: Iterator[Any] = iter(["a", KeyboardInterrupt, " ", "wrong", "stop", "/zzzz", EOFError, "never"])
    asked, dimmed = [], []

    def read() -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    def ask(text: str) -> None:
        asked.append(text)
        if text == "wrong":
            raise LocalllmError("it went wrong")
        if text == "stop":
            raise KeyboardInterrupt

    monkeypatch.setattr(line_editor, "make_editor", lambda complete: SimpleNamespace(read=read))
    monkeypatch.setattr(chat, "say_dim", dimmed.append)
    talk = SimpleNamespace(ask=ask, attach_dropped=lambda text: text)
    chat.run_loop(talk, lambda path: pytest.fail(path), ExitStack())
    assert (asked, dimmed, next(lines)) == (
        ["a", "wrong", "stop"],
        ["to leave, press Ctrl-D or type /exit", "interrupted"],
        "never",
    )
    none = "unknown command /zzzz; /help lists the commands; put a space before a text that begins with a slash"
    assert capsys.readouterr().err == f"localllm: error: it went wrong\nlocalllm: error: {none}\n"


@pytest.mark.parametrize("has_tools", [False, True])
def test_chat_with_a_prompt_exits_as_run_does(has_tools: bool, monkeypatch):
    """Exit with the code of Ctrl-C, or of a constrained answer that was cut."""
    settled: list[Any] = []
    answer, ends = SimpleNamespace(finish_reason="length", text="x", thinking=""), [False]
    model, formed = Opened("m.gguf"), GenerationOptions(constraint=make_constraint(regex="a"))
    monkeypatch.setattr("localllm.cli.terminal.tool_calls.answer_with_tools", lambda *arguments: (answer, [], ends[0]))
    monkeypatch.setattr(chat, "start_answer", lambda *arguments: answer)
    monkeypatch.setattr(chat, "print_stream", lambda *arguments: ends[0])
    monkeypatch.setattr(chat.opening, "finish_writes", settled.append)

    def once(chosen: GenerationOptions) -> None:
        chat.answer_once(model, [], chosen, object() if has_tools else None, None)

    once(GenerationOptions())
    assert settled == [model]
    with pytest.raises(CutError, match="the answer was cut"):
        once(formed)
    ends[0] = True
    with pytest.raises(KeyboardInterrupt):
        once(formed)
    assert len(settled) == 2


def test_help_on_a_narrow_terminal_is_stacked(monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(chat_commands, "print_dim", shown.append)
    for width in (35, 36, 100):
        monkeypatch.setattr(chat_commands, "get_width", lambda width=width: width)
        chat_commands.show_help(None, "", None)
    narrow, wider, wide = (text.splitlines() for text in shown)
    assert narrow[:4] == ["/help", "    show this help", "/clear", "    start a new conversation"]
    place = narrow.index("/undo N")
    assert narrow[place + 1 : place + 5] == [
        "    remove an attached file, or the", "    last N questions with their", "    answers (default 1)", "/retry",
    ]  # fmt: skip
    assert wider[:3] == ["/help             show this help", "/clear            start a new", f"{'':18}conversation"]
    assert wide[0] == "/help             show this help"
    place = wide.index(
        "/undo N           remove an attached file, or the last N questions with their answers (default 1)"
    )
    assert wide[place + 1].startswith("/retry ") and max(map(len, wide)) <= 100
