"""Writes a table as the output of map: answers go to a JSON Lines file first, and to the table at the end."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localllm.errors import UsageError
from localllm.files.jsonl_file import JsonlFile
from localllm.files.safe_file import SafeFile, resolve_target
from localllm.services.records import Record
from localllm.services.tables import Row, Table, encode_table, extra, join_rows, kind_of, rows_of


def answers_path(output: str) -> str:
    """Return the path of the hidden JSON Lines file next to a table that collects its answers."""
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.jsonl")


def require_table(output: str, inputs: tuple[str, ...], redo: bool) -> None:
    """Raise UsageError for a table that cannot be written, or that no earlier run wrote; redo: replace it."""
    kind, target = kind_of(output), resolve_target(output, inputs)
    if kind in ("parquet", "xlsx"):
        extra(*(("pyarrow", "Parquet") if kind == "parquet" else ("openpyxl", "Excel")))
    is_own = os.path.exists(answers_path(output))
    if os.path.exists(target) and os.path.getsize(target) and not (is_own or redo):
        raise UsageError(
            f"{output} exists and was not written by an earlier run: --redo replaces it, or use another output file"
        )


@contextmanager
def table_writer(
    output: str, file: JsonlFile, table: Table | None, records: Sequence[Record], properties: Sequence[str]
) -> Iterator[None]:
    """Write the table when the block ends, also by an exception, from the answers in `file`.

    table: the input, None for records that are not from a table.  properties: properties of the answers' schema. Raises
    LocalllmError.
    """
    try:
        yield
    finally:
        kind = kind_of(output)
        rows = rows_of(records) if table is None else table.rows
        with open(file.path, "rb") as source:
            results: dict[object, Row] = {each["id"]: each for each in file.parse_lines(source.read())}
        named = () if table is None else table.columns
        columns, joined = join_rows(records, rows, results, properties, named)
        delimiter = table.delimiter if table and table.kind == kind == "csv" else ","
        with SafeFile(output) as target:
            target.write(encode_table(kind, columns, joined, delimiter))
