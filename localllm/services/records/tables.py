"""Read tables as records, and write tables with answers as new columns: CSV, TSV, Parquet and Excel.

pyarrow reads and writes Parquet, openpyxl Excel; both are optional and imported when needed.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from localllm.errors import UsageError
from localllm.files.jsonl_file import JsonlFile
from localllm.files.safe_file import SafeFile, resolve_target
from localllm.frozen import frozen
from localllm.services.records.lines import Record

KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".parquet": "parquet", ".xlsx": "xlsx"}
DELIMITERS = ",;\t|"  # of CSV; the header's most frequent one is used
OUTPUT, ERROR, PROBABILITY = "output", "error", "probability"
Row = dict[str, object]


@frozen
class Table:
    """The rows of a table.

    Attributes:
        kind: one of the values of KINDS.  columns: their names.  delimiter: delimiter of CSV and TSV.
        records: one for each row; the id is the row number, from 1.  rows: the same, with the file's own types.
    """

    kind: str
    columns: Sequence[str]
    records: Sequence[Record]
    rows: Sequence[Row]
    delimiter: str = ","


def detect_table_type(name: str | None) -> str:
    """Return a table's file type by its file name, "" for other files."""
    return KINDS.get(os.path.splitext(name or "")[1].lower(), "")


def read_table(data: bytes, text: str, kind: str, name: str) -> Table:
    """Read a table. Raises UsageError.

    data: the file's content.  text: the decoded content, for CSV and TSV.  name: name of the file, for errors.
    """
    if kind in ("csv", "tsv"):
        return read_text_table(text, kind, name)
    columns, rows = (read_parquet if kind == "parquet" else read_excel)(data, name)
    require_columns(columns, name)
    records = [
        Record(number, {key: to_json_value(value) for key, value in row.items() if value is not None})
        for number, row in enumerate(rows, 1)
    ]
    return Table(kind, columns, records, rows)


def read_text_table(text: str, kind: str, name: str) -> Table:
    """Read CSV (RFC 4180) or TSV with a header. Raises UsageError."""
    first = text.split("\n", 1)[0]
    delimiter = "\t" if kind == "tsv" else max(DELIMITERS, key=first.count)
    csv.field_size_limit(1 << 30)
    try:
        header, *lines = [row for row in csv.reader(io.StringIO(text, ""), delimiter=delimiter) if row] or [[]]
    except csv.Error as error:
        raise UsageError(f"{name}: not a valid table: {error}") from None
    columns = [each.strip() for each in header]
    require_columns(columns, name)
    records, rows = list[Record](), list[Row]()
    for number, cells in enumerate(lines, 1):
        problem = (
            f"row {number} has {len(cells)} cells, but the header has {len(columns)}"
            if len(cells) > len(columns)
            else ""
        )
        rows.append(dict(zip(columns, [*cells, *[""] * len(columns)], strict=False)))
        records.append(Record(number, rows[-1], problem))
    return Table(kind, columns, records, rows, delimiter)


def require_columns(columns: Sequence[str], name: str) -> None:
    """Raise UsageError unless there are columns, and their names differ."""
    if not columns:
        raise UsageError(f"{name}: the table is empty: its first row must name the columns")
    if not all(columns):
        raise UsageError(f"{name}: column {[*columns].index('') + 1} of the header has no name")
    if double := [each for each in columns if [*columns].count(each) > 1]:
        raise UsageError(f"{name}: two columns are named {double[0]!r}")


def import_extra(module: str, feature: str) -> ModuleType:
    """Import a library of the extra "tables", which `feature` needs. Raises UsageError if it is missing."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise UsageError(f"{feature} needs {library}, which is not installed: pip install 'localllm[tables]'") from None


def read_parquet(data: bytes, name: str) -> tuple[list[str], list[Row]]:
    arrow, parquet = import_extra("pyarrow", "Parquet"), import_extra("pyarrow.parquet", "Parquet")
    try:
        table = parquet.read_table(arrow.BufferReader(data))
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{name}: not a Parquet file: {' '.join(str(error).split())[:200]}") from None
    return table.column_names, table.to_pylist()


def read_excel(data: bytes, name: str) -> tuple[list[str], list[Row]]:
    """Read the first sheet of an Excel file. Raises UsageError."""
    excel = import_extra("openpyxl", "Excel")
    try:
        book = excel.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        lines = [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
    except Exception as error:  # zipfile, XML parsers and openpyxl itself fail in many ways
        raise UsageError(f"{name}: not an Excel file: {' '.join(str(error).split())[:200]}") from None
    lines = [line for line in lines if any(value is not None for value in line)]
    columns = [str(each).strip() for each in lines[0] if each is not None] if lines else []
    return columns, [dict(zip(columns, line, strict=False)) for line in lines[1:]]


def to_json_value(value: object) -> object:
    """Convert a value to JSON; dates and other types become strings, NaN null."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    if isinstance(value, float) and value != value:
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# ---- output


def plan_answer_columns(
    results: Iterable[Row], properties: Sequence[str], used_names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the new columns, each with the path of its values in a result.

    properties: properties of the answers' schema, in order; without any, the keys of answers that are objects are used.
    used_names: names of other columns.
    """
    keys = dict.fromkeys(properties)
    has_text = probable = failed = False
    for result in results:
        if ERROR in result:
            failed = True
        elif isinstance(output := result[OUTPUT], dict):
            keys |= dict.fromkeys(output)
        else:
            has_text = True
        probable = probable or "probabilities" in result
    paths: dict[str, tuple[str, ...]] = {name: (OUTPUT, name) for name in keys}
    paths |= {OUTPUT: (OUTPUT,)} if has_text or not keys else {}
    paths |= {PROBABILITY: ("probabilities",)} if probable else {}
    paths |= {ERROR: (ERROR,)} if failed else {}
    return {make_unique_name(name, {*used_names}): path for name, path in paths.items()}


def make_unique_name(name: str, used_names: set[str]) -> str:
    """Return the column's name, prefixed until no other column has it."""
    while name in used_names:
        name = f"answer_{name}"
    return name


def get_value(result: Row, path: tuple[str, ...]) -> object:
    """Return a result's value at a path, or None; for probabilities, that of the output."""
    if path == ("probabilities",):
        path = "probabilities", str(result.get(OUTPUT))
    value: object = result
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def join_rows(
    records: Sequence[Record],
    rows: Sequence[Row],
    results: Mapping[object, Row],
    properties: Sequence[str],
    named: Sequence[str] = (),
) -> tuple[list[str], Iterator[Row]]:
    """Join a table with its answers; return the columns, and the rows of records that have a result.

    named: the table's columns, which remain even without rows.
    """
    columns = dict.fromkeys([*named, *(key for row in rows for key in row)])
    new = plan_answer_columns((results[each.id] for each in records if each.id in results), properties, [*columns])

    def iter_joined() -> Iterator[Row]:
        for record, row in zip(records, rows, strict=True):
            if (result := results.get(record.id)) is not None:
                yield {**row, **{name: get_value(result, path) for name, path in new.items()}}

    return [*columns, *new], iter_joined()


def to_rows(records: Sequence[Record]) -> list[Row]:
    """Convert records to rows; plain lines get the column "line"."""
    return [record.input if isinstance(record.input, dict) else {"line": record.input} for record in records]


def to_csv_cell(value: object) -> object:
    """Convert a value to a CSV cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def iter_csv_lines(columns: Sequence[str], rows: Iterable[Row], delimiter: str, header: bool = True) -> Iterator[str]:
    """Yield the lines of CSV including line breaks, quoted as in RFC 4180."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator="\n")
    for line in [columns] if header else []:
        writer.writerow(line)
        yield buffer.getvalue()
    for row in rows:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow([to_csv_cell(row.get(column)) for column in columns])
        yield buffer.getvalue()


def encode_table(kind: str, columns: Sequence[str], rows: Iterable[Row], delimiter: str = ",") -> bytes:
    """Encode a table in the given file type. Raises UsageError if a library is missing."""
    if kind in ("csv", "tsv"):
        return "".join(iter_csv_lines(columns, rows, "\t" if kind == "tsv" else delimiter)).encode(errors="replace")
    file = io.BytesIO()
    if kind == "xlsx":
        book = import_extra("openpyxl", "Excel").Workbook(write_only=True)
        sheet = book.create_sheet()
        sheet.append([*columns])
        for row in rows:
            sheet.append([to_excel_cell(row.get(column)) for column in columns])
        book.save(file)
        return file.getvalue()
    arrow, parquet = import_extra("pyarrow", "Parquet"), import_extra("pyarrow.parquet", "Parquet")
    all_rows = [*rows]
    parquet.write_table(
        arrow.table({name: to_arrow_column(arrow, [row.get(name) for row in all_rows]) for name in columns}), file
    )
    return file.getvalue()


def to_excel_cell(value: object) -> object:
    """Convert a value to an Excel cell; drop control characters, which Excel files cannot have."""
    value = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
    if isinstance(value, str):
        return "".join(each for each in value if each >= " " or each in "\t\n\r")
    return value


def to_arrow_column(arrow: ModuleType, values: list[object]) -> object:
    """Create an Arrow array of values, as strings if they have several types; arrow: the module pyarrow."""
    try:
        return arrow.array(values)
    except arrow.ArrowException:
        return arrow.array([None if value is None else str(to_csv_cell(value)) for value in values])


def get_answers_path(output: str) -> str:
    """Return the path of the hidden JSON Lines file next to a table that collects its answers."""
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.jsonl")


def require_writable_table(output: str, inputs: tuple[str, ...], redo: bool) -> None:
    """Raise UsageError for a table that cannot be written, or was not written by an earlier run.

    redo: allow replacing any table.
    """
    kind, target = detect_table_type(output), resolve_target(output, inputs)
    if kind in ("parquet", "xlsx"):
        import_extra(*(("pyarrow", "Parquet") if kind == "parquet" else ("openpyxl", "Excel")))
    is_own = os.path.exists(get_answers_path(output))
    if os.path.exists(target) and os.path.getsize(target) and not (is_own or redo):
        raise UsageError(
            f"{output} exists and was not written by an earlier run: replace it with --redo, or use another output file"
        )


@contextmanager
def write_table_at_end(
    output: str, file: JsonlFile, table: Table | None, records: Sequence[Record], properties: Sequence[str]
) -> Iterator[None]:
    """Write the table from the answers in `file` when the block ends, even by an exception.

    table: the input; None for records that are not from a table.  properties: properties of the answers' schema. Raises
    LocalllmError.
    """
    try:
        yield
    finally:
        kind = detect_table_type(output)
        rows = to_rows(records) if table is None else table.rows
        with open(file.path, "rb") as source:
            results: dict[object, Row] = {each["id"]: each for each in file.parse_lines(source.read())}
        named = () if table is None else table.columns
        columns, joined = join_rows(records, rows, results, properties, named)
        delimiter = table.delimiter if table and table.kind == kind == "csv" else ","
        with SafeFile(output) as target:
            target.write(encode_table(kind, columns, joined, delimiter))
