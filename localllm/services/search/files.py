"""Find text files as ripgrep does: no hidden files, no binaries, none that .gitignore excludes."""

import fnmatch
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.files.documents import is_document, read_document
from localllm.files.text_file import UTF16_MARKS
from localllm.frozen import frozen

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".ignore")
MAX_FILE_BYTES = 16 << 20  # bytes; larger files are skipped
SAMPLE = 8192  # a zero in the first bytes means a binary file


@frozen
class FileFilter:
    """Selects files within folders.

    Attributes:
        include, exclude: glob patterns of names, or of paths if they have a slash.
        hidden: include names with a leading dot.  ignored: include files excluded by .gitignore and .ignore.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    hidden: bool = False
    ignored: bool = False

    def selects(self, path: str, is_folder: bool) -> bool:
        """Return whether to include a file, or to descend into a folder, below a searched folder."""
        name = os.path.basename(path)
        if name.startswith(".") and not self.hidden:
            return False
        if any(matches_pattern(path, pattern) for pattern in self.exclude):
            return False
        return is_folder or not self.include or any(matches_pattern(path, pattern) for pattern in self.include)


def matches_pattern(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path's name, or the end of the path if it has a slash."""
    pattern = pattern.rstrip("/")
    if "/" in pattern:
        return fnmatch.fnmatch(path, f"*{pattern}") or fnmatch.fnmatch(path, pattern)
    return fnmatch.fnmatch(os.path.basename(path), pattern)


class IgnoreRules:
    """The rules in the ignore files of a folder, its parents and its subfolders."""

    def __init__(self, folder: str):
        self._specs: list[tuple[str, GitIgnoreSpec]] = []
        for above in list_repository_parents(os.path.realpath(folder)):
            self.enter(above)

    def enter(self, folder: str) -> None:
        """Read a folder's ignore files."""
        lines = list[str]()
        for name in IGNORE_FILES:
            with suppress(OSError, ValueError), open(os.path.join(folder, name), encoding="utf-8") as file:
                lines += file.read().splitlines()
        if lines:
            from pathspec import GitIgnoreSpec  # seldom needed

            self._specs.append((f"{os.path.realpath(folder)}{os.sep}", GitIgnoreSpec.from_lines(lines)))

    def is_ignored(self, path: str, is_folder: bool) -> bool:
        """Return whether a path is ignored; the nearest ignore file with a matching pattern decides."""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        for folder, spec in reversed(self._specs):
            if real.startswith(folder):
                relative = real[len(folder) :].replace(os.sep, "/") + "/" * is_folder
                verdict = spec.check_file(relative).include
                if verdict is not None:
                    return bool(verdict)
        return False


def list_repository_parents(folder: str) -> list[str]:
    """Return a folder's parents from the root of its Git repository on; [] outside a repository."""
    parents = list[str]()
    while not os.path.exists(os.path.join(folder, ".git")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return []
        parents.insert(0, parent)
        folder = parent
    return parents


def iter_text_files(names: Sequence[str], filter_: FileFilter) -> Iterator[str]:
    """Yield the named files, and those in named folders, sorted. Raises UsageError for a missing name."""
    for name in names:
        if os.path.isdir(name):
            yield from iter_selected_files(name, filter_, IgnoreRules(name))
        elif os.path.isfile(name):
            yield name
        else:
            raise UsageError(f"{name}: no such file or folder")


def iter_selected_files(folder: str, filter_: FileFilter, ignored: IgnoreRules) -> Iterator[str]:
    """Yield the selected files in a folder; do not follow links to folders."""
    ignored.enter(folder)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = entry.name if folder == "." else os.path.join(folder, entry.name)
        is_folder = entry.is_dir(follow_symlinks=False)
        if not filter_.selects(path, is_folder) or (not filter_.ignored and ignored.is_ignored(path, is_folder)):
            continue
        if is_folder:
            yield from iter_selected_files(path, filter_, ignored)
        elif entry.is_file():
            yield path


def read_text(path: str) -> str | None:
    """Read a text file or the text of a document; return None for one that is binary, too large or unreadable."""
    if is_document(path):
        try:
            return read_document(path)
        except UsageError:
            return None
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    if len(data) > MAX_FILE_BYTES or (b"\0" in data[:SAMPLE] and not data.startswith(UTF16_MARKS)):
        return None
    encoding = "utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig"
    return data.decode(encoding, errors="replace")
