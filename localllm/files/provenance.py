"""The input that an output was made from, recorded in a hidden file beside it: .NAME.localllm for NAME.

{"path": "/home/me/questions.txt", "size": 5120, "beginning": "9f86d081884c7d65"}
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict

from localllm.errors import UsageError
from localllm.files.safe_file import SafeFile
from localllm.frozen import frozen

BEGINNING = 1 << 16  # bytes of the input that are hashed


@frozen
class Provenance:
    """An input file, or stdin.

    Attributes:
        path: absolute, or "" for stdin.  size: in bytes.
        beginning: a hash of its first bytes, BEGINNING at most, in hexadecimal.
    """

    path: str
    size: int
    beginning: str

    @classmethod
    def of(cls, data: bytes, path: str) -> "Provenance":
        """Describe an input; path: "" for stdin."""
        return cls(os.path.abspath(path) if path else "", len(data), digest(data))

    def __str__(self) -> str:
        return f"{self.path or 'stdin'} ({self.size} bytes)"


def digest(data: bytes) -> str:
    import hashlib

    return hashlib.blake2b(data[:BEGINNING], digest_size=8).hexdigest()


def continues(before: Provenance, data: bytes, now: Provenance) -> bool:
    """Return whether an input is the recorded one; under the same name it may have grown."""
    same_beginning = len(data) >= before.size and digest(data[: before.size]) == before.beginning
    return same_beginning and (now.path == before.path or now.size == before.size)


def record_path(output: str) -> str:
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.localllm")


def read_record(output: str) -> Provenance | None:
    """Read what an output was made from; None if it holds nothing yet, or there is no record."""
    with suppress(OSError, ValueError, TypeError):
        if os.path.getsize(output):
            with open(record_path(output), "rb") as file:
                return Provenance(**json.load(file))
    return None


def require_same_input(output: str, data: bytes, now: Provenance) -> None:
    """Raise UsageError for an output of another input."""
    before = read_record(output)
    if before and not continues(before, data, now):
        raise UsageError(f"{output}: made from {before}, which {now} does not continue; give another output name")


def write_record(output: str, now: Provenance) -> None:
    """Record what an output is made from. Raises LocalllmError if the disk refuses."""
    if read_record(output) != now:
        with SafeFile(record_path(output)) as file:
            file.write(json.dumps(asdict(now)).encode() + b"\n")


def remove_record(output: str) -> None:
    """Remove the record of an output that is gone."""
    if not os.path.lexists(output):
        with suppress(OSError):
            os.unlink(record_path(output))
