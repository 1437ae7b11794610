"""localllm rerank: lines by how well they answer a query."""

import json
from typing import Annotated, Any, Literal

import typer

from localllm.cli import open_model as opening
from localllm.cli.commands.embed import Context, Field, opened, records_of, tell
from localllm.cli.options import shared as options
from localllm.cli.resolve_model import located
from localllm.cli.terminal.output import ProgressLine, write
from localllm.errors import UsageError


def rerank(
    model: options.ModelName,
    input: Annotated[str | None, typer.Argument(metavar="[INPUT]", help="A file of records.  [default: stdin]")] = None,
    *,
    query: Annotated[
        str | None, typer.Option("-q", "--query", metavar="TEXT", help="What the texts should answer.")
    ] = None,
    top: Annotated[int | None, options.number("--top", help="Only so many, the best.  [default: all]")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="A score in front of each line.")] = False,
    overflow: Annotated[
        Literal["refuse", "cut"],
        typer.Option("--overflow", metavar="HOW", help="Texts that are too long: refuse or cut.  [default: refuse]"),
    ] = "refuse",
    field: Field = "text",
    as_json: options.AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tell on stderr how fast it was.")] = False,
    context: Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
) -> None:
    """Sort lines by how well they answer a query, best first.

    INPUT has a text in every line, or a JSON object whose field "text" is one; without INPUT it is read from stdin. The
    lines come out as they are; with --json each as {"id", "score", "input"}. A score is what the model's head says:
    larger is better, and only scores of one model and one query compare.

    Examples:
      grep -ri pension notes/ | localllm rerank bge-reranker.gguf -q "when can I retire?" --top 3
      localllm rerank reranker.gguf answers.txt -q "Why is the sky blue?" --scores
    """
    from time import perf_counter

    from localllm.engine.options import EngineOptions
    from localllm.services.embed import text_of
    from localllm.services.rerank import reranker

    if query is None:
        raise UsageError("--query TEXT is missing: what the texts should answer")
    line, start = ProgressLine(), perf_counter()
    records = records_of(input, None)
    texts = [text_of(record, field) for record in records]
    engine = EngineOptions(threads, context or None, backend=device, progress=opening.compiling(line))
    with opened(reranker(located(model), engine), line) as made:
        ranker: Any = made
        found = ranker.rerank(query, texts, overflow == "cut", lambda done: line.show(f"{done} texts read"))
    order = sorted(range(len(texts)), key=lambda number: -float(found[number]))[:top]
    for number in order:
        record, score = records[number], float(found[number])
        shown = record.input if isinstance(record.input, str) else json.dumps(record.input, ensure_ascii=False)
        if as_json:
            told = {"id": record.id, "score": score, "input": record.input}
            write(json.dumps(told, ensure_ascii=False) + "\n")
        else:
            write(f"{score:.6f}\t{shown}\n" if scores else f"{shown}\n")
    if stats:
        tell(ranker, perf_counter() - start)
