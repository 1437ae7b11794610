"""Options of map: the prompt of each record, and the output of the answers."""

from typing import Literal

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.one_shot import Projector
from localllm.cli.parameters import option, option_group
from localllm.cli.prompt_input import Encoding
from localllm.errors import UsageError


@option_group("Records and prompts")
class MapPromptFlags:
    """Options of `map` that make a prompt of each record."""

    prompt: str | None = option(
        "-p --prompt",
        'Make prompts from a template: {text} is the field "text", {line} a plain-text record; or Jinja: {{ text }}.',
        "TEXT",
    )
    file: str | None = option("-f --file", "Read the prompt template from FILE; see -p.", "FILE")
    system: shared.System = None
    system_file: shared.SystemFile = None
    chat_template: shared.ChatTemplate = None
    raw: bool = option("--raw", "Continue the prompts as plain text, without the chat template.")
    encoding: Encoding = None
    mmproj: Projector = None


@option_group("Answers and output")
class MapOutputFlags:
    """Options of `map`: how records are answered, and where the answers are written."""

    output: str | None = option(
        "-o --output",
        "Write the answers to this file: JSONL, or a table if named .csv, .tsv, .parquet or .xlsx; records that it "
        "already answers are skipped.",
        "FILE",
    )
    redo: bool = option("--redo", "Answer all records again, and replace the answers in OUTPUT.")
    redo_errors: bool = option(
        "--redo-errors",
        "Retry the records that failed, also with another model, prompt or set of options, and keep the other answers.",
    )
    n: int = option(
        "--n",
        "Sample N answers for each record, most likely first; -n is the length in tokens.  [default: 1]",
        "N",
        default=1,
    )
    choices_given: Choices = None
    as_finished: bool = option("--as-finished", "Write answers as they finish, not in input order.")
    shortest_first: bool = option("--shortest-first", "Answer short prompts first.")
    fast: bool = option("--fast", "Prefill faster, with 8-bit activations; answers may differ from those of `run`.")
    stats: bool = option("--stats", "Print counts, time and speed to stderr.")
    ray: str | None = option(
        "--ray", "Run on the Ray cluster at ADDRESS; without ADDRESS, start one on this computer.", "[ADDRESS]"
    )

    def validate_combination(self) -> None:
        """Raise UsageError for options that cannot be combined."""
        if (self.redo or self.redo_errors) and self.output is None:
            option = "--redo" if self.redo else "--redo-errors"
            raise UsageError(f"{option} applies to the answers in the output file: add -o FILE")


@option_group("Tables and output formats")
class TableFlags:
    """Options of `map` for tables and output formats."""

    as_csv: bool = option("--csv", "Read INPUT as CSV, whatever its name; without -o, also write CSV.")
    format: Literal["jsonl", "csv", "tsv", "text"] | None = option(
        "--format",
        "Without -o, write this format: jsonl, csv, tsv, or text (answers only).  [default: jsonl]",
        "FORMAT",
    )
    json_as_text: bool = option("--json-as-text", 'With --json-schema, write "output" as a string, not as JSON.')

    @property
    def stdout_format(self) -> str:
        return self.format or ("csv" if self.as_csv else "jsonl")
