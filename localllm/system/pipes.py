"""Read what another process writes, and keep a bounded part of it."""

import os
import threading
from contextlib import suppress
from typing import IO


class PipeReader:
    """Reads a pipe to its end in a thread, so that its writer never waits, and keeps a part.

    Attributes:
        size: number of bytes read so far.  thread: ends with the pipe.
    """

    def __init__(self, pipe: IO[bytes], most: int, keeps_end: bool = False):
        """Start to read. most: most bytes to keep.  keeps_end: keep the last ones, not the first."""
        self._pipe, self._most, self._keeps_end, self._data, self.size = pipe, most, keeps_end, bytearray(), 0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._pipe:
            while piece := os.read(self._pipe.fileno(), 65536):
                self.size += len(piece)
                if self._keeps_end:
                    self._data += piece
                    del self._data[: -self._most]
                else:
                    self._data += piece[: self._most - len(self._data)]

    def text(self) -> str:
        """Return what is kept, and a note if that is not all."""
        note = f"\n[cut: of {self.size} bytes]" if self.size > len(self._data) and not self._keeps_end else ""
        return bytes(self._data).decode(errors="replace") + note

    def last_line(self) -> str:
        """Return the last line that is not empty, "" if there is none."""
        return next((line.strip() for line in reversed(self.text().splitlines()) if line.strip()), "")
