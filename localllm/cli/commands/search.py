"""localllm search: find the passages of files that answer a question."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.options.search import FileFilterGroup, SearchModelGroup, SearchPaths, Threshold, Top
from localllm.cli.parameters import option
from localllm.cli.terminal.output import add_attribute, is_terminal, say, say_dim, to_json_line, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.services.search.ranking import SearchHit


def search(
    paths: SearchPaths = None,
    *,
    query: str | None = option("-e --query", "Question; all arguments are then files or folders.", "TEXT"),
    top: Top = 5,
    threshold: Threshold = None,
    by_line: bool = option("-n --line-number", "Print FILE:LINE: before every line, as grep does."),
    # Not set by config.toml, where --context means the context length of other commands, in tokens.
    around: int = option(
        "-C --context", "Print N lines before and after each passage.  [default: 0]", "N", typed_only=True, default=0
    ),
    before: int = option("-B", "Print N lines before each passage.  [default: 0]", "N", typed_only=True, default=0),
    after: int = option("-A", "Print N lines after each passage.  [default: 0]", "N", typed_only=True, default=0),
    habits: bool = option(
        "-r -R -i --recursive --ignore-case",
        "Ignored, for users of grep: `search` always does this.",
        typed_only=True,
    ),
    only_names: bool = option("-l --files-with-matches", "Print only the names of files, the best first."),
    as_json: options.AsJson = False,
    mcp: bool = option("--mcp", "Run as an MCP server on stdin and stdout, with one tool, `search`.", typed_only=True),
    model: str | None = option(
        "-m --model", "Alias of --embedder.", "MODEL", autocompletion=offer_models, typed_only=True
    ),
    files: FileFilterGroup,
    models: SearchModelGroup,
    threads: options.Threads = None,
    device: options.Device = "auto",
) -> None:
    """Search files and folders by words and by meaning.

    Prints the best passages, each after its file and line. QUESTION is an ordinary sentence, or some words; without an
    embedding model only words count. Hidden and binary files, and what .gitignore leaves out, are skipped. The index is
    kept in the cache folder, and only changed files are read again. With - the lines of stdin are printed, the best
    first.

    Examples:
      localllm search docs "how do I resume a map?" -m nomic-embed-text-1.5
      localllm search src -l "where are passwords checked?"
      rg -n ferry | localllm search - "when do boats leave?" -m minilm.gguf
      localllm search docs --mcp -m minilm.gguf
      localllm search docs "exit codes" | localllm run model.gguf -p "What is 7?"
    """
    from localllm.cli.open_model import open_search
    from localllm.cli.options.search import read_piped_lines, require_paths, split_question

    models.embedder = model or models.embedder
    if mcp:
        from localllm.services.search.mcp_server import serve_search

        if query is not None:
            raise UsageError("--mcp answers the questions of its client: leave out --query")
        places = require_paths(paths or ())
        with open_search(places, files, models, threads, device) as index:
            return serve_search(index, places, top)
    places, question = split_question(paths or (), query, "search")
    require_counts(top=(top, 1), around=(around, 0), before=(before, 0), after=(after, 0))
    context_lines = before or around, after or around
    if threshold is not None and models.embedder is None:
        raise UsageError("--threshold is a cosine similarity: name an embedding model with -m MODEL")
    lines = read_piped_lines(places)
    with open_search(places, files, models, threads, device, lines) as index:
        hits = index.find(question, top, threshold)
        if models.embedder is None:
            say_dim("searched by words only; add -m MODEL to search by meaning, too")
    if not hits:
        say("localllm: no matching passage")
        raise typer.Exit(1)
    layout = (
        "json" if as_json else "texts" if lines is not None else "names" if only_names else "lines" if by_line else ""
    )
    write(render_hits(hits, layout, *context_lines))


def require_counts(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if value < least:
            raise UsageError(f"{name} must be {least} or greater, not {value}")


def render_hits(hits: "Sequence[SearchHit]", layout: str, before: int, after: int) -> str:
    """Format hits.

    layout: "json", "texts" (without locations), "names" of files, "lines" as grep prints them, or "" for a block each.
    before, after: lines around each passage.
    """
    if layout == "json":
        return "".join(to_json_line(to_dict(hit)) for hit in hits)
    if layout == "texts":
        return "".join(f"{hit.passage.text}\n" for hit in hits)
    if layout == "names":
        return "".join(f"{name}\n" for name in dict.fromkeys(hit.passage.path for hit in hits))
    if layout == "lines":
        numbered = ((hit.passage, *line) for hit in hits for line in list_lines(hit, before, after))
        return "".join(f"{each.path}:{each.page or number}:{text}\n" for each, number, text in numbered)
    return "\n".join(format_block(hit, before, after) for hit in hits)


def to_dict(hit: "SearchHit") -> dict[str, object]:
    each = hit.passage
    fields: dict[str, object] = {"file": each.path, "line": each.first, "last_line": each.last}
    fields |= {"page": each.page} if each.page else {}
    fields |= {"heading": each.heading, "text": each.text}
    return {**fields, "score": hit.score, **({} if hit.cosine is None else {"cosine": hit.cosine})}


def format_block(hit: "SearchHit", before: int, after: int) -> str:
    """Format a passage below its file and line."""
    text = "\n".join(text for _, text in list_lines(hit, before, after))
    place = add_attribute(hit.passage.place, "35") if is_terminal(sys.stdout) else hit.passage.place
    return f"{place}\n{text}\n"


def list_lines(hit: "SearchHit", before: int, after: int) -> list[tuple[int, str]]:
    """Return a passage's lines with their line numbers, extended by the lines before and after it."""
    passage = hit.passage
    numbered = [*enumerate(passage.text.split("\n"), passage.first)]
    if not (before or after):
        return numbered
    from localllm.services.search.files import read_text

    file_lines = (read_text(passage.path) or "").splitlines()
    first, last = max(1, passage.first - before), min(len(file_lines), passage.last + after)
    return [(number, file_lines[number - 1]) for number in range(first, last + 1)] or numbered
