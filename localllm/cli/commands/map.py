"""localllm map: many prompts, each answered."""

import os
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.map_run import answer, of_input, open_mapping
from localllm.cli.options import generation as asking
from localllm.cli.options import shared as options
from localllm.cli.options.choices import Choices, require_plain, texts_of
from localllm.cli.options.endpoint import EndpointGroup, open_remote
from localllm.cli.options.images import Projector
from localllm.cli.options.offers import offer_models
from localllm.cli.options.tables import TableGroup
from localllm.cli.parameters import Also
from localllm.cli.prompt_input import Encoding, text_of
from localllm.cli.resolve_model import resolve_model_path
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import count_noun
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.services.records import Record


Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", autocompletion=offer_models, help=options.A_MODEL), Also(*options.NAMED)
]


def map(
    model: Model = None,
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="[INPUT]",
            help="File of records, one per line, or a folder, of which each file is one.  [default: stdin]",
        ),
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file, JSONL or by its name .csv, .tsv, .parquet or .xlsx; records that it already answers are "
            "skipped.",
        ),
    ] = None,
    redo: Annotated[
        bool, typer.Option("--redo", help="Answer the records that OUTPUT already answers again, and replace them.")
    ] = False,
    redo_errors: Annotated[
        bool,
        typer.Option(
            "--redo-errors",
            help="Answer the records that failed again, also by another model, prompt or set of options, and keep the "
            "other answers.",
        ),
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help='Prompt template: {text} is the field "text", {line} a plain-text record; or Jinja: {{ text }}.',
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="File with the prompt template, as of -p.")
    ] = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as plain text, without the chat template.")
    ] = False,
    encoding: Encoding = None,
    tables: TableGroup,
    n: Annotated[
        int,
        typer.Option(
            "--n",
            metavar="N",
            help="Sample N answers for each record, most likely first; -n is the length in tokens.  [default: 1]",
        ),
    ] = 1,
    choices_given: Choices = None,
    as_finished: Annotated[
        bool, typer.Option("--as-finished", help="Write answers as they finish, not in input order.")
    ] = False,
    shortest_first: Annotated[bool, typer.Option("--shortest-first", help="Answer short prompts first.")] = False,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Faster prefill with 8-bit activations; answers may differ from those of `run`."),
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts, time and speed to stderr.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="[ADDRESS]", help="Run on the Ray cluster at ADDRESS; without ADDRESS, start one here."
        ),
    ] = None,
    engine: options.EngineGroup,
    choices: options.Answers,
    endpoint: EndpointGroup,
    mmproj: Projector = None,
) -> None:
    """Answer many prompts, in parallel.

    INPUT has one record per line: plain text, or a JSON object with "prompt", "messages" or the fields that the
    template of -p or -f uses, and optionally "image", a path. Or it is a table, whose columns are the fields, an array
    of JSON, or a folder, whose text files have the fields "file" and "text". Without INPUT, records are read from
    stdin, each answered as soon as its line is there. The output has one line of JSON per record: "id" (the record's,
    or its line number), "output", "thinking" if there is any, "finish_reason", "prompt_tokens", "completion_tokens" and
    "input"; or "id", "error" and "input". A table gets the answers as new columns. To resume an interrupted command,
    run it again with the same -o.

    Examples:
      localllm map model.gguf questions.jsonl -o answers.jsonl
      localllm map model.gguf reviews.txt -p "Is this friendly? {line}" -n 5 -o friendly.jsonl
      localllm map --endpoint http://127.0.0.1:8000 questions.jsonl -o answers.jsonl
      localllm map model.gguf reviews.txt -p "Is this friendly? {line}" --choices yes,no
      localllm map model.gguf in.csv -p "Translate: {title}" -o out.csv
      localllm map model.gguf notes -p "Summarize: {text}" -o summaries.csv
      localllm map model.gguf bills.txt -p "{line}" -j bill.json -o bills.csv
      tail -f app.log | localllm map model.gguf -p "{line}" --format text
      jq -c "{prompt: .title}" books.json | localllm map model.gguf --fast > books.jsonl
    """
    from localllm.cli.map_io import Progress, Writer, content, properties_of, records_of
    from localllm.files.gguf.file import open_part
    from localllm.files.jsonl_file import JsonlFile
    from localllm.files.text_file import require_encoding
    from localllm.services.map import MapJob, belonging, select_unfinished
    from localllm.services.map import shortest_first as sorted_by_length
    from localllm.services.record_stream import RecordStream
    from localllm.services.records import Prompts
    from localllm.services.table_output import require_table, table_writer, work_path
    from localllm.services.tables import kind_of

    if raw and chat_template is not None:
        raise UsageError("--raw turns off the chat template: leave out --chat-template")
    if raw and not choices.thoughts.are_usual:
        raise UsageError("--raw turns off the chat template: leave out the options for thinking and template variables")
    system = asking.system_message(system, system_file)
    if (redo or redo_errors) and output is None:
        raise UsageError(f"--redo{'' if redo else '-errors'} is about the answers in the output file: give -o FILE")
    if redo and redo_errors:
        raise UsageError("give either --redo or --redo-errors, not both")
    require_encoding(encoding)
    template = None if file is None else text_of(content(file), file, encoding, whole=True)
    chosen = asking.generation_options(None, choices)
    place = endpoint.place()
    if place is None and model is None:
        raise UsageError(f"MODEL is missing: {options.A_MODEL}")
    if place is not None and input is None and model is not None and os.path.isfile(model):
        model, input = None, model
    held = engine.context, engine.threads, engine.cache.types()
    is_table = bool(kind_of(output))
    streams = not (is_table or shortest_first or choices_given or encoding) and ray is None
    given = records_of(input, encoding, tables.as_csv, streams, output)
    records, table = given.records, given.table
    prompts = Prompts(prompt, template, system, raw, () if table is None else table.columns)
    path = "" if place is not None else resolve_model_path(model or "")
    job = MapJob(
        os.path.abspath(path), prompts, chosen, n, not fast, *held, chat_template, mmproj and os.path.abspath(mmproj),
        texts_of(choices_given) if choices_given is not None else (), tables.json_as_text,
    )  # fmt: skip
    if job.choices:
        require_plain(
            n=n > 1, ray=ray is not None, endpoint=place is not None,
            a_schema_grammar_or_regex=chosen.constraint is not None,
        )  # fmt: skip
    inputs = tuple(name for name in (path, input, file) if name)
    if not given.size and place is None:
        open_part(path)  # a file that is no model is told even if nothing is asked
    if output and is_table:
        require_table(output, inputs, redo)
    target = work_path(output) if output and is_table else output
    keep = bool if redo else belonging(None if isinstance(records, RecordStream) else records, output or "")
    written = JsonlFile(target, inputs, keep=keep) if target else nullcontext()
    by = job.digests(path if place is None else f"{place.url} {model}")
    if place is not None and model is None:
        del by["model"]  # whichever the server has
    properties = properties_of(choices)
    data = None if isinstance(records, RecordStream) else given.data
    with of_input(target, data, given.name, by, redo, redo_errors) as remember, written as out, ExitStack() as stack:
        if isinstance(records, RecordStream):
            left: list[Record] | RecordStream = records
            if out is not None and out.records and not redo:
                records.skip(out.records, output or "")
                say(f"localllm: {output} has {count_noun(len(out.records), 'answer')} already")
        else:
            left = records if out is None or redo else select_unfinished(records, out.records)
            left = sorted_by_length(left, prompts) if shortest_first else left
        progress = Progress(left, given.size - len(left) if isinstance(left, list) else 0)
        if progress.before:
            say(f"localllm: {output} answers {progress.before} of {count_noun(given.size, 'record')} already")
        if output and is_table and out is not None and isinstance(records, list):
            stack.enter_context(table_writer(output, out, table, records, properties))
        if not isinstance(left, list) or left:
            there = None
            if place is not None:
                refused = {"ray": ray is not None, "fast": fast, "chat_template": chat_template, "mmproj": mmproj}
                there = open_remote(place, model, choices, engine, **refused)
            with open_mapping(job, engine, left, ray, progress, raw, there) as mapping:
                if redo and out is not None:
                    out.clear()
                remember()
                put = Writer(out, tables.format_of_stdout, table, properties)
                answer(mapping, left, put, progress, as_finished)
    progress.end(stats)
