"""Which input an output is made of: a hidden file beside the output remembers it, .NAME.localllm for NAME.

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
    """An input.

    Attributes:
        path: absolute, or "" for stdin.  size: in bytes.
        beginning: a hash of its first bytes, BEGINNING at most, in hexadecimal.
    """

    path: str
    size: int
    beginning: str

    @classmethod
    def of(cls, data: bytes, path: str) -> "Provenance":
        """path: "" for stdin."""
        return cls(os.path.abspath(path) if path else "", len(data), digest(data))

    def __str__(self) -> str:
        return f"{self.path or 'stdin'} ({self.size} bytes)"


def digest(data: bytes) -> str:
    import hashlib

    return hashlib.blake2b(data[:BEGINNING], digest_size=8).hexdigest()


def goes_on_from(before: Provenance, data: bytes, now: Provenance) -> bool:
    """Whether an input is the one that was remembered: under its name it may have grown, under another it may not."""
    same_beginning = len(data) >= before.size and digest(data[: before.size]) == before.beginning
    return same_beginning and (now.path == before.path or now.size == before.size)


def mark_of(output: str) -> str:
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.localllm")


def remembered(output: str) -> Provenance | None:
    """What an output is made of; None if it holds nothing yet, or if that was forgotten."""
    with suppress(OSError, ValueError, TypeError):
        if os.path.getsize(output):
            with open(mark_of(output), "rb") as file:
                return Provenance(**json.load(file))
    return None


def require_same(output: str, data: bytes, now: Provenance) -> None:
    """Raises UsageError for an output of another input."""
    before = remembered(output)
    if before and not goes_on_from(before, data, now):
        raise UsageError(f"{output}: its answers are those of {before}, which {now} does not go on; give another name")


def remember(output: str, now: Provenance) -> None:
    """Raises LocalllmError if the disk refuses."""
    if remembered(output) != now:
        with SafeFile(mark_of(output)) as file:
            file.write(json.dumps(asdict(now)).encode() + b"\n")


def forget(output: str) -> None:
    """If the output is gone."""
    if not os.path.lexists(output):
        with suppress(OSError):
            os.unlink(mark_of(output))
