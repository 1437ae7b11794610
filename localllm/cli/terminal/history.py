"""The history of texts typed in chats: a private file in the user's state folder, one text per line."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from localllm.errors import LocalllmError
from localllm.files.folders import make_private, state_folder
from localllm.files.safe_file import SafeFile
from localllm.system.files import open_file

MOST_BYTES, MOST_TEXT = 1_000_000, 50_000  # of the file, whose older half is removed then; of a text


class FileHistory(History):
    """History for prompt_toolkit. If the file cannot be used, texts are kept until the program ends."""

    def __init__(self, path: Path | None = None):
        super().__init__()
        self.path = path or state_folder() / "history"

    def load_history_strings(self) -> Iterable[str]:
        """Yield the texts, latest first; skip invalid lines."""
        for line in reversed(self._lines()):
            with suppress(ValueError, RecursionError):
                text = json.loads(line)
                if isinstance(text, str):
                    yield text

    def _lines(self) -> list[bytes]:
        try:
            return self.path.read_bytes().splitlines(keepends=True)
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append a text; several programs may do so at once."""
        line = json.dumps(string).encode() + b"\n"
        if len(line) > MOST_TEXT:
            return
        with suppress(OSError, LocalllmError):
            make_private(self.path.parent)
            descriptor = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line)
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > MOST_BYTES:
                self._shorten()

    def _shorten(self) -> None:
        lines, size = list[bytes](), 0
        for line in reversed(self._lines()):
            size += len(line)
            if size > MOST_BYTES // 2:
                break
            lines.append(line)
        with SafeFile(self.path) as file:
            file.write(b"".join(reversed(lines)))
        self.path.chmod(0o600)
