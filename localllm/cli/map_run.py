"""Run a job of `localllm map` or `eval`: records, provenance, answers, progress, Ctrl-C."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, NamedTuple

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.prompt_input import decode_file, warn_missing_template
from localllm.cli.terminal.output import ProgressLine, is_terminal, open_stdin, say, say_dim, write
from localllm.cli.terminal.render import count_noun, format_duration
from localllm.errors import RecordsError, UsageError
from localllm.files.jsonl_file import JsonlFile, encode_line
from localllm.services.records import tables
from localllm.services.records.lines import Record, read_records
from localllm.services.records.map import MapJob, make_result_filter, select_unfinished
from localllm.services.records.stream import RecordStream

if TYPE_CHECKING:
    from localllm.cli.options.shared import AnswerGroup, EngineGroup
    from localllm.services.evaluation.likelihood import QuestionMapping
    from localllm.services.records.lines import Record
    from localllm.services.records.map import ChoiceMapping, MapJob, RecordMapping, Result
    from localllm.services.records.map_ray import RayMapping
    from localllm.services.records.stream import RecordStream
    from localllm.services.remote.mapping import RemoteMapping
    from localllm.services.remote.model import RemoteModel

    AnyMapping = RecordMapping | ChoiceMapping | QuestionMapping | RayMapping | RemoteMapping


# ---- input


class RecordsInput(NamedTuple):
    """The input.

    Attributes:
        records: all of them, or a stream.  table: the table whose rows they are; None for lines.
        data, name: the file's content and name, "" for stdin.
    """

    records: "list[Record] | RecordStream"
    table: tables.Table | None = None
    data: bytes = b""
    name: str = ""

    @property
    def size(self) -> int:
        return self.records.count if isinstance(self.records, RecordStream) else len(self.records)


def read_input(
    input: str | None, encoding: str | None, as_csv: bool, streams: bool, output: str | None = None
) -> RecordsInput:
    """Read the records of a file, a folder or stdin. Raises UsageError.

    streams: whether stdin may be read while records are answered.  output: a file that may be in the folder, and is not
    a
    record.
    """
    if input is not None and os.path.isdir(input):
        return read_folder(input, output)
    kind = tables.detect_table_type(input) or ("csv" if as_csv else "")
    if streams and not kind and input in (None, "-"):
        require_stdin(input)
        return RecordsInput(RecordStream(duplicate_stdin()))
    data, name = read_named_input(input)
    if kind in ("parquet", "xlsx"):
        table = tables.read_table(data, "", kind, name)
        return RecordsInput([*table.records], table, data, name)
    text = decode_file(data, name or "stdin", encoding, whole=True)
    if kind:
        table = tables.read_table(data, text.removeprefix("\ufeff"), kind, name or "stdin")
        return RecordsInput([*table.records], table, data, name)
    data = text.encode()
    return RecordsInput(read_records(data, name), None, data, name)


def read_folder(folder: str, output: str | None) -> RecordsInput:
    """Return the text files of a folder as records with the fields "file" and "text". Raises UsageError."""
    from localllm.services.search.files import FileFilter, iter_text_files, read_text

    output_path = output and os.path.realpath(output)
    paths = [path for path in iter_text_files([folder], FileFilter()) if os.path.realpath(path) != output_path]
    texts = [(path, text) for path in paths if (text := read_text(path)) is not None]
    if not texts:
        raise UsageError(f"{folder}: the folder contains no text files")
    records = [Record(path, {"file": path, "text": text}) for path, text in texts]
    return RecordsInput(records, None, json.dumps(texts).encode(), folder)


def duplicate_stdin() -> IO[bytes]:
    """Return a duplicate of stdin, which, unlike sys.stdin, a thread may still read when the program ends."""
    source = open_stdin()
    try:
        return os.fdopen(os.dup(source.fileno()), "rb")
    except (OSError, io.UnsupportedOperation):
        return source


def read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def read_named_input(path: str | None) -> tuple[bytes, str]:
    """Read the input; return it with its name, "" for stdin. Raises UsageError without input."""
    if path not in (None, "-"):
        assert path is not None
        return read_file(path), path
    require_stdin(path)
    return open_stdin().read(), ""


def require_stdin(path: str | None) -> None:
    """Raise UsageError if stdin has no records."""
    if sys.stdin is None or (path is None and is_terminal(sys.stdin)):
        raise UsageError("INPUT is missing: give a file, or pipe records to stdin")


# ---- output


def list_properties(choices: "AnswerGroup") -> list[str]:
    """Return the names of the properties in --json-schema, in order. Raises UsageError."""
    schema = choices.shape.create_output_format().schema
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return [*properties] if isinstance(properties, dict) else []


class ResultWriter:
    """Writes each result as a line."""

    def __init__(self, out: JsonlFile | None, format: str, table: tables.Table | None, properties: Sequence[str]):
        """Write results in this format to `out`, None for stdout.

        table, properties: see tables.write_table_at_end.
        """
        self._out, self._format, self._table, self._properties = out, format, table, properties
        self._columns: dict[str, tuple[str, ...]] | None = None

    def __call__(self, result: "Result") -> None:
        if self._out:
            self._out.write(encode_line(result))
        elif self._format == "jsonl":
            write(encode_line(result).decode())
        elif tables.ERROR in result:
            say(f"localllm: record {result['id']}: {result[tables.ERROR]}")
        elif self._format == "text":
            output = result[tables.OUTPUT]
            write(f"{output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)}\n")
        else:
            self._write_row(result)

    def _write_row(self, result: "Result") -> None:
        """Write a row, preceded by the header if it is the first."""
        row = result["input"] if isinstance(result["input"], dict) else {"line": result["input"]}
        is_first = self._columns is None
        if self._columns is None:
            names = [*row] if self._table is None else [*self._table.columns]
            new: dict[str, tuple[str, ...]] = {name: (tables.OUTPUT, name) for name in self._properties}
            new = new or {tables.OUTPUT: (tables.OUTPUT,)}
            new |= {tables.PROBABILITY: ("probabilities",)} if "probabilities" in result else {}
            self._columns = {name: (name,) for name in names}
            self._columns |= {tables.make_unique_name(name, {*names}): (*path, "") for name, path in new.items()}
        row = {
            name: tables.get_value(result, path[:-1]) if path[-1] == "" else row.get(name)
            for name, path in self._columns.items()
        }
        delimiter = "\t" if self._format == "tsv" else self._table.delimiter if self._table else ","
        write("".join(tables.iter_csv_lines([*self._columns], [row], delimiter, is_first)))


class MapProgress:
    """Shows progress and the final statistics on stderr."""

    def __init__(self, remaining: "list[Record] | RecordStream", finished: int):
        """Start counting.

        remaining: records to answer.  finished: count of records that an earlier run answered.
        """
        self._line, self._left, self.before = ProgressLine(), remaining, finished
        self._written = self._failed = self._tokens = 0
        self._start = perf_counter()

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._line.clear()

    @property
    def _total(self) -> int:
        return self._left.count if isinstance(self._left, RecordStream) else len(self._left)

    def count(self, result: "Result") -> None:
        self._line.clear()
        self._written += 1
        self._failed += tables.ERROR in result

    def show(self, mapping: "AnyMapping") -> None:
        """Update the progress line; call this after every step."""
        self._tokens, seconds = mapping.written, perf_counter() - self._start
        text = f"{self.before + mapping.done} of {self.before + self._total} answered, {self._speed(seconds)}"
        if mapping.done:
            text += f", {format_duration(seconds / mapping.done * (self._total - mapping.done))} left"
        self._line.show(text)

    def _speed(self, seconds: float) -> str:
        return f"{self._tokens / max(seconds, 1e-9):.1f} tokens/s"

    def end(self, stats: bool) -> None:
        """Print the statistics, on a terminal or with `stats`.

        Raises KeyboardInterrupt if records remain, and RecordsError if some failed.
        """
        seconds = perf_counter() - self._start
        if isinstance(self._left, RecordStream) and self._left.warning:
            say(f"localllm: warning: {self._left.warning}; set another encoding with --encoding NAME")
        records, tokens = count_noun(self._written, "record"), count_noun(self._tokens, "token")
        tokens_written = f"{tokens} written, " if stats else ""
        (say if stats else say_dim)(
            f"{records} in {format_duration(seconds)}, {tokens_written}{self._speed(seconds)}, {self._failed} failed"
        )
        if self._written < self._total or (isinstance(self._left, RecordStream) and self._left.is_stopped):
            raise KeyboardInterrupt
        if self._failed:
            raise RecordsError(
                f"{self._failed} of {self._total} records failed; see the error field of their output lines"
            )


# ---- jobs


@contextmanager
def check_provenance(
    output: str | None, data: bytes | None, name: str, by: dict[str, str], redo: bool, any_model: bool = False
) -> Iterator[Callable[[], None]]:
    """Check an output's provenance; yield a function that records the provenance of this input and job.

    data: None for a stream, whose records are compared as they arrive.  by: hashes of everything else that determines
    the answers.  redo: accept an output from another input or model.  any_model: accept an output from another model.
    Raises UsageError for an output that is not accepted.
    """
    from localllm.files import provenance as origin

    current = origin.Provenance.describe(data or b"", name, by)
    if output is None:
        yield lambda: None
        return
    if not redo:
        origin.require_same_input(output, data, current, any_model)
    try:
        yield lambda: origin.write_record(output, current)
    finally:
        origin.remove_record(output)


@contextmanager
def open_mapping(
    job: "MapJob",
    engine: options.EngineGroup,
    records: "list[Record] | RecordStream",
    ray: str | None,
    progress: "MapProgress",
    warns: bool,
    name: str,
    remote: "RemoteModel | None" = None,
) -> "Iterator[AnyMapping]":
    """Start the job on this computer, on a Ray cluster or on a server.

    warns: whether to warn of a missing chat template.  name: of the model, as the user typed it.
    """
    if remote is not None:
        from localllm.services.remote.mapping import RemoteMapping

        yield RemoteMapping(remote, job.prompts, job.options, records, job.n, job.json_as_text)
        return
    if ray is not None:
        from localllm.services.records.map_ray import RayMapping

        assert isinstance(records, list)
        yield RayMapping(job, records, ray)
        return
    from localllm.services.records.map import ChoiceMapping, RecordMapping

    with opening.open_model(job.path, engine, job.chat_template, mmproj=job.mmproj, name=name) as model:
        if warns:
            warn_missing_template(model)
            opening.check_thinking(model, job.options.think)
        if job.scored:
            from localllm.services.evaluation.likelihood import QuestionMapping

            assert isinstance(records, list)
            questions = QuestionMapping(model, job, records, lambda: progress.show(questions))
            yield questions
            return
        kind = ChoiceMapping if job.choices else RecordMapping
        mapping: ChoiceMapping | RecordMapping = kind(model, job, records, lambda: progress.show(mapping))
        yield mapping


def write_answers(
    mapping: "AnyMapping",
    records: "list[Record] | RecordStream",
    writer: "ResultWriter",
    progress: "MapProgress",
    as_finished: bool,
) -> None:
    """Write results as they are completed, or in the records' order."""
    from localllm.services.records.map import iter_in_order

    order = records if isinstance(records, list) else records.pending
    with finish_on_ctrl_c(mapping.stop), progress:
        for _, result in mapping if as_finished else iter_in_order(mapping, order):
            progress.count(result)
            writer(result)
            progress.show(mapping)


@contextmanager
def finish_on_ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C finish the running records; the second one interrupts."""

    def handle_first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not `say`, which may have been interrupted
            os.write(
                2,
                b"\n" * is_terminal(sys.stderr)
                + b"localllm: finishing the running records; press Ctrl-C again to quit at once\n",
            )
        stop()

    previous = signal.signal(signal.SIGINT, handle_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class ResultCollector(ResultWriter):
    """Collects results, and writes them to a file if there is one."""

    def __init__(self, out: JsonlFile | None):
        super().__init__(out, "jsonl", None, ())
        self.results: list[Result] = [] if out is None else [*out.records]

    def __call__(self, result: "Result") -> None:
        self.results.append(result)
        if self._out:
            super().__call__(result)


def answer_questions(
    model: str,
    job: MapJob,
    engine: "EngineGroup",
    records: "Sequence[Record]",
    input: tuple[bytes, str],
    output: str | None,
    redo: bool,
) -> "list[Result]":
    """Return a model's results for all records, including failed ones, in the records' order.

    input: the file's content and name.  output: a file for the answers, which may already have some, or None. Raises
    KeyboardInterrupt if records remain after Ctrl-C, and UsageError as `map` does.
    """
    all_records, (data, name) = list(records), input
    inputs = (job.path, name)
    keep = bool if redo else make_result_filter(all_records, output or "")
    writer = JsonlFile(output, inputs, keep=keep) if output else nullcontext()
    with check_provenance(output, data, name, job.compute_digests(job.path), redo) as remember, writer as out:
        if redo and out is not None:
            out.clear()
        collector = ResultCollector(out)
        remaining = select_unfinished(all_records, collector.results)
        progress = MapProgress(remaining, len(all_records) - len(remaining))
        if progress.before:
            say(f"localllm: {output} already answers {progress.before} of {count_noun(len(all_records), 'question')}")
        if remaining:
            with open_mapping(job, engine, remaining, None, progress, warns=False, name=model) as mapping:
                remember()
                write_answers(mapping, remaining, collector, progress, as_finished=False)
            with suppress(RecordsError):  # the caller counts them
                progress.end(stats=False)
    order: dict[object, int] = {record.id: index for index, record in enumerate(all_records)}
    return sorted(collector.results, key=lambda result: order[result["id"]])
