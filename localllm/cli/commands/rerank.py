"""localllm rerank: sort lines by relevance to a query."""

import json
from typing import Literal

from localllm.cli import open_model as opening
from localllm.cli.commands.embed import Context, Field, open_with_warnings, print_stats, read_inputs
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, to_json_line, write
from localllm.errors import UsageError


def rerank(
    model: options.ModelName,
    input: str | None = argument("[INPUT]", "File of records, one per line.  [default: stdin]"),
    *,
    query: str | None = option("-q --query", "Rank the texts by this query.", "TEXT"),
    top: int | None = option("--top", "Print only the N best lines.  [default: all]", "N"),
    scores: bool = option("--scores", "Print the score before each line."),
    overflow: Literal["refuse", "cut"] = option(
        "--overflow", "Refuse or cut texts longer than the context.  [default: refuse]", "HOW", default="refuse"
    ),
    field: Field = "text",
    as_json: options.AsJson = False,
    stats: bool = option("--stats", "Print the speed to stderr."),
    context: Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
) -> None:
    """Sort lines by relevance to a query, best first.

    INPUT has one record per line: a text, or a JSON object with a field "text". Without INPUT, records are read from
    stdin. The lines are printed unchanged; with --json, as {"id", "score", "input"}. The score is the reranker's
    output: larger is better, and only scores of the same model and query can be compared.

    Examples:
      grep -ri pension notes/ | localllm rerank bge-reranker.gguf -q "when can I retire?" --top 3
      localllm rerank reranker.gguf answers.txt -q "Why is the sky blue?" --scores
    """
    from time import perf_counter

    from localllm.engine.options import EngineOptions
    from localllm.services.search.embed import get_document, open_reranker

    if query is None:
        raise UsageError("--query TEXT is missing: give the query to rank the texts by")
    line, start = ProgressLine(), perf_counter()
    records = read_inputs(input, None)
    texts = [text for record in records if isinstance(text := get_document(record, field), str)]
    if len(texts) < len(records):
        raise UsageError('a reranker ranks texts only: remove the field "image" from the records')
    engine = EngineOptions(threads, context or None, backend=device, progress=opening.make_compile_progress(line))
    with open_with_warnings(open_reranker(resolve_model_path(model), engine), line) as model_opened:
        scores_found = model_opened.rerank(
            query, texts, overflow == "cut", lambda done: line.show(f"{done} texts read")
        )
    order = sorted(range(len(texts)), key=lambda index: -float(scores_found[index]))[:top]
    for index in order:
        record, score = records[index], float(scores_found[index])
        record_text = record.input if isinstance(record.input, str) else json.dumps(record.input, ensure_ascii=False)
        if as_json:
            result = {"id": record.id, "score": score, "input": record.input}
            write(to_json_line(result))
        else:
            write(f"{score:.6f}\t{record_text}\n" if scores else f"{record_text}\n")
    if stats:
        print_stats(model_opened, perf_counter() - start)
