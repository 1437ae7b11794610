"""Options of search and ask."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument, option, option_group
from localllm.cli.terminal.output import is_terminal, open_stdin
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.services.search.files import FileFilter


@option_group("Options that select the files to search")
class FileFilterFlags:
    """Options of `search` and `ask` that select the files."""

    include: list[str] | None = option(
        "-g --include", "Search only files with this name or path, e.g. *.md.  [repeatable]", "GLOB"
    )
    exclude: list[str] | None = option(
        "--exclude", "Skip files and folders with this name or path.  [repeatable]", "GLOB"
    )
    hidden: bool = option("--hidden", "Also search files and folders whose names begin with a dot.")
    no_ignore: bool = option("--no-ignore", "Also search files that .gitignore or .ignore exclude.")

    def create_filter(self) -> "FileFilter":
        """Return the filter; a pattern of --include that begins with ! excludes, as in ripgrep."""
        from localllm.services.search.files import FileFilter

        patterns = self.include or []
        excluded = [*(self.exclude or ()), *(each[1:] for each in patterns if each.startswith("!"))]
        return FileFilter(
            [each for each in patterns if not each.startswith("!")], excluded, self.hidden, self.no_ignore
        )


@option_group("Search models")
class SearchModelFlags:
    """Options of `search` and `ask` that name an embedder and a reranker."""

    embedder: str | None = option(
        "--embedder",
        "Search by meaning, too, with this embedding model.  [default: words only]",
        "MODEL",
        autocompletion=offer_models,
    )
    reranker: str | None = option(
        "--reranker", "Sort the best passages with this reranker.", "MODEL", autocompletion=offer_models
    )


Top = Annotated[int, option("-k --top", "Print the N best passages.  [default: 5]", "N")]
Threshold = Annotated[
    float | None, option("--threshold", "Show only passages with at least this cosine similarity, up to 1.", "N")
]
SearchPaths = Annotated[
    list[str] | None,
    argument("[PATH]... QUESTION", "Files and folders, then the question in quotes; - reads lines from stdin."),
]
PIPE = "-"


def split_question(arguments: Sequence[str], question: str | None, command: str) -> tuple[list[str], str]:
    """Split the arguments into paths and the question. Raises UsageError.

    question: from an option.  Without paths, stdin's lines or the current folder are searched.
    """
    places = [*arguments]
    if question is None:
        if not places:
            raise UsageError(f'QUESTION is missing: localllm {command} FOLDER "QUESTION"')
        if len(places) == 1 and os.path.isdir(places[0]):
            raise UsageError(f'QUESTION is missing: localllm {command} {places[0]} "QUESTION"')
        is_first = len(places) > 1 and not is_searchable(places[0]) and all(is_searchable(each) for each in places[1:])
        question = places.pop(0 if is_first else -1)
    if not question.strip():
        raise UsageError("QUESTION is empty: give a question, or words to search for")
    if not places:
        piped = sys.stdin is not None and not is_terminal(sys.stdin) and command == "search"
        places = [PIPE] if piped else ["."]
    if missing := [each for each in places if not is_searchable(each)]:
        quoted = "; put the question in quotes" if len(places) > 1 else ""
        raise UsageError(f"{missing[0]}: no such file or folder{quoted}")
    if PIPE in places and len(places) > 1:
        raise UsageError("- (stdin) cannot be combined with files: leave out one of them")
    return places, question


def require_paths(names: Sequence[str]) -> list[str]:
    """Return the names, or the current folder if there are none. Raises UsageError for a missing file or folder."""
    for name in names:
        if not os.path.exists(name):
            raise UsageError(f"{name}: no such file or folder")
    return [*names] or ["."]


def is_searchable(name: str) -> bool:
    return name == PIPE or os.path.exists(name)


def read_piped_lines(places: Sequence[str]) -> list[str] | None:
    """Return the lines of stdin if the only path is "-", else None."""
    if [*places] != [PIPE]:
        return None
    if sys.stdin is None:
        raise UsageError("-: stdin is closed; pipe the lines, as in `cat FILE | localllm search - QUESTION`")
    return str(open_stdin().read().decode(errors="replace")).splitlines()
