"""Test localllm map with tables in and out, JSON answers, and endless pipes."""

import builtins
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from localllm import builtin_model
from localllm.errors import UsageError
from localllm.files.text_file import decode_with_replacement
from localllm.services.records import tables
from localllm.services.records.lines import PromptBuilder, Record
from localllm.services.records.stream import RecordStream
from localllm.services.records.tables import encode_table, read_table

GUIDE = builtin_model()
SHORT = "--temp", 0, "-n", 5
ROWS = 'Item name,qty,note\n"bread, white",2,"two\nlines"\nmilk,3,\n'
SCHEMA = json.dumps({
    "type": "object", "required": ["colour", "n", "tags"],
    "properties": {
        "colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
})  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "in.csv").write_text(ROWS)
    return tmp_path / "in.csv"


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_columns_are_fields_and_answers_a_new_column(cli, table: Path):
    out = table.with_name("out.csv")
    code, stdout, err = cli("map", GUIDE, table, "-p", "What is {Item name}?", *SHORT, "-o", out)
    assert (code, stdout, err) == (0, "", "")
    rows_out = rows(out.read_text())
    assert [{**row, "output": ""} for row in rows_out] == [{**row, "output": ""} for row in rows(ROWS)]
    for row in rows_out:
        asked = f"What is {row['Item name']}?".encode()
        assert row["output"] == json.loads(cli("map", GUIDE, *SHORT, stdin=asked)[1])["output"]


def test_each_property_of_a_schema_is_a_column(cli, table: Path):
    out = table.with_name("out.csv")
    assert cli("map", GUIDE, table, "-p", "{qty}", "-j", SCHEMA, "--temp", 0, "-o", out)[0] == 0
    rows_out = rows(out.read_text())
    assert [*rows_out[0]] == ["Item name", "qty", "note", "colour", "n", "tags"]
    assert all(row["colour"] in ("red", "blue") and 1 <= int(row["n"]) <= 9 for row in rows_out)
    assert all(isinstance(json.loads(row["tags"]), list) for row in rows_out)


def test_a_table_is_resumed_and_redone(cli, table: Path):
    out = table.with_name("out.csv")
    command = ("map", GUIDE, table, "-p", "{qty}", *SHORT, "-o", out)
    assert cli(*command)[0] == 0
    whole = out.read_text()
    lines = out.with_name(".out.csv.jsonl").read_text().splitlines(keepends=True)
    out.with_name(".out.csv.jsonl").write_text(lines[0])
    out.unlink()
    code, _, err = cli(*command)
    assert (code, err) == (0, f"localllm: {out} already answers 1 of 2 records\n") and out.read_text() == whole
    code, _, err = cli("map", GUIDE, table, "-p", "Now {qty}", *SHORT, "-o", out)
    assert code == 2 and "another prompt" in err and out.read_text() == whole
    assert cli("map", GUIDE, table, "-p", "Now {qty}", *SHORT, "-o", out, "--redo")[0] == 0


def test_another_table_is_not_overwritten(cli, table: Path):
    out = table.with_name("out.csv")
    out.write_text("mine\n")
    code, _, err = cli("map", GUIDE, table, "-p", "{qty}", *SHORT, "-o", out)
    assert code == 2 and f"{out} exists and was not written by an earlier run: replace it with --redo" in err
    assert out.read_text() == "mine\n"
    code, _, err = cli("map", GUIDE, table, "-p", "{qty}", *SHORT, "-o", table)
    assert code == 2 and "the output is also an input" in err and table.read_text() == ROWS


def test_failing_rows_have_an_error(cli, table: Path):
    table.write_text("a,b\n1,2\n1,2,3\n")
    out = table.with_name("out.csv")
    code, _, err = cli("map", GUIDE, table, "-p", "{a}", *SHORT, "-o", out)
    assert code == 6 and "1 of 2 records failed" in err
    assert [row["error"] for row in rows(out.read_text())] == ["", "row 2 has 3 cells, but the header has 2"]


def test_choices_have_a_probability_column(cli, table: Path):
    out = table.with_name("out.tsv")
    assert cli("map", GUIDE, table, "-p", "{qty}", "--choices", "yes,no", "-o", out)[0] == 0
    header, *lines = csv.reader(io.StringIO(out.read_text()), delimiter="\t")
    assert header[-2:] == ["output", "probability"]
    assert all(line[-2] in ("yes", "no") and 0.5 <= float(line[-1]) <= 1 for line in lines)


def test_csv_is_read_from_and_written_to_pipes(cli, table: Path):
    code, out, _ = cli("map", GUIDE, "--csv", "-p", "{qty}", *SHORT, stdin=ROWS.replace(",", ";").encode())
    assert (
        code == 0
        and out.startswith("Item name;qty;note;output\n")
        and len(list(csv.reader(io.StringIO(out), delimiter=";"))) == 3
    )
    code, out, _ = cli("map", GUIDE, table, "-p", "{qty}", *SHORT, "--format", "csv")
    assert code == 0 and [row["qty"] for row in rows(out)] == ["2", "3"]
    code, out, _ = cli("map", GUIDE, table, "-p", "{qty}", *SHORT)
    assert code == 0 and json.loads(out.splitlines()[0])["input"]["Item name"] == "bread, white"


def test_lines_can_be_written_as_a_table(cli, tmp_path: Path):
    (tmp_path / "a.txt").write_text("Hi\nHo\n")
    assert cli("map", GUIDE, tmp_path / "a.txt", *SHORT, "-o", tmp_path / "a.csv")[0] == 0
    assert [row["line"] for row in rows((tmp_path / "a.csv").read_text())] == ["Hi", "Ho"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "the table is empty"), ("a,,c\n", "column 2 of the header has no name"), ("a,a\n", "two columns are named")],
)
def test_a_table_needs_unique_column_names(text: str, problem: str):
    with pytest.raises(UsageError, match=problem):
        read_table(text.encode(), text, "csv", "in.csv")


def test_a_prompt_must_name_existing_columns(cli, refused, table: Path):
    code, _, err = cli("map", GUIDE, table, "-p", "What?")
    assert code == 2 and "the prompt must name a column: {Item name}, {qty}, {note}" in err
    refused(
        ["map", GUIDE, table, "-p", "{qty} of {titel}"],
        "unknown column {titel}: the columns are {Item name}, {qty}, {note}",
    )
    code, _, err = cli("map", GUIDE, table)
    assert code == 2 and "-p TEXT is missing: the columns are {Item name}" in err
    ask = PromptBuilder('{Item name} as {"json": 1} and { x }', raw=True, columns=["Item name"])
    assert ask(Record(1, {"Item name": "milk"})) == 'milk as {"json": 1} and { x }'


def test_a_table_without_rows_keeps_its_columns(cli, table: Path):
    table.write_text("a,b\n")
    out = table.with_name("out.csv")
    assert cli("map", GUIDE, table, "-p", "{a}", "-o", out) == (0, "", "")
    assert out.read_text() == "a,b,output\n"


def test_a_field_missing_in_plain_lines_is_refused_at_once(cli, tmp_path: Path):
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    code, out, err = cli("map", GUIDE, tmp_path / "lines.txt", "-p", "Title: {text}")
    assert (code, out) == (
        2,
        "",
    ) and "unknown field {text}: the input has plain lines, whose only field is {line}" in err


def test_answer_columns_do_not_replace_input_columns(cli, table: Path):
    table.write_text("output,colour\n1,2\n")
    out = table.with_name("out.csv")
    assert cli("map", GUIDE, table, "-p", "{output}", "-j", SCHEMA, "--temp", 0, "-o", out)[0] == 0
    assert [*rows(out.read_text())[0]] == ["output", "colour", "answer_colour", "n", "tags"]


@pytest.mark.parametrize("kind", ["xlsx", "parquet"])
def test_xlsx_and_parquet_are_read_and_written(cli, tmp_path: Path, kind: str):
    pytest.importorskip("openpyxl" if kind == "xlsx" else "pyarrow")
    source, out = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    rows_in = [{"name": "milk", "n": 3, "x": 0.5}, {"name": "bread", "n": 2, "x": None}]
    source.write_bytes(encode_table(kind, ["name", "n", "x"], rows_in))
    assert cli("map", GUIDE, source, "-p", "What is {name}, {n}?", *SHORT, "-o", out)[0] == 0
    table_out = read_table(out.read_bytes(), "", kind, "out")
    assert table_out.columns == ["name", "n", "x", "output"]
    assert [{**row, "output": ""} for row in table_out.rows] == [{**row, "output": ""} for row in rows_in]
    assert all(isinstance(row["output"], str) and row["output"] for row in table_out.rows)
    source.write_bytes(b"no table")
    code, _, err = cli("map", GUIDE, source, "-p", "{name}", "-o", out)
    assert code == 2 and f"in.{kind}: not a" in err and err.count("\n") == 1


@pytest.mark.parametrize(("kind", "library"), [("parquet", "pyarrow"), ("xlsx", "openpyxl")])
def test_a_missing_library_is_reported_before_the_first_answer(cli, table: Path, monkeypatch, kind: str, library: str):
    real = builtins.__import__

    def missing(name: str, *more: object):
        if name.partition(".")[0] == library:
            raise ImportError
        return real(name, *more)

    monkeypatch.setattr(tables, "import_module", missing)
    code, _, err = cli("map", GUIDE, table, "-p", "{qty}", "-o", table.with_name(f"out.{kind}"))
    assert code == 2 and f"needs {library}, which is not installed: pip install 'localllm[tables]'" in err


# ---- answers by a schema


def test_answers_by_a_schema_are_json(cli):
    asked = ("map", GUIDE, "-j", SCHEMA, "--temp", 0)
    output = json.loads(cli(*asked, stdin=b"Hi")[1])["output"]
    assert isinstance(output, dict) and [*output] == ["colour", "n", "tags"]
    text = json.loads(cli(*asked, "--json-as-text", stdin=b"Hi")[1])["output"]
    assert isinstance(text, str) and json.loads(text) == output
    outputs = json.loads(cli(*asked[:-2], "--n", 2, stdin=b"Hi")[1])["output"]
    assert [type(each) for each in outputs] == [dict, dict]
    assert json.loads(cli("map", GUIDE, "--regex", "[0-9]", stdin=b"Hi")[1])["output"].isdecimal()


def test_text_format_prints_answers_only(cli):
    assert cli("map", GUIDE, "--grammar", 'root ::= "yes"', "--format", "text", stdin=b"Hi\nHo\n")[1] == "yes\nyes\n"
    out = cli("map", GUIDE, "-j", SCHEMA, "--temp", 0, "--format", "text", stdin=b"Hi\n")[1]
    assert [*json.loads(out)] == ["colour", "n", "tags"]


# ---- pipes


def test_lines_of_a_pipe_are_answered_as_they_arrive():
    """Write the second line only after the first answer."""
    command = [sys.executable, "-m", "localllm", "map", str(GUIDE), *map(str, SHORT), "--format", "text"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin and process.stdout
        for line in (b"What is a GGUF file?\n", b"\n", b"Which commands are there?\n"):
            process.stdin.write(line)
            process.stdin.flush()
            if line.strip():
                assert process.stdout.readline().strip()
        process.stdin.close()
        assert process.stdout.read() == b"" and process.wait(timeout=60) == 0


def test_invalid_lines_of_a_pipe_fail_alone(cli):
    code, out, err = cli("map", GUIDE, *SHORT, stdin=b'{"id": 1, "prompt": "Hi"}\n{"id": 1, "prompt": "Hi"}\nx\n')
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 6 and "2 of 3 records failed" in err
    assert results[0]["output"] and results[1]["error"] == "line 2: the id 1 was already used in line 1"
    assert results[2]["error"].startswith("line 3 is not JSON")


def test_a_stream_blocks_only_without_work():
    reading, writing = os.pipe()
    stream = RecordStream(os.fdopen(reading, "rb"))
    os.write(writing, b"a\n")
    assert next(stream).input == "a"
    stream.may_wait = lambda: False
    assert next(stream, None) is None and stream.is_open
    os.write(writing, b"b")
    os.close(writing)
    stream.may_wait = lambda: True
    assert next(stream).input == "b" and next(stream, None) is None and not stream.is_open
    assert [record.id for record in stream.pending] == [1, 2]


def test_a_pipe_resumes_its_output(cli, tmp_path: Path):
    """Skip lines that the output already answers, also those of a file."""
    out, lines = tmp_path / "out.jsonl", b"one\ntwo\n"
    command = ("map", GUIDE, "-p", "{line}", *SHORT, "-o", out)
    assert cli(*command, stdin=lines) == (0, "", "")
    assert cli(*command, stdin=lines + b"three\n") == (0, "", f"localllm: {out} already has 2 answers\n")
    before = out.read_bytes()
    assert [each["input"] for each in map(json.loads, before.splitlines())] == ["one", "two", "three"]
    code, _, err = cli(*command, stdin=b"one\n2\n")
    assert code == 2 and f"{out}: record 2 was answered for another input" in err and out.read_bytes() == before
    assert "another prompt" in cli(*command, "-sys", "Hi", stdin=lines)[2]
    (tmp_path / "in.txt").write_bytes(lines + b"three\nfour\n")
    code, _, err = cli("map", GUIDE, tmp_path / "in.txt", *command[2:])
    assert (code, err) == (0, f"localllm: {out} already answers 3 of 4 records\n")
    assert cli(*command, "--redo", stdin=b"else\n")[0] == 0 and len(out.read_bytes().splitlines()) == 1


def test_a_stream_reports_invalid_utf_8_with_its_position():
    """Count from the beginning of stdin as in a file, with byte order mark and empty lines."""
    data = b"\xef\xbb\xbf\xc3\xbc\r\n\n f\xfcr\n\xff\xfex\xe9"
    stream = RecordStream(io.BytesIO(data))
    assert next(stream).input == "ü" and stream.warning == ""
    assert [record.input for record in stream] == [" f\ufffdr", "\ufffd\ufffdx\ufffd"]
    assert stream.warning == "stdin: not UTF-8 at byte 10 (0xfc); replaced 4 bytes in all"
    assert stream.warning == decode_with_replacement(data, "stdin")[1]
    binary = RecordStream(io.BytesIO(b"a\n\xe9\0\n"))
    assert next(binary).input == "a"
    with pytest.raises(UsageError, match=r"^stdin: not UTF-8 at byte 2 \(0xe9\)$"):
        next(binary)
