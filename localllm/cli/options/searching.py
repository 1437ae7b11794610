"""The options of search and ask."""

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import group

if TYPE_CHECKING:
    from localllm.services.search.files import Filter


@group
class FileFilter:
    """Options that select the files to search."""

    include: Annotated[
        list[str] | None,
        typer.Option(
            "-g", "--include", metavar="GLOB", help="Search only files with this name or path, e.g. *.md.  [repeatable]"
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Skip files and folders with this name or path.  [repeatable]"),
    ] = None
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Also search files and folders whose names begin with a dot.")
    ] = False
    no_ignore: Annotated[
        bool, typer.Option("--no-ignore", help="Also search files that .gitignore or .ignore exclude.")
    ] = False

    def filter(self) -> "Filter":
        """Return the filter; a pattern of --include that begins with ! excludes, as in ripgrep."""
        from localllm.services.search.files import Filter

        patterns = self.include or []
        excluded = [*(self.exclude or ()), *(each[1:] for each in patterns if each.startswith("!"))]
        return Filter([each for each in patterns if not each.startswith("!")], excluded, self.hidden, self.no_ignore)


@group
class Searching:
    """Search models."""

    embedder: Annotated[
        str | None,
        typer.Option(
            "--embedder",
            metavar="MODEL",
            autocompletion=offer_models,
            help="Embedding model, to search by meaning as well as by words.  [default: words only]",
        ),
    ] = None
    reranker: Annotated[
        str | None,
        typer.Option(
            "--reranker",
            metavar="MODEL",
            autocompletion=offer_models,
            help="Reranker, to sort the best passages.",
        ),
    ] = None


Top = Annotated[int, typer.Option("-k", "--top", metavar="N", help="Number of passages.  [default: 5]")]
Threshold = Annotated[
    float | None,
    typer.Option("--threshold", metavar="N", help="Show only passages with at least this cosine similarity, up to 1."),
]
Places = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH]... QUESTION", help="Files and folders, then the question in quotes; - reads lines from stdin."
    ),
]
