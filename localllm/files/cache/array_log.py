"""Store arrays in an append-only file, so that interrupted work can resume.

The file begins with a hash of a key that identifies the work; a file with another key is replaced. Each record has the
lengths of a name and of an array in bytes, the name, the array, and a SHA-256 of all these. A record that a killed
process left unfinished is removed.
"""

import hashlib
import os
import struct
import threading
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from localllm.errors import LocalllmError, UsageError
from localllm.system.files import open_file, sync_file

MAGIC = b"localllm records 1\n"
LENGTHS = struct.Struct("<QQ")
DIGEST = 32  # bytes
FLAGS = os.O_RDWR | os.O_CREAT


class ArrayLog:
    """A file of named arrays, open in a `with` block of one process.

    Several threads may read at once. Methods raise LocalllmError if the disk is full or a write fails; opening raises
    UsageError if the file is not an array log.
    """

    def __init__(self, path: str | os.PathLike[str], key: str):
        self.path, self._head = Path(path), MAGIC + hashlib.sha256(key.encode()).digest()
        self._places: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self._file: BinaryIO = open(open_file(self.path, FLAGS), "r+b")
            head = self._file.read(len(self._head))
            if not head.startswith(MAGIC[: len(head)]):
                raise UsageError(f"{self.path}: expected a file written by localllm; move or rename this one")
            if head != self._head:
                self._write_header()
            while self._read_next():
                pass
            self._file.truncate(self._end)
        except OSError as error:
            raise self._make_error(error) from None
        return self

    def _write_header(self) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        self._file.write(self._head)
        self._file.flush()

    def _read_next(self) -> bool:
        """Read the next record and store its offset; return whether it was complete."""
        self._end = self._file.tell()
        head = self._file.read(LENGTHS.size)
        if len(head) < LENGTHS.size:
            return False
        name_length, count = LENGTHS.unpack(head)
        remaining = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if name_length + count + DIGEST > remaining:
            return False
        name, start = self._file.read(name_length), self._file.tell()
        digest = hashlib.sha256(head + name)
        data = self._file.read(count)
        digest.update(data)
        if self._file.read(DIGEST) != digest.digest():
            return False
        self._places[name.decode(errors="replace")] = (start, count)
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def read(self, name: str, first: int, end: int) -> np.ndarray:
        """Read bytes `first` to `end` - 1 of an array as uint8. Raises IndexError beyond its end."""
        start, count = self._places[name]
        if not 0 <= first <= end <= count:
            raise IndexError(f"{name}: bytes {first} to {end} of {count}")
        try:
            with self._lock:
                self._file.seek(start + first)
                return np.frombuffer(self._file.read(end - first), np.uint8)
        except OSError as error:
            raise self._make_error(error) from None

    def add(self, name: str, data: np.ndarray) -> None:
        """Append an array and wait until it is on disk."""
        head, bytes_ = LENGTHS.pack(len(name.encode()), data.nbytes), data.tobytes()
        digest = hashlib.sha256(head + name.encode())
        digest.update(bytes_)
        try:
            self._file.seek(self._end)
            for piece in (head, name.encode(), bytes_, digest.digest()):
                self._file.write(piece)
            self._file.flush()
            sync_file(self._file.fileno())
        except OSError as error:
            raise self._make_error(error) from None
        start = self._end + len(head) + len(name.encode())
        self._places[name], self._end = (start, data.nbytes), self._file.tell()

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the file, because the work is done."""
        self.path.unlink(missing_ok=True)

    def _make_error(self, error: OSError) -> LocalllmError:
        return LocalllmError(f"{self.path}: cannot be written: {error.strerror or error}")
