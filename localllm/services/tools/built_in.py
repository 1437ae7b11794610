"""The built-in tools: read files, list folders, search text and run commands, in the allowed folders only."""

import fnmatch
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from typing import BinaryIO

from localllm.errors import UsageError
from localllm.generation.tools.tool_grammar import Tool
from localllm.services.tools import confined
from localllm.services.tools.box import OfferedTool, Toolbox, ToolError, get_positive_int, get_string
from localllm.system.files import open_without_links
from localllm.system.processes import PipeReader, kill_with_children, make_shell_arguments

MAX_FILE_BYTES = 4 << 20  # maximum bytes of a file; larger ones are not read
ENTRIES = 1000  # maximum entries listed of a folder
MATCHES, FILES, SECONDS = 100, 20_000, 20.0  # limits of a search: matching lines, files read, and time
PASSAGES = 5  # passages that a search returns if no line matches
MAX_LINE = 300  # maximum characters shown of a matching line
COMMAND_SECONDS = 120.0
MAX_OUTPUT = 1 << 20  # maximum bytes of output
# Environment variables passed to the command: none with keys or passwords.
PASSED_VARIABLES = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "USER",
"USERPROFILE",
        "PATHEXT", "COMSPEC", "APPDATA"}  # fmt: skip


class AllowedFolders:
    """The folders that the user allows; symbolic links are resolved first.

    Attributes:
        roots: absolute paths without symbolic links; relative names are relative to the first one.
    """

    def __init__(self, paths: Sequence[str]):
        """Resolve the folders. Raises UsageError for one that does not exist."""
        self.roots = [os.path.realpath(os.path.expanduser(folder)) for folder in paths]
        for folder, root in zip(paths, self.roots, strict=True):
            if not os.path.isdir(root):
                raise UsageError(f"allow must be an existing folder, not {folder}")

    def resolve_path(self, path: str) -> str:
        """Resolve a path. Raises ToolError if it is outside the allowed folders."""
        if "\0" in path:
            raise ToolError("a path cannot contain NUL")
        real = os.path.realpath(os.path.join(self.roots[0], path))
        if not any(is_within(real, root) for root in self.roots):
            raise ToolError(f"{path} is outside the allowed folders: {', '.join(self.roots)}")
        return real

    def open(self, path: str) -> BinaryIO:
        real = self.resolve_path(path)
        file = open_without_links(real, os.O_RDONLY)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{path} is not a file")
            if not os.path.samestat(status, os.stat(self.resolve_path(path))):  # replaced between resolving and opening
                raise ToolError(f"{path} is outside the allowed folders: {', '.join(self.roots)}")
            return os.fdopen(file, "rb")
        except BaseException:
            os.close(file)
            raise

    def format_path(self, path: str) -> str:
        """Format a path for the model: relative to the first folder, or absolute."""
        return os.path.relpath(path, self.roots[0]) if is_within(path, self.roots[0]) else path


def is_within(path: str, root: str) -> bool:
    try:
        return os.path.commonpath([os.path.normcase(path), os.path.normcase(root)]) == os.path.normcase(root)
    except ValueError:  # on another drive
        return False


# ---- files


def make_read_tool(folders: AllowedFolders) -> OfferedTool:
    def perform(arguments: dict[str, object]) -> str:
        path, first = get_string(arguments, "path"), get_positive_int(arguments, "first", 1)
        lines = read_text(folders, path).splitlines(keepends=True)
        if first > max(1, len(lines)):
            raise ToolError(f"{path} has only {len(lines)} lines")
        count = get_positive_int(arguments, "lines", max(1, len(lines)))
        text = "".join(lines[first - 1 : first - 1 + count])
        if len(lines) > count or first > 1:
            end = min(first - 1 + count, len(lines))
            text += f"\n[these are the lines {first} to {end} of {len(lines)}]"
        return text

    about = f"Read a text file. Names are relative to {folders.roots[0]}."
    numbers = {"type": "integer", "minimum": 1}
    parameters = {
        "path": {"type": "string"},
        "first": {**numbers, "description": "the first line to read"},
        "lines": {**numbers, "description": "the number of lines to read"},
    }
    return make_tool("read_file", about, parameters, ["path"], perform)


def make_list_tool(folders: AllowedFolders) -> OfferedTool:
    def perform(arguments: dict[str, object]) -> str:
        real = folders.resolve_path(get_string(arguments, "path", "."))
        with os.scandir(real) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        lines = [describe_entry(entry) for entry in entries[:ENTRIES]]
        if len(entries) > ENTRIES:
            lines.append(f"[cut: these are the first {ENTRIES} of {len(entries)}]")
        return "\n".join(lines) or "[nothing]"

    about = f"List a folder: names, folders with a slash, files with their bytes. Allowed: {', '.join(folders.roots)}."
    return make_tool("list", about, {"path": {"type": "string"}}, [], perform)


def make_search_tool(folders: AllowedFolders) -> OfferedTool:
    def perform(arguments: dict[str, object]) -> str:
        text, pattern = get_string(arguments, "text"), get_string(arguments, "files", "*")
        if not text:
            raise ToolError("text is empty")
        matches, end, looked, paths = list[str](), monotonic() + SECONDS, 0, list[str]()
        for path in walk_files(folders.resolve_path(get_string(arguments, "path", "."))):
            if not fnmatch.fnmatch(os.path.basename(path), pattern):
                continue
            looked += 1
            if looked > FILES or monotonic() > end:
                matches.append(f"[cut: only the first {looked - 1} files were searched]")
                break
            paths.append(path)
            matches += find_lines(folders, path, text, MATCHES + 1 - len(matches))
            if len(matches) > MATCHES:
                return "\n".join([*matches[:MATCHES], f"[cut: these are the first {MATCHES} lines that have it]"])
        return "\n".join(matches) or find_passages(folders, paths, text) or f"[nothing in {looked} files]"

    about = (
        "Find lines that have a text, in all files of a folder but hidden ones. If none has it, the passages that fit "
        "its words best: a question will do."
    )
    parameters = {"text": {"type": "string"}, "path": {"type": "string"}}
    parameters["files"] = {"type": "string", "description": "as *.py"}
    return make_tool("search", about, parameters, ["text"], perform)


def find_passages(folders: AllowedFolders, paths: Sequence[str], text: str) -> str:
    """Return the passages that share the most words with a text, each below its location, or ""."""
    from localllm.services.search.index import PassageIndex  # imports SQLite
    from localllm.services.search.passages import split_passages
    from localllm.services.search.ranking import extract_words

    if len(words := extract_words(text)) < 2:
        return ""
    with PassageIndex(None) as index:
        for path in paths:
            with suppress(OSError, ToolError):
                index.add(split_passages(folders.format_path(path), read_text(folders, path)))
        best = [index.read_passage(id) for id in index.search_words(words, PASSAGES)]
    blocks = "\n\n".join(f"{each.place}:\n{each.text}" for each in best)
    return f"[no line has that text; these passages have its words]\n{blocks}" if blocks else ""


def make_tool(
    name: str,
    about: str,
    parameters: Mapping[str, object],
    required: list[str],
    perform: Callable[[dict[str, object]], str],
) -> OfferedTool:
    """Create a tool; parameters: JSON schemas by name, of which `required` have no default."""
    schema = {"type": "object", "properties": parameters, "required": required, "additionalProperties": False}
    return OfferedTool(Tool(name, about, schema), perform)


def read_text(folders: AllowedFolders, path: str) -> str:
    with folders.open(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    if b"\0" in data[:8192]:
        raise ToolError(f"{path} is not a text file")
    return data.decode("utf-8-sig", errors="replace")


def describe_entry(entry: "os.DirEntry[str]") -> str:
    if entry.is_dir():
        return f"{entry.name}/"
    try:
        return f"{entry.name}  {entry.stat(follow_symlinks=False).st_size}"
    except OSError:
        return entry.name


def walk_files(path: str) -> Iterator[str]:
    """Yield a file's path, or those of the non-hidden files in a folder; do not follow links."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))


def find_lines(folders: AllowedFolders, path: str, text: str, limit: int) -> list[str]:
    """Return the matching lines of a file with its name and line numbers; [] if it is not text."""
    if os.path.islink(path):
        return []
    try:
        lines = read_text(folders, path).splitlines()
    except (ToolError, OSError):
        return []
    name, matches = folders.format_path(path), list[str]()
    for number, line in enumerate(lines, 1):
        if text in line:
            matches.append(f"{name}:{number}: {line.strip()[:MAX_LINE]}")
            if len(matches) == limit:
                break
    return matches


# ---- commands


def make_run_tool(folders: AllowedFolders) -> OfferedTool:
    """Create the tool that runs shell commands and ends all their processes afterwards.

    On Linux a command can write only in the allowed folders, and read only these and installed programs.
    """
    about = (
        f"Run a command of the shell in {folders.roots[0]}, at most {COMMAND_SECONDS:.0f} seconds. It gets no input. "
        "What it writes comes back, and its exit code."
    )
    parameters = {"command": {"type": "string"}}
    return make_tool("run", about, parameters, ["command"], lambda arguments: run_command(arguments, folders.roots))


def run_command(arguments: dict[str, object], folders: Sequence[str], seconds: float = COMMAND_SECONDS) -> str:
    """Run a command; return its output and exit status. Raises ToolError on timeout."""
    command = get_string(arguments, "command")
    if "\0" in command:
        raise ToolError("a command cannot contain NUL")
    words = make_shell_arguments(command)
    if confined.get_landlock_version() and not isinstance(words, str):
        words = [sys.executable, "-I", "-S", str(confined.__file__), *folders, "--", *words]
    environment = {
        name: value for name, value in os.environ.items() if name.upper() in PASSED_VARIABLES or name[:3] == "LC_"
    }
    process = subprocess.Popen(
        words, cwd=folders[0], env={**environment, "TERM": "dumb"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    output = PipeReader(process.stdout, MAX_OUTPUT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"timed out after {seconds:.0f} seconds; output so far:\n{output.get_text()}") from None
    finally:
        kill_with_children(process)
        output.thread.join(1)
        text = output.get_text()
    return f"{text}{chr(10) * bool(text and not text.endswith(chr(10)))}[exit code {process.returncode}]"


# ---- the toolbox


BUILT_IN = {"read_file": make_read_tool, "list": make_list_tool, "search": make_search_tool, "run": make_run_tool}


def make_toolbox(
    names: Sequence[str], allowed: Sequence[str], mcp: str | None, stack: ExitStack, json_calls: bool = True
) -> Toolbox:
    """Create a toolbox of the named built-in tools and the tools of MCP servers, which run until `stack` closes.

    allowed: folders that built-in tools may access.  mcp: path of a file of MCP servers. Raises UsageError, and the
    errors of McpServers.
    """
    if unknown := [name for name in names if name not in BUILT_IN]:
        raise UsageError(f"unknown tool {unknown[0]!r}; available tools: {', '.join(BUILT_IN)}")
    if names and not allowed:
        raise UsageError("allow is missing: give the folders that the tools may access, for example --allow .")
    if allowed and not names:
        raise UsageError("allow applies to built-in tools only: add --tools")
    offered = [BUILT_IN[name](AllowedFolders(allowed)) for name in dict.fromkeys(names)]
    if mcp is None:
        box = Toolbox(offered, json_calls=json_calls)
    else:
        from localllm.services.tools.mcp import McpServers

        servers = stack.enter_context(McpServers(mcp))

        def list_current() -> list[OfferedTool]:
            return [*offered, *servers.offered]

        box = Toolbox(list_current(), json_calls=json_calls, current=list_current, may_offer=servers.may_offer)
    if not box.names:
        raise UsageError("no tools: --tools is empty, and the MCP servers of --mcp offer none")
    return box
