"""Record a conversation with tools as JSON Lines while it happens.

{"transcript": 1, "made": "2026-11-23T10:34:00+00:00", "model": "qwen3"}
{"role": "user", "content": "What is in notes.txt?"}
{"role": "assistant", "content": "", "tool_calls": [{"id": ..., "function": {"name": "read_file", ...}}]}
{"role": "tool", "tool_call_id": ..., "name": "read_file", "content": ..., "allowed": "asked", "seconds": 0.01}
{"role": "assistant", "content": "A list of ...", "finish": "stop"}
"""

import json
import os
from datetime import UTC, datetime
from typing import Self

from localllm.errors import LocalllmError, UsageError
from localllm.files.jsonl_file import encode_line
from localllm.system.files import open_file

LAYOUT = 1


class ToolTranscript:
    """A transcript file to which lines are appended; call close at the end."""

    def __init__(self, path: str, model: str):
        """Open the file. Raises UsageError if it exists and is no transcript, or cannot be written."""
        require_transcript(path)
        try:
            self._path, self._file = path, open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        self.add({"transcript": LAYOUT, "made": datetime.now(UTC).isoformat(timespec="seconds"), "model": model})

    def add(self, line: dict[str, object]) -> None:
        remaining = memoryview(encode_line(line))
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError as error:
            raise LocalllmError(f"{self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def require_transcript(path: str) -> None:
    try:
        with open(path, "rb") as file:
            first = file.readline(1 << 16)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        is_transcript = not first or "transcript" in json.loads(first)
    except (ValueError, TypeError):
        is_transcript = False
    if not is_transcript:
        raise UsageError(f"{path}: the file exists and is not a transcript; give another file")
