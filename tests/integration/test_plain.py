"""Test plain output on a terminal, for screen readers: nothing is drawn again, and states are words."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal import Terminal

from tests.integration.test_chat import TALKER, THINKS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")

PASTE_SWITCH = re.compile(r"\x1b\[\?2004[hl]")  # the only escape sequences that a terminal gets
READY = r"\n(\x1b\[\?2004h)?> "
UP, DOWN, PASTE, END = "\x1b[A", "\x1b[B", "\x1b[200~", "\x1b[201~"
Talk = Callable[..., Terminal]


@pytest.fixture
def talk(tmp_path: Path, tiny: str) -> Iterator[Talk]:
    """Return a function that starts a chat and waits for its prompt."""
    chats: list[Terminal] = []

    def begin(*arguments: str, command: str = "chat", **environment: str) -> Terminal:
        folders = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("DATA", "STATE", "CONFIG")}
        chats.append(
            Terminal(command, tiny, "-c", "512", *arguments, program=TALKER, timeout=20, **folders, **environment)
        )
        chats[-1].expect("> ")
        return chats[-1]

    yield begin
    for chat in chats:
        assert "Traceback" not in chat.seen


def leave(chat: Terminal) -> str:
    """Leave a chat; return all it printed, without the switches for pasted text."""
    chat.type("bye\r")
    assert chat.end() == 0
    return PASTE_SWITCH.sub("", chat.seen).replace("\r\n", "\n")


@pytest.mark.parametrize("way", ["option", "variable", "config", "dumb", "run"])
def test_plain_chat_moves_no_cursor_and_says_states_in_words(talk: Talk, tmp_path: Path, way: str):
    if way == "config":
        (tmp_path / "config" / "localllm").mkdir(parents=True)
        (tmp_path / "config" / "localllm" / "config.toml").write_text("[defaults]\nplain = true\n")
    environment = {"variable": {"LOCALLLM_PLAIN": "1"}, "dumb": {"TERM": "dumb"}}.get(way, {})
    options = ["--plain"] * (way in ("option", "run"))
    command = "run" if way == "run" else "chat"
    markdown = ["--markdown"] * (command == "chat")
    chat = talk(*THINKS, *options, *markdown, command=command, **environment)
    for question in ("hello", "think"):
        chat.type(f"{question}\r")
        chat.expect("answer:")
        chat.expect(READY)
    heading, _, rest = leave(chat).partition("\n")
    assert heading == "Tiny Test, F32, 512 tokens of context, /help"
    assert rest == (
        "> hello\n\nanswer:\nHELLO\n\n> think\n\nthinking:\nLet me see, what is it?\n\nanswer:\nIt is four.\n\n> bye\n"
    )


@pytest.mark.parametrize("value", ["0", "false"])
def test_the_variable_can_turn_plain_output_off(talk: Talk, value: str):
    chat = talk(LOCALLLM_PLAIN=value, NO_COLOR="")
    chat.type("bye\r")
    assert chat.end() == 0 and "\x1b[0m" in chat.seen


def test_hidden_thoughts_leave_the_name_of_the_answer(talk: Talk):
    chat = talk(*THINKS, "--plain")
    chat.type("/think hide\r")
    chat.expect(READY)
    chat.type("think\r")
    chat.expect(READY)
    assert "\n\nanswer:\nIt is four.\n" in leave(chat)


def test_arrow_keys_print_earlier_questions_on_new_lines(talk: Talk):
    chat = talk("--plain")
    for question in ("first", "second", "second"):
        chat.type(f"{question}\r")
        chat.expect(READY)
    leave(chat)
    chat = talk("--plain")
    chat.type("draft")
    chat.expect("draft")
    for key, text in ((UP, "bye"), (UP, "second"), (UP, "first"), (UP, None), (DOWN, "second"), (DOWN, "bye"),
                      (DOWN, "draft"), (DOWN, None), ("\x1bOA", "bye"), (UP, "second")):  # fmt: skip
        chat.type(key)
        if text is not None:
            assert "\b" not in chat.expect(f"\r\n> {text}")
    chat.type("s\r")
    chat.expect("SECONDS\r\n")
    leave(chat)


def test_a_message_of_several_lines_is_found_again_as_one(talk: Talk):
    chat = talk("--plain")
    chat.type("one\\\r")
    chat.expect("\n.*  ")
    chat.type("two\r")
    chat.expect("ONE\r\nTWO\r\n")
    chat.expect("> ")
    chat.type(UP)
    chat.expect("\r\n> one\r\ntwo")
    chat.type("!\r")
    chat.expect("ONE\r\nTWO!\r\n")
    chat.expect("> ")
    leave(chat)


def test_tab_completes_or_lists_commands(talk: Talk):
    chat = talk("--plain")
    chat.type("/und\t")
    chat.expect("> /undo|/undo")
    chat.type("\x15/s\t")
    chat.expect("\r\n/system  /save  /sessions  /set  /show  /stats\r\n> /s")
    chat.type("how\t \r")
    chat.expect("options   defaults")
    chat.expect(READY)
    chat.type("a\tb\r")  # no command: a tab
    chat.expect("A\tB\r\n|A +B\r\n")
    chat.expect(READY)
    leave(chat)


@pytest.mark.parametrize("environment", [{}, {"LOCALLLM_PLAIN": "1"}])
def test_a_pasted_block_stays_one_message_and_waits_for_enter(talk: Talk, environment: dict[str, str]):
    chat = talk(*([] if environment else ["--plain"]), **environment)
    assert chat.seen.endswith("\x1b[?2004h> ")
    chat.type(f"say {PASTE}one\r\ttwo\r/exit\r{END}")
    chat.expect("/exit\r\n")
    chat.type("three\r")
    chat.expect("SAY ONE\r\n *\t?TWO\r\n/EXIT\r\nTHREE\r\n|SAY ONE\r\n +TWO\r\n/EXIT\r\nTHREE\r\n")
    chat.expect(READY)
    leave(chat)


def test_a_block_pasted_during_an_answer_stays_one_message(talk: Talk):
    chat = talk("--plain")
    chat.type("slowly\r")
    chat.expect("two")
    chat.type(f"{PASTE}one\rtwo{END}\r")
    chat.expect("ONE\r\nTWO\r\n")
    chat.expect(READY)
    leave(chat)


def test_run_prints_plain_text(tiny: str):
    run = Terminal("run", tiny, "-p", "think", *THINKS, "-c", "512", "--plain", program=TALKER)
    assert run.end() == 0
    assert run.seen == "thinking:\r\nLet me see, what is it?\r\n\r\nanswer:\r\nIt is four.\r\n"


def test_quantize_on_a_plain_terminal_writes_no_escape_sequences(tiny: str, tmp_path: Path):
    run = Terminal("quantize", tiny, str(tmp_path / "small.gguf"), "Q4_0", "--allow-requantize", TERM="dumb")
    assert run.end() == 0, run.seen
    assert "small.gguf" in run.seen and "\x1b" not in run.seen
