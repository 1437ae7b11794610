"""The options of map that say what is asked of each record, and where the answers go."""

from typing import Annotated

import typer

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.images import Projector
from localllm.cli.parameters import group
from localllm.cli.prompt_input import Encoding
from localllm.errors import UsageError


@group
class RecordsGroup:
    """Records and prompts."""

    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help='Prompt template: {text} is the field "text", {line} a plain-text record; or Jinja: {{ text }}.',
        ),
    ] = None
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="File with the prompt template; see -p.")
    ] = None
    system: shared.System = None
    system_file: shared.SystemFile = None
    chat_template: shared.ChatTemplate = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as plain text, without the chat template.")
    ] = False
    encoding: Encoding = None
    mmproj: Projector = None


@group
class AnswersGroup:
    """Answers and output."""

    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file: JSONL, or a table if named .csv, .tsv, .parquet or .xlsx; records that it already "
            "answers are skipped.",
        ),
    ] = None
    redo: Annotated[
        bool,
        typer.Option(
            "--redo", help="Answer again the records that OUTPUT already answers, and replace the old answers."
        ),
    ] = False
    redo_errors: Annotated[
        bool,
        typer.Option(
            "--redo-errors",
            help="Retry the records that failed, also with another model, prompt or set of options, "
            "and keep the other answers.",
        ),
    ] = False
    n: Annotated[
        int,
        typer.Option(
            "--n",
            metavar="N",
            help="Sample N answers for each record, most likely first; -n is the length in tokens.  [default: 1]",
        ),
    ] = 1
    choices_given: Choices = None
    as_finished: Annotated[
        bool, typer.Option("--as-finished", help="Write answers as they finish, not in input order.")
    ] = False
    shortest_first: Annotated[bool, typer.Option("--shortest-first", help="Answer short prompts first.")] = False
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Faster prefill with 8-bit activations; answers may differ from those of `run`."),
    ] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print counts, time and speed to stderr.")] = False
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="[ADDRESS]", help="Run on the Ray cluster at ADDRESS; without ADDRESS, start one here."
        ),
    ] = None

    def validate_combination(self) -> None:
        """Raise UsageError for options that do not go together."""
        if (self.redo or self.redo_errors) and self.output is None:
            option = "--redo" if self.redo else "--redo-errors"
            raise UsageError(f"{option} is about the answers in the output file: give -o FILE")
