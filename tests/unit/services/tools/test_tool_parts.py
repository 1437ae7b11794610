"""Test the parts of tools without a model: limits, refusals, transcripts and MCP servers."""

import asyncio
import importlib
import json
import os
import stat
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.errors import LocalllmError, UsageError
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.generation.tools.tool_grammar import Tool
from localllm.services.tools import built_in, mcp
from localllm.services.tools.box import OfferedTool, Toolbox, ToolError
from localllm.services.tools.built_in import AllowedFolders, make_toolbox
from localllm.services.tools.transcript import ToolTranscript, require_transcript
from tests.unit.services.tools.test_tools import ALL, home, perform

__all__ = ["home"]  # a fixture


@pytest.fixture
def box(home: Path) -> Toolbox:
    return make_toolbox(ALL[:3], [str(home)], None, ExitStack())


# ---- reading


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"first": 1, "lines": 3}, "Buy milk.\nCall Ada.\nSleep.\n"), ({"lines": 9}, "Buy milk.\nCall Ada.\nSleep.\n"),
        ({"lines": 2}, "Buy milk.\nCall Ada.\n\n[these are the lines 1 to 2 of 3]"),
        ({"first": 3}, "Sleep.\n\n[these are the lines 3 to 3 of 3]"),
        ({"first": 2, "lines": 9}, "Call Ada.\nSleep.\n\n[these are the lines 2 to 3 of 3]"),
    ],
)  # fmt: skip
def test_read_file_returns_the_requested_lines(box: Toolbox, arguments: dict[str, int], text: str):
    assert perform(box, "read_file", path="notes.txt", **arguments) == (text, False)


def test_read_file_refuses_lines_that_do_not_exist(box: Toolbox, home: Path):
    (home / "empty").write_bytes(b"")
    assert perform(box, "read_file", path="empty") == ("", False)
    assert perform(box, "read_file", path="empty", first=2) == ("error: empty has only 0 lines", True)
    assert perform(box, "read_file", path="notes.txt", first=4).text == "error: notes.txt has only 3 lines"
    for odd in (0, -1, True, 1.0, "1", None):
        for name in ("first", "lines"):
            result = perform(box, "read_file", path="notes.txt", **{name: odd})
            assert result == (f"error: {name} must be an integer, 1 or greater", True)


def test_read_file_refuses_binary_and_large_files(box: Toolbox, home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "bom").write_bytes(b"\xef\xbb\xbfa\xffb")
    assert perform(box, "read_file", path="bom").text == "a\ufffdb"
    for place, is_text in ((8191, False), (8192, True)):
        (home / "nul").write_bytes(b"x" * place + b"\0")
        assert perform(box, "read_file", path="nul").failed != is_text
    monkeypatch.setattr(built_in, "MAX_FILE_BYTES", 8)
    for length, fits in ((8, True), (9, False)):
        (home / "large").write_bytes(b"x" * length)
        assert perform(box, "read_file", path="large").failed != fits
    assert perform(box, "read_file", path="large").text == "error: large has more than 8 bytes"


def test_list_is_cut_after_its_limit(box: Toolbox, home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "deep" / "none").mkdir()
    assert perform(box, "list", path="deep/none").text == "[nothing]"
    assert perform(box, "list", path="deep").text == ".hidden/\nmore.md  15\nnone/"
    for most, cut in ((4, ""), (3, "\n[cut: these are the first 3 of 4]")):
        monkeypatch.setattr(built_in, "ENTRIES", most)
        lines = ["data.bin  5", "deep/", "evil.txt  60", "notes.txt  27"][:most]
        assert perform(box, "list").text == "\n".join(lines) + cut


# ---- searching


def test_search_finds_passages_for_a_question(box: Toolbox, home: Path):
    (home / "deep" / "boats.md").write_text("# Boats\n\nThe ferry leaves at nine.\n\n# Trains\n\nAt ten.\n")
    place = Path("deep/boats.md")
    assert perform(box, "search", text="when does the ferry leave?").text == (
        f"[no line has that text; these passages have its words]\n{place}:1:\n# Boats\n\nThe ferry leaves at nine."
    )
    assert perform(box, "search", text="leaving ferries", path="deep").text.startswith("[no line has")
    assert perform(box, "search", text="zeppelin ride").text.startswith("[nothing in ")
    assert perform(box, "search", text="ferries").text.startswith("[nothing in ")  # a word, not a question


def test_search_skips_hidden_files_and_shortens_lines(box: Toolbox, home: Path):
    for name in ("a.txt", "B.txt", ".x.txt"):
        (home / "deep" / name).write_text("  milk \nno\nmilk " + "y" * 400)
    lines = perform(box, "search", text="milk", path="deep").text.split("\n")
    places = [(Path("deep/B.txt"), 1), (Path("deep/B.txt"), 3), (Path("deep/a.txt"), 1), (Path("deep/a.txt"), 3)]
    assert [line.split(" ")[0] for line in lines] == [f"{path}:{number}:" for path, number in places]
    assert lines[0] == f"{Path('deep/B.txt')}:1: milk" and lines[1].endswith(": milk " + "y" * 295)
    assert perform(box, "search", text="no", path="deep/a.txt").text == f"{Path('deep/a.txt')}:2: no"
    assert perform(box, "search", text="") == ("error: text is empty", True)
    assert perform(box, "search") == ("error: text must be a string", True)
    assert perform(box, "search", text="milk", files=5) == ("error: files must be a string", True)


def test_search_is_cut_after_its_limits(box: Toolbox, home: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        (home / "deep" / f"{number}.txt").write_text("a\na\n")
    matches = [f"{Path('deep') / f'{number}.txt'}:{line}: a" for number in range(3) for line in (1, 2)]

    def searched(**limits: float) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(built_in, name, value)
            return perform(box, "search", text="a", path="deep", files="*.txt").text.split("\n")

    assert searched() == searched(MATCHES=6) == searched(FILES=3) == matches
    assert searched(MATCHES=3) == [*matches[:3], "[cut: these are the first 3 lines that have it]"]
    assert searched(MATCHES=5)[4:] == [matches[4], "[cut: these are the first 5 lines that have it]"]
    assert searched(FILES=2) == [*matches[:4], "[cut: only the first 2 files were searched]"]
    assert searched(SECONDS=-1) == ["[cut: only the first 0 files were searched]"]


def test_tool_limits_fit_the_context():
    assert (built_in.ENTRIES, built_in.MATCHES, built_in.FILES, built_in.SECONDS) == (1000, 100, 20_000, 20.0)
    assert (built_in.MAX_FILE_BYTES, built_in.MAX_OUTPUT, Toolbox([]).most) == (4 << 20, 1 << 20, 30_000)
    assert built_in.COMMAND_SECONDS == 120.0
    assert (mcp.START_SECONDS, mcp.CALL_SECONDS) == (30.0, 120.0)


# ---- folders


def test_several_folders_are_allowed_and_others_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    other = home.parent / "home2"
    other.mkdir()
    (other / "x.txt").write_text("milk")
    assert "outside" in perform(make_toolbox(["list"], [str(home)], None, ExitStack()), "list", path=str(other)).text
    both = make_toolbox(ALL[:3], [str(home), str(other)], None, ExitStack())
    assert perform(both, "read_file", path=str(other / "x.txt")).text == "milk"
    assert perform(both, "search", text="milk", path=str(other)).text == f"{other / 'x.txt'}:1: milk"
    assert perform(both, "read_file", path="../home2/x.txt").text == "milk"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    assert AllowedFolders(["~/deep"]).roots == [os.path.realpath(home / "deep")]


def test_a_file_moved_while_it_is_opened_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace the file between the check and the opening."""
    opened = list[int]()

    def another(path: str, flags: int) -> int:
        opened.append(os.open(home.parent / "secret.txt", flags))
        return opened[-1]

    monkeypatch.setattr(built_in, "open_without_links", another)
    with pytest.raises(ToolError, match="is outside the allowed folders"):
        AllowedFolders([str(home)]).open("notes.txt")
    with pytest.raises(OSError):
        os.fstat(opened[0])  # it is closed


def test_no_file_stays_open_after_a_tool(home: Path, monkeypatch: pytest.MonkeyPatch):
    opened = list[int]()

    def noted(path: str, flags: int) -> int:
        opened.append(os.open(path, flags))
        return opened[-1]

    monkeypatch.setattr(built_in, "open_without_links", noted)
    if sys.platform != "win32":  # where a folder cannot be opened
        with pytest.raises(ToolError, match="deep is not a file"):
            AllowedFolders([str(home)]).open("deep")
        with pytest.raises(OSError):
            os.fstat(opened[0])


# ---- the box


def offered(name: str, perform: Any = lambda arguments: "done") -> OfferedTool:
    return OfferedTool(Tool(name), perform)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two tools are named b"):
        Toolbox([offered("a"), offered("b"), offered("b")])
    box = Toolbox([offered("a"), offered("b")], 5)
    box.limit_to(["a"])
    assert (box.names, box.most) == (["a"], 5) and [tool.name for tool in box.use.tools] == ["a"]
    assert perform(box, "b").text == "error: unknown tool 'b'; available: a"


def test_a_toolbox_offers_the_current_tools():
    tools = [offered("a")]
    box = Toolbox(tools, current=lambda: [*tools])
    tools.append(offered("b"))
    assert box.names == ["a"]
    box.refresh()
    assert box.names == [tool.name for tool in box.use.tools] == ["a", "b"] and perform(box, "b").text == "done"
    box.limit_to(["b", "c"])
    tools[:] = [offered("a"), offered("c")]
    box.refresh()
    assert box.names == ["c"]


def raising(error: BaseException) -> Any:
    def perform(arguments: dict[str, Any]) -> str:
        raise error

    return perform


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "the user stopped this call"), (OSError(2, "not there"), "not there"),
        (OSError("plain"), "plain"), (ValueError("odd"), "odd"), (LocalllmError("no"), "no"),
        (ToolError("x" * 20), "xxx\n[cut: these are the first 10 of 27 characters]"),
        (ValueError("x" * 20), "xxx\n[cut: these are the first 10 of 27 characters]"),
    ],
)  # fmt: skip
def test_errors_of_a_tool_are_returned_to_the_model(error: BaseException, text: str):
    box = Toolbox([offered("a", raising(error))], 10)
    box.most = 10 if "xxx" in text else 100
    assert perform(box, "a") == (f"error: {text}", True)


def test_tool_results_are_cut_after_their_limit():
    for most, text in ((4, "done"), (3, "don\n[cut: these are the first 3 of 4 characters]")):
        assert perform(Toolbox([offered("a")], most), "a") == (text, False)
    broken = Toolbox([offered("a", lambda arguments: "x\ud800")])
    perform(broken, "a").text.encode()
    assert Toolbox([offered("a")]).perform(ToolCall("a", ["[1]"])) == (
        "error: the arguments must be a JSON object",
        True,
    )


@pytest.mark.parametrize(
    ("names", "allowed", "message"),
    [
        (["list", "rm"], ["."], "unknown tool 'rm'"), (["list"], [], "allow is missing"),
        ([], ["."], "allow applies to built-in tools only"), ([], [], "no tools: "),
    ],
)  # fmt: skip
def test_invalid_tool_options_are_refused(names: list[str], allowed: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        make_toolbox(names, allowed, None, ExitStack())


def test_tools_of_mcp_servers_come_last_and_close_with_the_stack(home: Path, monkeypatch: pytest.MonkeyPatch):
    ended = []

    class Servers:
        def __init__(self, path: str):
            self.offered = [OfferedTool(Tool(name, "x"), lambda given: "") for name in path.split()]
            self.may_offer = lambda name: False

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            ended.append(True)

    monkeypatch.setattr(mcp, "McpServers", Servers)
    with ExitStack() as stack:
        assert make_toolbox(["list"], [str(home)], "now then", stack).names == ["list", "now", "then"]
        assert make_toolbox([], [], "now", stack).names == ["now"] and not ended
        with pytest.raises(UsageError, match="no tools: --tools is empty, and the MCP servers of --mcp offer none"):
            make_toolbox([], [], "", stack)
    assert len(ended) == 3


def test_a_folder_on_another_drive_is_outside(monkeypatch: pytest.MonkeyPatch):
    def other(paths: list[str]) -> str:
        raise ValueError("Paths don't have the same drive")

    monkeypatch.setattr(os.path, "commonpath", other)
    assert built_in.is_within("d:/a", "c:/a") is False


def test_entries_removed_while_listing_are_skipped():
    def gone(follow_symlinks: bool) -> Any:
        raise FileNotFoundError

    entry: Any = SimpleNamespace(name="a", is_dir=lambda: False, stat=gone)
    assert built_in.describe_entry(entry) == "a"
    entry.stat = lambda follow_symlinks: SimpleNamespace(st_size=5 if follow_symlinks is False else 9)
    assert built_in.describe_entry(entry) == "a  5"
    entry.is_dir = lambda: True
    assert built_in.describe_entry(entry) == "a/"


def test_a_missing_mcp_file_is_refused(tmp_path: Path):
    path = tmp_path / "none.json"
    with pytest.raises(UsageError) as failure:
        mcp.parse_servers(str(path))
    assert str(failure.value) == f"cannot read {path}: No such file or directory"


def test_a_tool_named_twice_is_offered_once(home: Path):
    assert make_toolbox(["list", "read_file", "list"], [str(home)], None, ExitStack()).names == ["list", "read_file"]


def test_tools_are_described_by_closed_schemas(home: Path):
    tools = {tool.name: tool.parameters for tool in make_toolbox(ALL, [str(home)], None, ExitStack()).use.tools}
    assert all(each["additionalProperties"] is False and each["type"] == "object" for each in tools.values())
    assert {name: each["required"] for name, each in tools.items()} == {
        "read_file": ["path"], "list": [], "search": ["text"], "run": ["command"]
    }  # fmt: skip
    properties = {
        name: {key: value["type"] for key, value in each["properties"].items()} for name, each in tools.items()
    }
    assert properties == {
        "read_file": {"path": "string", "first": "integer", "lines": "integer"}, "list": {"path": "string"},
        "search": {"text": "string", "path": "string", "files": "string"}, "run": {"command": "string"},
    }  # fmt: skip
    assert all(tools["read_file"]["properties"][name]["minimum"] == 1 for name in ("first", "lines"))


# ---- commands


def run_in(command: str, home: Path) -> str:
    return built_in.run_command({"command": command}, [str(home)])


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_a_command_gets_a_reduced_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("SECRET_PATH", "x")
    output = run_in("echo $LC_TIME/$SECRET_PATH/$TERM/$HOME", home)
    assert output == f"C//dumb/{os.environ['HOME']}\n[exit code 0]"
    assert run_in("printf x", home) == "x\n[exit code 0]" and run_in("echo e >&2; true", home) == "e\n[exit code 0]"
    with pytest.raises(ToolError, match="cannot contain NUL"):
        run_in("a\0b", home)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_the_output_of_a_command_is_cut(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(built_in, "MAX_OUTPUT", 4)
    assert run_in("printf abcd", home) == "abcd\n[exit code 0]"
    assert run_in("printf abcde", home) == "abcd\n[cut: of 5 bytes]\n[exit code 0]"


# ---- what is written down


def test_a_transcript_is_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, write = tmp_path / "t.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:7]))  # a disk that is almost full
    for model in ("one", "two"):
        with ToolTranscript(str(path), model) as transcript:
            transcript.add({"role": "user", "content": "ö" * 30})
    with pytest.raises(OSError):
        os.fstat(transcript._file)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("model") for line in lines] == ["one", None, "two", None]
    assert lines[0]["transcript"] == 1 and lines[0]["made"].endswith("+00:00") and lines[1]["content"] == "ö" * 30
    assert sys.platform == "win32" or stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with ToolTranscript(str(path), "three") as transcript, pytest.raises(LocalllmError, match="cannot be written: No"):
        monkeypatch.setattr(os, "write", full)
        transcript.add({})


@pytest.mark.parametrize("data", [b"hello\n", b"[1]\n", b"5\n", b'{"a": 1}\n', b"\xff\n"])
def test_other_files_are_not_taken_for_transcripts(tmp_path: Path, data: bytes):
    path = tmp_path / "notes"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="the file exists and is not a transcript; give another file"):
        ToolTranscript(str(path), "m")
    assert path.read_bytes() == data


def test_new_and_existing_transcripts_are_accepted(tmp_path: Path):
    require_transcript(str(tmp_path / "new"))
    (tmp_path / "empty").write_bytes(b"")
    require_transcript(str(tmp_path / "empty"))
    for impossible in (tmp_path, tmp_path / "empty" / "x", tmp_path / "no" / "x"):
        with pytest.raises(UsageError, match="cannot write"):
            ToolTranscript(str(impossible), "m")


# ---- MCP


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must contain"), ("{}", "must contain"),
    ('{"mcpServers": {}}', "must contain"), ("{", "is not valid JSON"),
        ('{"mcpServers": []}', "must contain"), ('{"mcpServers": {"a": {"command": ""}}}', "a: command must be "
        "a string"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "args must be an array"),
        ('{"mcpServers": {"a": {"command": "x", "env": ["y"]}}}', "env must be an object"),
        ('{"mcpServers": {"a": {"command": "x", "cwd": 5}}}', "cwd must be a string"),
        ('{"mcpServers": {"a": {"disabled": "yes"}}}', "a: command must be a string"),
    ],
)  # fmt: skip
def test_invalid_mcp_files_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        mcp.parse_servers(str(path))


def test_variables_in_an_mcp_file_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A", "1")
    monkeypatch.delenv("B", raising=False)
    both = {
        "command": "${A}",
        "url": "x",
        "args": ["-${env:A}", "${B:-b c}"],
        "env": {"X": "${A:-2}${B:-}"},
        "cwd": "${A}",
    }
    servers = {"full": both, "bare": {"command": "x", "args": None}, "off": {"disabled": True}, "on": {
        "disabled": False, "command": "$A"}}  # fmt: skip
    path = tmp_path / "mcp.json"
    path.write_text("\ufeff" + json.dumps({"mcpServers": servers}), encoding="utf-8")
    assert mcp.parse_servers(str(path)) == {
        "full": {"command": "1", "args": ["-1", "b c"], "env": {"X": "1"}, "cwd": "1"},
        "bare": {"command": "x", "args": [], "env": {}, "cwd": None},
        "on": {"command": "$A", "args": [], "env": {}, "cwd": None},
    }


def test_results_of_an_mcp_server_become_text():
    text, resource = {"type": "text", "text": "a"}, {"type": "resource", "resource": {"text": "b"}}
    odd = [{"type": "resource_link", "uri": "u"}, {"type": "image"}, {"type": "resource", "resource": {"blob": "x"}}]
    assert mcp.extract_result({"content": [text, resource, *odd]}).split("\n") == [
        "a", "b", "[a link to u]", "[a part of type image, which cannot be read]",
        "[a part of type resource, which cannot be read]",
    ]  # fmt: skip
    assert mcp.extract_result({"content": [], "structuredContent": {"ö": 1}}) == '{"ö": 1}'
    assert (
        mcp.extract_result({"content": [text], "structuredContent": {}}) == "a"
        and mcp.extract_result({"isError": False}) == ""
    )
    for result, message in (
        ({"content": [text], "isError": True}, "^a$"),
        ({"isError": True}, "^the tool call failed$"),
    ):
        with pytest.raises(ToolError, match=message):
            mcp.extract_result(result)


def test_reasons_are_one_line_of_the_innermost_error():
    inner = ExceptionGroup("two", [ValueError("a\n b"), ValueError("c")])
    assert mcp.describe_error(ExceptionGroup("one", [inner])) == "a b"
    assert (
        mcp.describe_error(TimeoutError()) == "TimeoutError" and len(mcp.describe_error(ValueError("x" * 300))) == 200
    )


class Page:
    def __init__(self, **fields: Any):
        self.fields = fields

    def model_dump(self, **options: Any) -> dict[str, Any]:
        assert options == {"mode": "json", "by_alias": True, "exclude_none": True}
        return self.fields


class Session:
    """A server with many tools in pages."""

    def __init__(self, pages: int):
        self.asked, self.pages = list[Any](), pages

    async def list_tools(self, *, params: Any = None) -> Page:
        self.asked.append(params and params.cursor)
        more = {"nextCursor": f"{len(self.asked)}"} if len(self.asked) < self.pages else {}
        return Page(tools=[{"name": "x"}] * 300, **more)


@pytest.mark.parametrize(("pages", "asked"), [(1, [None]), (3, [None, "1", "2"]), (9, [None, "1", "2", "3"])])
def test_tools_of_a_server_are_read_in_pages(pages: int, asked: list[str | None]):
    session = Session(pages)
    assert len(asyncio.run(mcp.list_tools(session))) == 300 * len(asked) and session.asked == asked


def test_tool_names_of_a_server_are_prefixed_and_valid():
    servers = object.__new__(mcp.McpServers)
    long = servers._offer("my server", None, {"name": "a.b" + "c" * 80, "inputSchema": {"type": "object"}})
    assert long.tool.name == "my_server__a_b" + "c" * 50 and long.tool.description == ""
    assert servers._offer("s", None, {"name": "t", "description": "d"}).tool == Tool("s__t", "d")


class Portal:
    """A portal that runs coroutines at once; `events` records its calls."""

    def __init__(self, events: list[Any]):
        self.events = events

    def __enter__(self) -> "Portal":
        self.events.append("portal begins")
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append("portal ends")

    def wrap_async_context_manager(self, session: Any) -> Any:
        return session

    def start_task_soon(self, function: Any, *arguments: Any) -> "Future[Any]":
        future = Future[Any]()
        try:
            future.set_result(asyncio.run(function(*arguments)))
        except Exception as error:
            future.set_exception(error)
        return future


class Server(Session):
    """A session of a server with one tool that records its calls."""

    def __init__(self, events: list[Any], command: str, log: Any):
        super().__init__(1)
        self.events, self.command, self.log = events, command, log

    def __enter__(self) -> "tuple[Server, bool]":
        if self.command == "silent":
            raise ExceptionGroup("several", [TimeoutError("it took\nlong")])
        if self.command == "broken":
            self.log.write("first\n  no key " + "y" * 300 + " \n\n")
            raise ValueError("it ended")
        self.events.append(f"{self.command} begins")
        return self, False

    def __exit__(self, *error: object) -> None:
        self.events.append((f"{self.command} ends", self.log.closed))

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Page:
        self.events.append((name, arguments))
        return Page(content=[{"type": "text", "text": f"of {self.command}"}])


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that opens servers without programs, the events, and the logs."""
    importlib.import_module("mcp.client.session")  # with the real anyio
    events, logs = list[Any](), list[Any]()
    anyio = SimpleNamespace(from_thread=SimpleNamespace(start_blocking_portal=lambda: Portal(events)))
    monkeypatch.setitem(sys.modules, "anyio", anyio)
    monkeypatch.setitem(sys.modules, "anyio.from_thread", anyio.from_thread)
    monkeypatch.setattr(mcp, "find_spec", lambda name: name == "mcp" or None)
    monkeypatch.setattr(
        mcp,
        "open_session",
        lambda server_config, log, listen: logs.append(log) or Server(events, server_config["command"], log),
    )

    def opened(*commands: str) -> mcp.McpServers:
        named = {f"s{number}": {"command": command} for number, command in enumerate(commands)}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": named}))
        return mcp.McpServers(str(tmp_path / "mcp.json"))

    return opened, events, logs


def test_servers_end_in_reverse_order_when_closed(servers: Any):
    """End the event loop last, and remove the logs."""
    opened, events, logs = servers
    with opened("a", "b") as both:
        assert [each.tool.name for each in both.offered] == [*["s0__x"] * 300, *["s1__x"] * 300]
        assert both.offered[-1].perform({"n": 1}) == "of b" and both.offered[0].perform({}) == "of a"
        assert [log.closed for log in logs] == [False, False]
        assert events[:3] == ["portal begins", "a begins", "b begins"]
        del events[:]
    assert events == [("b ends", False), ("a ends", False), "portal ends"]
    assert [log.closed for log in logs] == [True, True]


@pytest.mark.parametrize(("command", "reason"), [("silent", "it took long"), ("broken", "no key " + "y" * 193)])
def test_a_server_that_fails_to_start_closes_all(servers: Any, command: str, reason: str):
    """Report the last line of its log or the error."""
    opened, events, logs = servers
    with pytest.raises(LocalllmError) as failure:
        opened("a", command, "b")
    assert str(failure.value) == f"the MCP server 's1' does not respond: {reason}"
    assert events == ["portal begins", "a begins", ("a ends", False), "portal ends"]
    assert [log.closed for log in logs] == [True, True]


def test_mcp_without_its_package_explains_how_to_install_it(servers: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "find_spec", lambda name: None)
    with pytest.raises(LocalllmError, match=r"^--mcp needs the package mcp: pip install 'localllm\[mcp\]'$"):
        servers[0]("a")


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt, OSError])
def test_an_interrupted_call_to_a_server_is_cancelled(error: type[BaseException]):
    waited, cancelled = list[float](), list[bool]()

    def result(seconds: float) -> None:
        waited.append(seconds)
        raise error

    future = SimpleNamespace(result=result, cancel=lambda: cancelled.append(True))
    servers = object.__new__(mcp.McpServers)
    servers._portal = SimpleNamespace(
        start_task_soon=lambda *arguments: arguments == (mcp.call_tool, "s", "t", {"a": 1}) and future
    )
    call = servers._offer("x", "s", {"name": "t"}).perform
    with pytest.raises(ToolError if error is TimeoutError else error) as failure:
        call({"a": 1})
    assert error is not TimeoutError or str(failure.value) == "no response within 120 seconds"
    assert waited == [120.0] and cancelled == [True]
