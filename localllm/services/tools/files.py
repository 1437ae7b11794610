"""Tools that read a file, list a folder, and search for text."""

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic

from localllm.generation.tools.tool_grammar import Tool
from localllm.services.tools.box import OfferedTool, ToolError, number_in, text_in
from localllm.services.tools.folders import Folders

LARGEST = 4 << 20  # bytes of a file; larger ones are not read
ENTRIES = 1000  # of a folder that are listed
MATCHES, FILES, SECONDS = 100, 20_000, 20.0  # most lines found, files read, and time of a search
PASSAGES = 5  # that a search returns if no line has the text
WIDEST = 300  # characters of a found line that are shown


def read_file(folders: Folders) -> OfferedTool:
    """Create the tool that reads a text file or some of its lines."""

    def perform(arguments: dict[str, object]) -> str:
        path, first = text_in(arguments, "path"), number_in(arguments, "first", 1)
        lines = text_of(folders, path).splitlines(keepends=True)
        if first > max(1, len(lines)):
            raise ToolError(f"{path} has {len(lines)} lines")
        count = number_in(arguments, "lines", max(1, len(lines)))
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
        "lines": {**numbers, "description": "how many lines"},
    }
    return tool("read_file", about, parameters, ["path"], perform)


def list_folder(folders: Folders) -> OfferedTool:
    """Create the tool that lists a folder."""

    def perform(arguments: dict[str, object]) -> str:
        real = folders.resolve_path(text_in(arguments, "path", "."))
        with os.scandir(real) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        lines = [describe_entry(entry) for entry in entries[:ENTRIES]]
        if len(entries) > ENTRIES:
            lines.append(f"[cut: these are the first {ENTRIES} of {len(entries)}]")
        return "\n".join(lines) or "[nothing]"

    about = f"List a folder: names, folders with a slash, files with their bytes. Allowed: {', '.join(folders.roots)}."
    return tool("list", about, {"path": {"type": "string"}}, [], perform)


def search(folders: Folders) -> OfferedTool:
    """Create the tool that searches files for a text."""

    def perform(arguments: dict[str, object]) -> str:
        text, pattern = text_in(arguments, "text"), text_in(arguments, "files", "*")
        if not text:
            raise ToolError("text is empty")
        matches, end, looked, paths = list[str](), monotonic() + SECONDS, 0, list[str]()
        for path in walk_files(folders.resolve_path(text_in(arguments, "path", "."))):
            if not fnmatch.fnmatch(os.path.basename(path), pattern):
                continue
            looked += 1
            if looked > FILES or monotonic() > end:
                matches.append(f"[cut: only {looked - 1} files were looked at]")
                break
            paths.append(path)
            matches += find_lines(folders, path, text, MATCHES + 1 - len(matches))
            if len(matches) > MATCHES:
                return "\n".join([*matches[:MATCHES], f"[cut: these are the first {MATCHES} lines that have it]"])
        return "\n".join(matches) or nearest_passages(folders, paths, text) or f"[nothing in {looked} files]"

    about = (
        "Find lines that have a text, in all files of a folder but hidden ones. If none has it, the passages that fit "
        "its words best: a question will do."
    )
    parameters = {"text": {"type": "string"}, "path": {"type": "string"}}
    parameters["files"] = {"type": "string", "description": "as *.py"}
    return tool("search", about, parameters, ["text"], perform)


def nearest_passages(folders: Folders, paths: Sequence[str], text: str) -> str:
    """Return the passages of files that have most of the words of a text, each below its place; "" if none has any."""
    from localllm.services.search.index import Index  # imports SQLite
    from localllm.services.search.passages import cut_into_passages
    from localllm.services.search.ranking import words_of

    if len(words := words_of(text)) < 2:
        return ""
    with Index(None) as index:
        for path in paths:
            with suppress(OSError, ToolError):
                index.add(cut_into_passages(folders.relative_path(path), text_of(folders, path)))
        best = [index.passage(id) for id in index.by_words(words, PASSAGES)]
    blocks = "\n\n".join(f"{each.place}:\n{each.text}" for each in best)
    return f"[no line has that text; these passages have its words]\n{blocks}" if blocks else ""


def tool(
    name: str,
    about: str,
    parameters: Mapping[str, object],
    required: list[str],
    perform: Callable[[dict[str, object]], str],
) -> OfferedTool:
    """Create a tool; parameters: JSON schemas by name, of which `required` have no default."""
    schema = {"type": "object", "properties": parameters, "required": required, "additionalProperties": False}
    return OfferedTool(Tool(name, about, schema), perform)


def text_of(folders: Folders, path: str) -> str:
    """Read a text file. Raises ToolError if it is not text, OSError."""
    with folders.open(path) as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ToolError(f"{path} has more than {LARGEST} bytes")
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
    """Yield a file's path, or those of the files below a folder without hidden ones; links are not followed."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))


def find_lines(folders: Folders, path: str, text: str, limit: int) -> list[str]:
    """Return matching lines of a file with its name and line numbers; none if it is not text."""
    if os.path.islink(path):
        return []
    try:
        lines = text_of(folders, path).splitlines()
    except (ToolError, OSError):
        return []
    name, matches = folders.relative_path(path), list[str]()
    for number, line in enumerate(lines, 1):
        if text in line:
            matches.append(f"{name}:{number}: {line.strip()[:WIDEST]}")
            if len(matches) == limit:
                break
    return matches
