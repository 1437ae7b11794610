"""A table as the output of map: answers are written to a JSON Lines file next to it, and then to the table."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.errors import UsageError
from localllm.files.jsonl_file import JsonlFile
from localllm.files.safe_file import SafeFile, resolve_target
from localllm.services.records import Record
from localllm.services.tables import Table, encode_table, extra, join_rows, kind_of, rows_of


def work_path(output: str) -> str:
    """Return the hidden file next to a table that has its answers so far."""
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.jsonl")


def require_table(output: str, inputs: tuple[str, ...], redo: bool) -> None:
    """Raise UsageError for a table that cannot be written, or exists and was not written by an earlier run."""
    kind, target = kind_of(output), resolve_target(output, inputs)
    if kind in ("parquet", "xlsx"):
        extra(*(("pyarrow", "Parquet") if kind == "parquet" else ("openpyxl", "Excel")))
    is_own = os.path.exists(work_path(output))
    if os.path.exists(target) and os.path.getsize(target) and not (is_own or redo):
        raise UsageError(
            f"{output} exists and is not of an earlier run: --redo replaces it, or use another output file"
        )


@contextmanager
def table_writer(
    output: str, file: JsonlFile, table: Table | None, records: Sequence[Record], properties: Sequence[str]
) -> Iterator[None]:
    """Write the table when the block ends, however it does, from the answers that its file then has.

    table: the input, None for records that are no rows.  properties: of the answers' schema. Raises LocalllmError.
    """
    try:
        yield
    finally:
        kind = kind_of(output)
        rows = rows_of(records) if table is None else table.rows
        with open(file.path, "rb") as source:
            results: dict[Any, Any] = {each["id"]: each for each in file.parse_lines(source.read())}
        named = () if table is None else table.columns
        columns, joined = join_rows(records, rows, results, properties, named)
        delimiter = table.delimiter if table and table.kind == kind == "csv" else ","
        with SafeFile(output) as made:
            made.write(encode_table(kind, columns, joined, delimiter))
