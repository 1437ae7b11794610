"""Outputs of embeddings: JSON Lines, which can be resumed, plain numbers, or a NumPy file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from localllm.cli.terminal.output import is_terminal, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from localllm.services.records.lines import Record


class Writer(Protocol):
    """A binary file."""

    def write(self, data: bytes, /) -> object: ...


class VectorOutput(Protocol):
    """An output of vectors, in the order of their records."""

    def left(self, records: "list[Record]") -> "list[Record]":
        """Return the records without a vector yet."""
        ...

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        """Store the records and their vectors, float32 [records, numbers]."""
        ...

    def fail(self, record: "Record", error: Exception) -> None:
        """Record a record's error."""
        ...


@contextmanager
def output_of(kind: str, path: str | None, model: str, records: "list[Record]") -> "Iterator[VectorOutput]":
    """Open the output of a format: jsonl, plain or npy. Raises UsageError."""
    if kind == "npy":
        yield from npy(path, model)
    elif kind == "jsonl" and path is not None:
        from localllm.files.jsonl_file import JsonlFile

        ids = {record.id for record in records}

        def belongs(result: dict[str, object]) -> bool:
            if result["id"] not in ids:
                raise UsageError(f"{path}: the record {result['id']!r} is not in this input; give another output file")
            return "error" not in result

        with JsonlFile(path, (model,), keep=belongs) as file:
            yield Lines(file, plain=False)
    elif path is not None:
        from localllm.files.safe_file import SafeFile, resolve_target

        with SafeFile(resolve_target(path, (model,))) as safe_file:
            yield Lines(safe_file, plain=True)
    else:
        yield Lines(None, plain=kind == "plain")


class Lines:
    """A line for each vector."""

    def __init__(self, file: Writer | None, plain: bool):
        """Store the output: a JsonlFile, another file, or None for stdout."""
        self._file, self._plain = file, plain

    def left(self, records: "list[Record]") -> "list[Record]":
        finished = {result["id"] for result in getattr(self._file, "records", ())}
        return [record for record in records if record.error or record.id not in finished]

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        import json

        numbers = ", ".join(["%.9g"] * rows.shape[1])
        plain = numbers.replace(",", "")
        lines = [
            plain % tuple(row)
            if self._plain
            else f'{{"id": {json.dumps(record.id, ensure_ascii=False)}, "embedding": [{numbers % tuple(row)}]}}'
            for record, row in zip(records, rows.tolist(), strict=True)
        ]
        self._write("".join(f"{line}\n" for line in lines))

    def fail(self, record: "Record", error: Exception) -> None:
        import json

        if self._plain:
            raise UsageError(f"{error}; the plain format cannot record errors, use --format jsonl")
        self._write(json.dumps({"id": record.id, "error": str(error)}, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            write(text)
        elif text:
            self._file.write(text.encode(errors="replace"))


class AllRows:
    """All vectors as one array."""

    def __init__(self) -> None:
        self.all: list[np.ndarray] = []

    def left(self, records: "list[Record]") -> "list[Record]":
        return records

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        self.all.append(rows)

    def fail(self, record: "Record", error: Exception) -> None:
        raise UsageError(f"{error}; an .npy file cannot record errors, use --format jsonl")


def npy(path: str | None, model: str) -> "Iterator[VectorOutput]":
    """Write a NumPy file, which appears when it is complete. Raises UsageError."""
    from io import BytesIO

    import numpy as np

    from localllm.files.safe_file import SafeFile, resolve_target

    if path is None and is_terminal(sys.stdout):
        raise UsageError("a NumPy file cannot be printed to a terminal: give -o FILE.npy, or pipe the output")
    rows = AllRows()
    yield rows
    data = BytesIO()
    np.save(data, np.concatenate(rows.all) if rows.all else np.zeros((0, 0), np.float32))
    if path is None:
        sys.stdout.buffer.write(data.getbuffer())
        sys.stdout.buffer.flush()
    else:
        with SafeFile(resolve_target(path, (model,))) as file:
            file.write(data.getbuffer())
