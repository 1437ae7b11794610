"""The options of map for tables, and for what stdout gets."""

from typing import Annotated, Literal

import typer

from localllm.cli.parameters import group


@group
class TableGroup:
    """Tables and output formats."""

    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="INPUT is CSV, whatever its name is; without -o the output is CSV, too."),
    ] = False
    format: Annotated[
        Literal["jsonl", "csv", "tsv", "text"] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Output format without -o: jsonl, csv, tsv, or text (answers only).  [default: jsonl]",
        ),
    ] = None
    json_as_text: Annotated[
        bool,
        typer.Option("--json-as-text", help='With --json-schema, write "output" as a string, not as JSON.'),
    ] = False

    @property
    def format_of_stdout(self) -> str:
        return self.format or ("csv" if self.as_csv else "jsonl")
