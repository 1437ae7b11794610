"""Read records from a pipe; each is available as soon as its line has arrived."""

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from queue import Empty, Queue
from typing import IO

from localllm.errors import LocalllmError, UsageError
from localllm.files.text_file import UTF16_MARKS, decode_text, describe_replacement, replace_invalid
from localllm.services.records import lines

AHEAD = 256  # maximum lines that the thread reads ahead
PATIENCE = 0.1  # seconds between checks for a stop


class RecordStream:
    """An iterator over records, which can be resumed after StopIteration while `is_open`.

    It waits for the next line only if there is no other work.

    Attributes:
        may_wait: returns whether there is no other work.  is_stopped: whether the user cancelled.
        pending: the yielded records, to sort results by.  count: of yielded records.
    """

    def __init__(self, source: IO[bytes]):
        """Start a thread that reads `source` line by line."""
        self.may_wait: Callable[[], bool] = lambda: True
        self.pending, self.count = deque[lines.Record](), 0
        self._error: LocalllmError | None = None
        self._lines, self._ended = Queue[bytes | None](AHEAD), False
        self._is_jsonl: bool | None = None  # until the first line
        self._number, self._first_numbers, self.is_stopped = 0, dict[str | int, int](), False
        self._finished_inputs, self._output = dict[object, object](), ""
        self._offset = 0  # bytes before the next line
        self._invalid, self._replaced = "", 0  # message about the first invalid byte, and count of replacements
        threading.Thread(target=self._read, args=(source,), daemon=True).start()

    def _read(self, source: IO[bytes]) -> None:
        try:
            first = source.readline()
            if first.startswith(UTF16_MARKS):
                source = io.BytesIO(decode_text(first + source.read(), "stdin").encode())
                first = source.readline()
            elif lines.is_document_start(first):
                data = first + source.read()
                document = lines.convert_document(data)
                source = io.BytesIO(data if document is None else document)
                first = source.readline()
            for line in chain([first], iter(source.readline, b"")) if first else ():
                self._lines.put(line)
        except LocalllmError as error:
            self._error = error
        finally:
            self._lines.put(None)

    @property
    def is_open(self) -> bool:
        return not (self._ended or self.is_stopped)

    @property
    def warning(self) -> str:
        """A warning about bytes that were not UTF-8, or ""."""
        return describe_replacement(self._invalid, self._replaced) if self._replaced else ""

    def stop(self) -> None:
        self.is_stopped = True

    def skip(self, results: Iterable[Mapping[str, object]], output: str) -> None:
        """Skip records that have a result in an output file; raise UsageError later if the input differs.

        output: the name of the output file.
        """
        self._finished_inputs, self._output = {each["id"]: each.get("input") for each in results}, output

    def __iter__(self) -> "RecordStream":
        return self

    def __next__(self) -> lines.Record:
        while self.is_open:
            line = self._read_line()
            if line is None:
                break
            self._number += 1
            offset, self._offset = self._offset, self._offset + len(line)
            if line.strip():
                record = self._parse_record(line.removesuffix(b"\n").removesuffix(b"\r"), offset)
                if self._is_done(record):
                    continue
                self.pending.append(record)
                self.count += 1
                return record
        raise StopIteration

    def _read_line(self) -> bytes | None:
        """Return the next line; None at the end, or if none has arrived yet."""
        while not self.is_stopped:
            may_wait = self.may_wait()
            try:
                line = self._lines.get(may_wait, PATIENCE)
            except Empty:
                if not may_wait:
                    return None
                continue
            self._ended = line is None
            if self._ended and self._error:
                raise self._error
            return line
        return None

    def _parse_record(self, line: bytes, offset: int) -> lines.Record:
        number, text = self._number, self._decode(line, offset)
        line = (text.removeprefix("\ufeff") if number == 1 else text).encode()
        if self._is_jsonl is None:
            self._is_jsonl = lines.is_json_line(line)
        record = (lines.parse_json_line if self._is_jsonl else lines.parse_plain_line)(number, line)
        if record.error or not self._is_jsonl:
            return record
        return lines.check_unique_id(record, number, self._first_numbers)

    def _is_done(self, record: lines.Record) -> bool:
        """Return whether the output has the record's result. Raises UsageError for the result of another input."""
        if record.error or record.id not in self._finished_inputs:
            return False
        if self._finished_inputs[record.id] != record.input:
            raise UsageError(
                f"{self._output}: record {record.id!r} was answered for another input; give another output file"
            )
        return True

    def _decode(self, line: bytes, offset: int) -> str:
        """Decode a line; replace bytes that are not UTF-8 by U+FFFD, and count them.

        offset: bytes before the line. Raises UsageError if such a line also has a zero byte.
        """
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            problem = f"stdin: not UTF-8 at byte {offset + error.start} (0x{line[error.start]:02x})"
        if b"\0" in line:
            raise UsageError(problem)
        text, count = replace_invalid(line)
        self._invalid, self._replaced = self._invalid or problem, self._replaced + count
        return text
