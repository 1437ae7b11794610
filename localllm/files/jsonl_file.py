"""Append records to a JSON Lines file, so that the work can resume after a crash.

Each line reaches the operating system at once, so a killed process leaves at most one incomplete line at the end, which
the next process removes.
"""

import json
import os
from collections.abc import Callable
from typing import Self

from localllm.errors import LocalllmError, UsageError
from localllm.files.safe_file import SafeFile, resolve_target
from localllm.system.files import can_replace_open_files, open_file, sync_file
from localllm.system.locks import lock_file

BEGINNING = b'{"id": '  # of every line, by which an incomplete line is recognized


def encode_line(record: dict[str, object]) -> bytes:
    """Encode a record as a line, with escapes if a string cannot be encoded as UTF-8."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


class JsonlFile:
    """A JSON Lines file open for appending in a `with` block, locked against other processes.

    Attributes:
        records: the records of earlier runs that `keep` accepted, in order.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: tuple[str, ...] = (),
        keep: Callable[[dict[str, object]], bool] = bool,
    ):
        """Check the path without opening the file. Raises UsageError if it cannot be written.

        inputs: files that `path` must not overwrite. keep: returns whether a record of an earlier run stays.
        """
        self.path, self._keep, self._descriptor = resolve_target(path, inputs), keep, -1
        self.records: list[dict[str, object]] = []

    def __enter__(self) -> Self:
        """Open the file and read its records.

        Raises UsageError if it has other content, which stays unchanged, or if another process writes it.
        """
        self._open()
        try:
            with open(self.path, "rb") as file:
                data = file.read()
            lines = [(record, line) for record, line in self._parse_whole_lines(data) if self._keep(record)]
            self.records, content = [record for record, _ in lines], b"".join(line for _, line in lines)
            if content != data:
                self._replace(content)
        except BaseException:
            self._close()
            raise
        return self

    def clear(self) -> None:
        """Remove all records. Raises LocalllmError if a write fails."""
        self.records = []
        self._replace(b"")

    def _replace(self, content: bytes) -> None:
        """Replace the content of the file.

        It stays locked throughout if this system can replace an open file. Otherwise it is closed for a moment, in
        which another process may open it with its old content.
        """
        with SafeFile(self.path) as new:
            new.write(content)
            if not can_replace_open_files():
                self._close()
        self._close()
        self._open()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if not lock_file(self._descriptor):
            self._close()
            raise UsageError(
                f"{self.path}: another process is writing this file; wait for it or use another output file"
            )

    def _parse_whole_lines(self, data: bytes) -> list[tuple[dict[str, object], bytes]]:
        """Parse the complete lines and return each record with its line. Raises UsageError for other content."""
        *lines, torn = data.split(b"\n")
        if not (torn.startswith(BEGINNING) or BEGINNING.startswith(torn)):
            lines.append(torn)
        return [(self._parse_record(number, line), line + b"\n") for number, line in enumerate(lines, 1)]

    def parse_lines(self, data: bytes) -> list[dict[str, object]]:
        """Parse the records in a file's content; an incomplete last line is ignored.

        Raises UsageError for other content.
        """
        return [record for record, _ in self._parse_whole_lines(data)]

    def _parse_record(self, number: int, line: bytes) -> dict[str, object]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("id"), str | int):
            raise UsageError(f"{self.path}: line {number} is not a record of an earlier run; give another output name")
        return record

    def write(self, line: bytes) -> None:
        """Append a line. Raises LocalllmError if the disk is full or a write fails."""
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError as error:
            raise LocalllmError(
                f"{self.path}: {error.strerror}; the records written so far stay, and the next run resumes"
            ) from None

    def __exit__(self, *error: object) -> None:
        """Sync and close the file, and remove it if it is empty."""
        try:
            if os.fstat(self._descriptor).st_size:
                sync_file(self._descriptor)
            elif error[0]:
                os.unlink(self.path)
        finally:
            self._close()
