"""Record which input and model an output file was made from, so that it can be resumed safely.

The record is a hidden file next to the output, .NAME.localllm:

    {"path": "/home/me/questions.txt", "size": 5120, "beginning": "9f86d081884c7d65", "by": {"model": "6030"}}
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, field

from localllm.errors import UsageError
from localllm.files.safe_file import SafeFile
from localllm.frozen import frozen

BEGINNING = 1 << 16  # bytes of the input that are hashed


@frozen
class Provenance:
    """The input of an output file, and the model and options that produced it.

    Attributes:
        path: absolute path of the input, "" for stdin.  size: in bytes.
        beginning: hash of the input's first BEGINNING bytes, in hexadecimal.
        by: hashes, by name ("model", "prompt"), of everything else that the answers depend on.
    """

    path: str
    size: int
    beginning: str
    by: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def describe(cls, data: bytes, path: str, by: Mapping[str, str] | None = None) -> "Provenance":
        """Describe an input.

        data: its content, at least the first BEGINNING bytes. path: "" for stdin.
        """
        return cls(os.path.abspath(path) if path else "", len(data), hash_beginning(data), by or {})

    def __str__(self) -> str:
        return f"{self.path or 'stdin'} ({self.size} bytes)"


def hash_beginning(data: bytes) -> str:
    """Hash the first BEGINNING bytes, as hexadecimal digits."""
    import hashlib

    return hashlib.blake2b(data[:BEGINNING], digest_size=8).hexdigest()


def is_same_input(earlier: Provenance, data: bytes, current: Provenance) -> bool:
    """Return whether `data` is the recorded input; a file under the same path may have grown.

    A pipe that was answered line by line is recorded as empty and matches any input, because its records are compared
    one by one later.
    """
    if not (earlier.path or earlier.size):
        return True
    same_beginning = len(data) >= earlier.size and hash_beginning(data[: earlier.size]) == earlier.beginning
    return same_beginning and (current.path == earlier.path or current.size == earlier.size)


def get_record_path(output: str) -> str:
    folder, name = os.path.split(os.path.realpath(output))
    return os.path.join(folder, f".{name}.localllm")


def read_record(output: str) -> Provenance | None:
    """Read the record of an output; None if the output is empty or has no valid record."""
    with suppress(OSError, ValueError, TypeError):
        if os.path.getsize(output):
            with open(get_record_path(output), "rb") as file:
                return Provenance(**json.load(file))
    return None


def require_same_input(output: str, data: bytes | None, current: Provenance, any_model: bool = False) -> None:
    """Raise UsageError if an output was made from another input, or by another model, prompt or options.

    data: the input, or None if it is not read yet. any_model: accept another model, prompt or options.
    """
    earlier = read_record(output)
    if earlier is None:
        return
    if data is not None and not is_same_input(earlier, data, current):
        if earlier.path == current.path:
            raise UsageError(
                f"{current.path or 'stdin'} has changed since {output} was started; --redo replaces its answers, or use"
                " another output file"
            )
        raise UsageError(
            f"{output} has answers for {earlier}, not for {current}; --redo replaces them, or use another output file"
        )
    if any_model:
        return
    if differing := [name for name, value in current.by.items() if earlier.by.get(name, value) != value]:
        raise UsageError(
            f"{output} has answers by another {' and another '.join(differing)}; --redo replaces them, --redo-errors"
            " only those that failed, or use another output file"
        )


def write_record(output: str, current: Provenance) -> None:
    """Write the record of an output if it differs. Raises LocalllmError if the disk is full or a write fails."""
    if read_record(output) != current:
        with SafeFile(get_record_path(output)) as file:
            file.write(json.dumps(asdict(current)).encode() + b"\n")


def remove_record(output: str) -> None:
    """Remove the record of an output if the output itself does not exist."""
    if not os.path.lexists(output):
        with suppress(OSError):
            os.unlink(get_record_path(output))
