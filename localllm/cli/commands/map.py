"""localllm map: answer many prompts."""

from typing import Annotated

from localllm.cli.options import shared as options
from localllm.cli.options.mapping import MapOutputFlags, MapPromptFlags, TableFlags
from localllm.cli.options.offers import offer_models
from localllm.cli.options.one_shot import EndpointFlags
from localllm.cli.parameters import argument

Model = Annotated[str | None, argument("MODEL", options.A_MODEL, offer_models, also=options.NAMED)]
Input = Annotated[
    str | None,
    argument("[INPUT]", "File of records, one per line, or folder with one record per file.  [default: stdin]"),
]


def map(
    model: Model = None,
    input: Input = None,
    *,
    ask: MapPromptFlags,
    output: MapOutputFlags,
    tables: TableFlags,
    engine: options.EngineFlags,
    choices: options.AnswerFlags,
    endpoint: EndpointFlags,
) -> None:
    """Answer many prompts, in parallel.

    INPUT has one record per line: plain text, or a JSON object with "prompt", "messages" or the fields that the
    template of -p or -f uses, and optionally "image", a path. INPUT may also be a table, whose columns are the fields,
    a JSON array, or a folder, each of whose text files is a record with the fields "file" and "text". Without INPUT,
    records are read from stdin, each answered as soon as its line arrives. The output has one line of JSON per record:
    "id" (the record's, or its line number), "output", "thinking" if there is any, "finish_reason", "prompt_tokens",
    "completion_tokens" and "input"; or "id", "error" and "input". A table gets the answers as new columns. To resume an
    interrupted command, run it again with the same -o.

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
    from localllm.cli.map_command import MapCommand

    MapCommand(model, input, ask, output, tables, engine, choices, endpoint).run()
