"""A file of JSON lines that grows by whole lines, and goes on after a process that was killed.

Every line is written at once and given to the system, so whoever is killed leaves at most one torn line at the end,
which is cut off by the next.
"""

import json
import os
from collections.abc import Callable
from typing import Any, Self

from localllm.errors import LocalllmError, UsageError
from localllm.files.safe_file import SafeFile, checked_target
from localllm.system.files import can_replace_open_files, lock, open_file, sync

BEGINNING = b'{"id": '  # of every line


def json_line(record: dict[str, Any]) -> bytes:
    """A record as a line; ASCII if a text in it is none that UTF-8 can hold."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


class JsonlFile:
    """Open for appending, in a `with` block. Nobody else can have it open so at the same time.

    Attributes:
        records: what was there already and stays, in order.
    """

    def __init__(
        self, path: str | os.PathLike[str], inputs: tuple[str, ...] = (), keep: Callable[[dict[str, Any]], bool] = bool
    ):
        """inputs: files that `path` must not be.  keep: which of the records that are there stay.

        Raises UsageError for a path that cannot be written.
        """
        self.path, self._keep, self._descriptor = checked_target(path, inputs), keep, -1
        self.records: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        """Raises UsageError if the file holds something else, which then stays, or another process writes it."""
        self._open()
        try:
            with open(self.path, "rb") as file:
                data = file.read()
            lines = [(record, line) for record, line in self._whole_lines(data) if self._keep(record)]
            self.records, kept = [record for record, _ in lines], b"".join(line for _, line in lines)
            if kept != data:
                self._replace(kept)
        except BaseException:
            self._close()
            raise
        return self

    def _replace(self, content: bytes) -> None:
        """The file again, with this content: it is open all the time, where an open file can be replaced. Elsewhere
        another process may come first; then it has the file, and whatever it found there before stays.
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
        if not lock(self._descriptor):
            self._close()
            raise UsageError(f"{self.path}: another process is writing this file")

    def _whole_lines(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Records with their lines. Raises UsageError if there is anything else, less a torn line at the end."""
        *lines, torn = data.split(b"\n")
        if not (torn.startswith(BEGINNING) or BEGINNING.startswith(torn)):
            lines.append(torn)
        return [(self._record(number, line), line + b"\n") for number, line in enumerate(lines, 1)]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("id"), str | int):
            raise UsageError(f"{self.path}: line {number} is no record of an earlier start; give another name")
        return record

    def write(self, line: bytes) -> None:
        """A whole line. Raises LocalllmError if the disk is full or refuses."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise LocalllmError(
                f"{self.path}: cannot be written: {error.strerror}; what is there stays, and a later start goes on"
            ) from None

    def __exit__(self, *error: object) -> None:
        """Wait until all is on the disk. A file in which nothing came to be is gone."""
        try:
            if os.fstat(self._descriptor).st_size:
                sync(self._descriptor)
            elif error[0]:
                os.unlink(self.path)
        finally:
            self._close()
