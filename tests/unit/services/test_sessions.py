"""Test sessions on disk: readable, safe against kills, validated; and the history and wrapping of chat."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from project import ROOT
from system_calls import SAFE, SystemCalls
from wcwidth import wcswidth

from localllm.cli.interactive import settings as chat_options
from localllm.cli.interactive.slash_commands import COMMANDS
from localllm.cli.terminal import line_editor
from localllm.cli.terminal.line_editor import LineEditor
from localllm.cli.terminal.stream_renderer import WordWrapper, split_blocks, split_clusters
from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.file import Tensor
from localllm.generation.options import GenerationOptions
from localllm.quant.formats import BY_NAME
from localllm.services import sessions
from localllm.services.sessions import SessionFile
from localllm.system.files import open_file

TURN = [{"role": "user", "content": "Hi \N{SLICE OF PIZZA}\nyou"}, {"role": "assistant", "content": "Hello! «ü»"}]
OTHER = [{"role": "user", "content": "More?"}, {"role": "assistant", "content": "Yes.", "finish": "stop", "tokens": 9}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "data" / "localllm" / "sessions"


def write_session(name: str, *turns: list[dict]) -> Path:
    with SessionFile(name) as file:
        file.chat.model = sessions.SessionModel("Tiny", "/tiny.gguf", "0123456789abcdef")
        for number in range(len(turns)):
            file.write([message for turn in turns[: number + 1] for message in turn])
    return sessions.get_path(name)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_other_files_in_the_folder_are_not_listed_as_sessions(folder: Path):
    """Skip folders, notes and invalid names in lists and for --continue."""
    write_session("a", TURN)
    (folder / "folder.jsonl").mkdir()
    for name in ("notes", "notes.txt", ".jsonl", ".hidden.jsonl", "x" * 200 + ".jsonl"):
        (folder / name).write_text("{}\n")
    assert sessions.list_names() == [session.name for session in sessions.list_sessions()] == ["a"]
    assert sessions.find_latest_name() == "a" and sessions.list_branches("a") == ["a"]


def test_branches_of_a_session_share_its_trunk():
    """List them by name; an unknown name stands alone."""
    for name, trunk in (("trunk", ""), ("z", "trunk"), ("b", "trunk"), ("m", "trunk"), ("other", ""), ("o", "other")):
        with SessionFile(name) as file:
            file.chat.trunk = trunk
            file.rewrite()
    together = ["b", "m", "trunk", "z"]
    assert all(sessions.list_branches(name) == together for name in together)
    assert sessions.list_branches("other") == sessions.list_branches("o") == ["o", "other"]
    assert sessions.list_branches("none") == ["none"]


def test_a_session_file_is_readable_for_people(folder: Path):
    path = write_session("a trip", TURN, OTHER)
    assert path == folder / "a trip.jsonl" and (os.name != "posix" or folder.stat().st_mode & 0o777 == 0o700)
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    assert "🍕" in lines[0] and [json.loads(line) for line in lines] == [*TURN, *OTHER]
    assert json.loads(header).keys() == {"session", "created", "model", "settings"}
    assert sessions.read_session("a trip").messages == [*TURN, *OTHER]
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))  # by an editor
    assert sessions.read_session("a trip").messages == [*TURN, *OTHER]
    with SessionFile("a trip") as file:
        file.write(TURN)
    assert path.read_bytes().count(b"\n") == 3


def test_every_turn_is_synced_when_it_is_written(monkeypatch):
    calls = SystemCalls(monkeypatch)
    with SessionFile("a trip") as file:
        file.write(TURN)
        path = sessions.get_path("a trip")
        assert calls.of(path) == SAFE
        calls.clear()
        file.write([*TURN, *OTHER])
        assert calls.of(path) == ["write", "fsync"]
        calls.clear()
        file.write([*TURN, *OTHER])
        assert calls == []


def test_a_write_cut_anywhere_keeps_whole_turns():
    path = write_session("cut", TURN)
    before = path.read_bytes()
    whole = write_session("cut", TURN, OTHER).read_bytes()
    assert whole.startswith(before)
    for length in range(len(before), len(whole) - 1):  # without its line break the last line is whole, too
        chat, kept = sessions.parse_session(whole[:length], "it")
        assert (chat.messages, kept) == (TURN, len(before))
    path.write_bytes(whole[:-5])
    with SessionFile("cut") as file:
        assert file.lost and file.chat.messages == TURN
        assert path.read_bytes() == before
        file.write([*TURN, *OTHER])
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_killed_processes_lose_no_finished_turn():
    """Run 25 kills; scripts/fuzz/kill_sessions.py runs more."""
    script = ROOT / "scripts" / "fuzz" / "kill_sessions.py"
    done = subprocess.run([sys.executable, str(script), "25"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("25 processes killed, none of ") and "none of 0 " not in done.stdout


@pytest.mark.parametrize("error", ["append", "replace"])
def test_a_full_disk_loses_nothing(monkeypatch, error: str):
    path = write_session("full", TURN)
    before = path.read_bytes()

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with SessionFile("full") as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync" if error == "append" else "write", full)
            with pytest.raises(LocalllmError, match="No space left"):
                file.write([*TURN, *OTHER] if error == "append" else OTHER)
            assert path.read_bytes() == before
        file.write([*TURN, *OTHER, *TURN])
    assert sessions.read_session("full").messages == [*TURN, *OTHER, *TURN]


@pytest.mark.parametrize(
    ("line", "text"),
    [(1, "{}"), (1, "[]"), (1, '{"session": 2}'), (1, '{"session": 1, "created": "", "model": 3, "settings": {}}'),
     (2, "nonsense"), (3, '{"role": "user"}'), (3, '{"role": "king", "content": "x"}'),
     (2, '{"role": "user", "content": 1}'),
     (3, '{"role": "system", "content": "x"}'), (4, "\0\0\0"), (3, "")],
)  # fmt: skip
def test_a_damaged_session_is_refused_with_its_line(line: int, text: str):
    path = write_session("bad", TURN, OTHER)
    lines = path.read_text().split("\n")
    lines[line - 1] = text
    path.write_text("\n".join(lines))
    before = path.read_bytes()
    for reading in (lambda: sessions.read_session("bad"), lambda: SessionFile("bad")):
        with pytest.raises(UsageError, match=f"^the session 'bad' is damaged: line {line} "):
            reading()
    assert path.read_bytes() == before
    assert [listed.damage != "" for listed in sessions.list_sessions()] == [True]
    sessions.remove_session("bad")
    assert sessions.list_names() == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0b", "x" * 61, " a", "a.", "a\n", "-"]
)
def test_invalid_session_names_are_refused(name: str):
    for use in (sessions.read_session, SessionFile, sessions.remove_session, sessions.has_session):
        with pytest.raises(UsageError, match="is not a valid session name"):
            use(name)


def test_valid_session_names_are_accepted(folder: Path):
    for name in ("a", "A b", "v1.2", "über_狐", "狐" * 60, "x" * 60):
        write_session(name, TURN)
        assert sessions.has_session(name) and (folder / f"{name}.jsonl").is_file()
    os.utime(sessions.get_path("v1.2"), (2e9, 2e9))
    assert sessions.find_latest_name() == sessions.list_names()[0] == "v1.2"


def test_a_session_is_open_in_one_chat_at_a_time():
    with SessionFile("mine"):
        with pytest.raises(UsageError, match="open in another chat"):
            SessionFile("mine")
        with pytest.raises(UsageError, match="not found"):
            sessions.remove_session("mine")
        write_session("yours", TURN)
    with SessionFile("mine") as file:
        assert file.is_new


def test_without_sessions_lists_are_empty_and_continue_is_refused(monkeypatch, tmp_path: Path):
    assert (sessions.list_names(), sessions.list_sessions()) == ([], [])
    with pytest.raises(UsageError, match="there are no sessions yet"):
        sessions.find_latest_name()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(LocalllmError, match="cannot be created"):
        SessionFile("x")


def test_closing_a_session_unlocks_it():
    """Unlock also one that could not be opened, while its objects are still referenced."""
    path = write_session("a", TURN)
    first = SessionFile("a")
    first.close()
    with SessionFile("a") as second:
        assert not second.is_new
        with pytest.raises(UsageError, match=r"^session 'a' is open in another chat$"):
            SessionFile("a")
        with pytest.raises(UsageError, match=r"^session 'a' is open in another chat$"):
            sessions.remove_session("a")
        assert path.is_file()
    whole = path.read_bytes()
    path.write_bytes(b"{}\n")
    with pytest.raises(UsageError, match="is damaged") as failure:
        SessionFile("a")
    path.write_bytes(whole)
    with SessionFile("a") as third:
        assert third.chat == second.chat == first.chat and failure
    sessions.remove_session("a")
    assert not path.exists() and third


def test_opening_a_session_changes_only_its_time(monkeypatch):
    """Restore the last line break that an editor removed, and append the next turn."""
    path, calls = write_session("a", TURN), SystemCalls(monkeypatch)
    write_session("b", TURN)
    whole = path.read_bytes()
    os.utime(path, (1, 1))
    assert sessions.find_latest_name() == "b"
    for content, is_changed in ((whole, False), (whole.removesuffix(b"\n"), True)):
        path.write_bytes(content)
        os.utime(path, (1, 1))
        calls.clear()
        with SessionFile("a") as file:
            assert not file.lost and not file.is_new and file.chat.messages == TURN
            assert path.read_bytes() == whole and calls.of(path) == SAFE * is_changed
            assert sessions.find_latest_name() == "a"
            calls.clear()
            file.write([*TURN, *OTHER])
            assert calls.of(path) == ["write", "fsync"]
        assert sessions.read_session("a").messages == [*TURN, *OTHER]

    def refuse(path: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    with SessionFile("a") as file:
        assert file.chat.messages == [*TURN, *OTHER]


def test_a_failed_rewrite_is_repeated_at_the_next_turn(monkeypatch, folder: Path):
    """Append nothing to the old content, and create a removed folder again."""
    write_session("a", TURN)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with SessionFile("a") as file:
        with monkeypatch.context() as patch, pytest.raises(LocalllmError, match="No space left"):
            patch.setattr(os, "write", full)
            file.write(OTHER)
        assert sessions.read_session("a").messages == TURN
        file.write([*OTHER, *TURN])
        assert sessions.read_session("a").messages == [*OTHER, *TURN]
        shutil.rmtree(folder)
        file.write([*OTHER, *TURN, *OTHER])
    assert sessions.read_session("a").messages == [*OTHER, *TURN, *OTHER]


def test_no_file_stays_open_after_a_turn(monkeypatch):
    opened = []

    def noted(*arguments: object) -> int:
        opened.append(open_file(*arguments))
        return opened[-1]

    monkeypatch.setattr(sessions, "open_file", noted)
    with SessionFile("a") as file:
        file.write(TURN)
        file.write([*TURN, *OTHER])
        (descriptor,) = opened
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_sessions_are_listed_latest_first():
    """Report unreadable ones with their reason."""
    for number, name in enumerate(("b", "a", "c")):
        with SessionFile(name) as file:
            file.chat.trunk, file.chat.settings = "t", {"top_k": number}
            file.write(TURN)
        os.utime(sessions.get_path(name), (100 + number, 100 + number))
    sessions.get_path("a").write_text("")
    os.utime(sessions.get_path("a"), (101, 101))
    listed = sessions.list_sessions()
    assert [(one.name, one.used) for one in listed] == [("c", 102), ("a", 101), ("b", 100)]
    assert [one.damage for one in listed] == [
        "", "the session 'a' is damaged: line 1 is not a session header", ""
    ]  # fmt: skip
    assert [(one.chat.trunk, one.chat.settings, one.chat.messages) for one in listed] == [
        ("t", {"top_k": 2}, TURN), ("", {}, []), ("t", {"top_k": 0}, TURN)
    ]  # fmt: skip
    assert listed[0].chat == sessions.read_session("c") and sessions.list_branches("a") == ["a"]
    header = json.loads(sessions.get_path("c").read_text(encoding="utf-8").splitlines()[0])
    assert header.pop("created") == sessions.read_session("c").created
    assert header == {"session": 1, "model": {"name": "", "path": "", "fingerprint": ""}, "settings": {"top_k": 2},
                      "trunk": "t"}  # fmt: skip


@pytest.mark.parametrize("act", [sessions.read_session, sessions.remove_session])
def test_an_unreadable_session_raises(act):
    sessions.get_path("a").mkdir(parents=True)
    with pytest.raises(LocalllmError, match=r"^the session 'a' cannot be read: ") as failure:
        act("a")
    assert not isinstance(failure.value, UsageError)
    with pytest.raises(UsageError, match=r"^session 'b' not found; `localllm sessions` lists them$"):
        act("b")


def test_a_session_that_cannot_be_removed_raises(monkeypatch):
    with SessionFile("a") as file:
        file.write(TURN)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as there:
        there.setattr(Path, "unlink", refused)
        with pytest.raises(LocalllmError, match=r"^the session 'a' cannot be removed: Permission denied$"):
            sessions.remove_session("a")
    assert sessions.read_session("a").messages == TURN
    sessions.remove_session("a")
    assert not sessions.get_path("a").exists()


def test_branches_of_a_damaged_or_removed_session_are_found():
    """Read them from the first lines of the others."""
    for name, trunk in (("b", "t"), ("c", "t"), ("d", "")):
        with SessionFile(name) as file:
            file.chat.trunk = trunk
            file.write(TURN)
    assert sessions.list_branches("b") == ["b", "c"] and sessions.list_branches("t") == ["b", "c", "t"]
    sessions.get_path("d").write_text("[1")
    assert sessions.list_branches("d") == ["d"]
    assert sessions._read_trunk("gone") == "gone"


def test_a_session_with_whole_turns_is_valid():
    """Allow a system message at the beginning only, or no turn at all."""
    system = {"role": "system", "content": "Be brief."}
    with SessionFile("a") as file:
        assert file.is_new and not file.lost
        file.write([system, *TURN])
    data = sessions.get_path("a").read_bytes()
    assert sessions.read_session("a").messages == [system, *TURN]
    header, *lines = data.splitlines(keepends=True)
    for content, messages, whole in (
        (header, [], len(header)), (header[:-1], [], len(header) - 1),
        (header + lines[0], [system], len(header + lines[0])),
        (data, [system, *TURN], len(data)), (data[:-1], [system, *TURN], len(data) - 1),
        (header + lines[1], [], len(header)), (header + lines[1][:-1], [], len(header)),
        (data + lines[1] + lines[2][:9], [system, *TURN], len(data)), (data + b'{"role', [system, *TURN], len(data)),
    ):  # fmt: skip
        assert (sessions.parse_session(content, "it")[0].messages, sessions.parse_session(content, "it")[1]) == (
            messages,
            whole,
        )
    other = header.replace(b'"session": 1', b'"session": 2')
    for content in (other, other + lines[0], b"", b"\n"):
        with pytest.raises(UsageError, match=r"^it is damaged: line 1 is not a session header$"):
            sessions.parse_session(content, "it")
    for content, number in ((header + lines[1] + lines[0], 3), (header + b"\n" + lines[0], 2)):
        with pytest.raises(UsageError, match=f"^it is damaged: line {number} is not a message$"):
            sessions.parse_session(content, "it")


def test_session_names_impossible_here_are_refused(monkeypatch):
    monkeypatch.setattr(sessions, "find_name_problem", lambda name: f"{name} is a device")
    with pytest.raises(UsageError, match=r"^'con' is not a valid session name: con.jsonl is a device$"):
        sessions.get_path("con")


def test_a_message_may_have_images():
    for images, is_good in ((["a.png", "b"], True), ([], True), ("a.png", False), (["a", 1], False), (None, False)):
        assert sessions.are_paths(images) is is_good
        with SessionFile("a") as file:
            file.write([{"role": "user", "content": "What?", "images": images}, TURN[1]])
        if is_good:
            assert sessions.read_session("a").messages[0]["images"] == images
        else:
            with pytest.raises(UsageError, match=r"^the session 'a' is damaged: line 2 is not a message$"):
                sessions.read_session("a")
        sessions.remove_session("a")


def test_messages_are_filtered_for_models_and_formatted_for_people():
    call = {"id": "1", "function": {"name": "list", "arguments": '{"path": "."}'}}
    line = {"finish": "stop", "role": "assistant", "content": "", "tool_calls": [call, call], "tokens": 3}
    tool_line = {"role": "tool", "content": "a", "tool_call_id": "1", "name": "list", "seconds": 0.1}
    assert sessions.select_visible_fields([line, tool_line, {"images": ["x"], "reasoning_content": "y"}]) == [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "a", "tool_call_id": "1", "name": "list"},
        {"reasoning_content": "y", "images": ["x"]},
    ]
    assert sessions.format_message(line) == 'assistant: list {"path": "."}\nlist {"path": "."}'
    assert (
        sessions.format_message({**line, "content": "Look:", "tool_calls": [call]})
        == 'assistant: Look:\nlist {"path": "."}'
    )
    assert (
        sessions.format_message(tool_line) == "tool: a"
        and sessions.format_message({"role": "user", "content": ""}) == "user: "
    )


def test_a_model_is_recognized_by_its_tensors():
    """Compare names, formats, shapes and weights, not the path."""

    def fingerprint_of(name: str = "a", format: str = "F32", shape: tuple[int, ...] = (2, 4), last: int = 7) -> str:
        data = np.arange(32, dtype=np.uint8)
        data[-1] = last
        tensors = {name: Tensor(name, BY_NAME[format], shape, data.reshape(shape[0], -1)), "z": VECTOR}
        return sessions.compute_fingerprint(SimpleNamespace(tensors=tensors))

    fingerprints = {
        fingerprint_of(),
        fingerprint_of("b"),
        fingerprint_of(format="I32"),
        fingerprint_of(shape=(4, 2)),
        fingerprint_of(last=8),
    }
    assert (
        len(fingerprints) == 5
        and fingerprint_of() == fingerprint_of()
        and all(re.fullmatch("[0-9a-f]{16}", one) for one in fingerprints)
    )


VECTOR = Tensor("z", BY_NAME["F32"], (4,), np.zeros(16, np.uint8))

# ---- what was typed -------------------------------------------------------------------------------------------------


def test_an_unwritable_history_is_ignored(monkeypatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    kept = line_editor.FileHistory(tmp_path / "file" / "history")
    kept.append_string("text")
    assert kept.get_strings() == ["text"]


def test_set_changes_options_by_name():
    options = GenerationOptions()
    for name, text, expected in [
        ("temperature", "0.5", 0.5), ("top-k", "7", 7), ("--seed", "3", 3), ("seed", "default", None),
        ("min_p", "0", 0.0), ("temp", "default", None),
        ("samplers", "top_k;temperature", ("top_k", "temperature")), ("ignore_eos", "on", True),
        ("ignore_eos", "default", None), ("samplers", "default", None),
    ]:  # fmt: skip
        options = chat_options.change_option(options, name, text)
        name = chat_options.OTHER_NAMES.get(name, name.strip("-").replace("-", "_"))
        assert getattr(options.sampling, name) == expected
    options = chat_options.change_option(chat_options.change_option(options, "n", "5"), "stop", "END")
    assert (options.max_tokens, options.stop) == (5, ("END",))
    assert chat_options.change_option(options, "max_tokens", "-1").max_tokens is None
    own = {name: value for name, value, usual in chat_options.list_settings(options) if not usual}
    assert own == {"max_tokens": 5, "stop": ["END"], "top_k": 7, "min_p": 0.0}
    own |= {"nonsense": 1, "top_p": "wrong", "temperature": 0.25}
    again = chat_options.apply_settings(GenerationOptions(max_tokens=8), own)
    assert (again.max_tokens, again.stop, again.sampling.top_k, again.sampling.top_p) == (8, ("END",), 7, None)
    assert again.sampling.temperature == 0.25


def test_every_chat_command_has_a_description():
    assert all(name.startswith("/") and command.help for name, command in COMMANDS.items())
    wanted = "help clear system undo retry edit continue read save load sessions branch set show stats think model exit"
    assert {f"/{name}" for name in wanted.split()} <= COMMANDS.keys()


# ---- what is drawn --------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["word", "a", " ", "  ", "\n", "longer-word", "狐", "日本", "。", "é", "e\u0301", "👩\u200d🔬", "👍🏽", "🇩🇪",
     "❤\ufe0f", "```", "\t", "x" * 30, "\xa0"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=60), st.integers(8, 40), st.lists(st.integers(1, 9), min_size=1, max_size=9))
@example([" "] * 9 + ["longer-word"], 19, [1])
def test_wrapping_does_not_depend_on_chunks(pieces: list[str], width: int, cuts: list[int]):
    """Lose nothing but white space at line ends."""
    text = "".join(pieces)
    whole = WordWrapper(lambda: width)
    expected = whole.push(text) + whole.flush()
    piecemeal, shown, place = WordWrapper(lambda: width), "", 0
    while place < len(text):
        cut = cuts[place % len(cuts)]
        shown += piecemeal.push(text[place : place + cut])
        place += cut
    shown += piecemeal.flush()
    assert shown == expected
    assert "".join(shown.split()) == "".join(text.split())
    if "```" not in text:
        for line in shown.split("\n"):
            assert wcswidth(line.replace("\t", "")) <= width or any(len(word) > width - 8 for word in line.split())


def test_grapheme_clusters_are_kept_together():
    assert split_clusters("a👩\u200d🔬e\u0301🇩🇪🇫🇷👍🏽❤\ufe0f\n\u0301") == [
        "a", "👩\u200d🔬", "e\u0301", "🇩🇪", "🇫🇷", "👍🏽", "❤\ufe0f", "\n", "\u0301",
    ]  # fmt: skip


def test_markdown_is_split_into_blocks():
    text = "# a\n\ntext\nmore\n\n```\ncode\n\ncode\n```\n\nlast"
    assert split_blocks(text) == ["# a\n\n", "text\nmore\n\n", "```\ncode\n\ncode\n```\n\n", "last"]
    assert "".join(split_blocks(text)) == text


@pytest.mark.skipif(sys.platform == "win32", reason="event loops hear no signals there")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU"])
def test_the_editors_event_loop_handles_signals(name: str):
    """A handler of Python could interrupt a callback of the loop and leave the terminal raw."""

    async def heard() -> bool:
        LineEditor._end_on_signals(LineEditor.__new__(LineEditor))
        return asyncio.get_running_loop().remove_signal_handler(getattr(signal, name))

    assert asyncio.run(heard())


# ---- search and Markdown


@pytest.fixture
def trip(folder: Path) -> None:
    with SessionFile("trip") as file:
        file.write(
            [
                {"role": "user", "content": "When does the train\nto Rome leave?"},
                {"role": "assistant", "content": "At **nine**.", "reasoning_content": "The timetable."},
            ]
        )


def test_search_prints_each_line_with_the_text(trip: None, cli):
    assert cli("sessions", "search", "ROME") == (0, "trip:1: user: to Rome leave?\n", "")
    assert cli("sessions", "search", "t")[1].count("\n") == 3
    assert cli("sessions", "search", "Milan") == (0, "", "localllm: no session has 'Milan'\n")
    code, _, err = cli("sessions", "search")
    assert code == 2 and "the text to search for is missing" in err


def test_a_session_is_shown_as_markdown(trip: None, cli):
    text = (
        "# trip\n\n## User\n\nWhen does the train\nto Rome leave?\n\n## Assistant\n\n> The timetable.\n\nAt **nine**.\n"
    )
    assert cli("sessions", "show", "trip", "--md") == (0, text, "")
    assert cli("sessions", "--md")[0] == 2
