"""A tool that runs a command, which ends with all that it has begun. On Linux it can neither see nor write outside of
the folders that are allowed, but for the programs that are installed.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from localllm.services.tools import confined
from localllm.services.tools.box import OfferedTool, ToolError, text_in
from localllm.services.tools.files import tool
from localllm.services.tools.folders import Folders
from localllm.system.processes import kill_with_children, shell

SECONDS = 120.0
MOST = 1 << 20  # bytes of what it says that are kept
# Of the environment, without keys and passwords.
KEPT = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "USER", "USERPROFILE",
        "PATHEXT", "COMSPEC", "APPDATA"}  # fmt: skip


def run(folders: Folders) -> OfferedTool:
    """A command of the shell."""
    about = (
        f"Run a command of the shell in {folders.roots[0]}, at most {SECONDS:.0f} seconds. It gets no input. "
        "What it writes comes back, and its exit code."
    )
    given = {"command": {"type": "string"}}
    return tool("run", about, given, ["command"], lambda arguments: performed(arguments, folders.roots))


def performed(arguments: dict[str, Any], folders: Sequence[str], seconds: float = SECONDS) -> str:
    """What it says, and how it ended. Raises ToolError if it takes too long."""
    command = text_in(arguments, "command")
    if "\0" in command:
        raise ToolError("a command cannot have a NUL in it")
    words = shell(command)
    if confined.version() and not isinstance(words, str):
        words = [sys.executable, "-I", "-S", str(confined.__file__), *folders, "--", *words]
    surroundings = {name: value for name, value in os.environ.items() if name.upper() in KEPT or name[:3] == "LC_"}
    process = subprocess.Popen(
        words, cwd=folders[0], env={**surroundings, "TERM": "dumb"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    said = Written(process.stdout)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"it was stopped after {seconds:.0f} seconds; it had written:\n{said.text()}") from None
    finally:
        kill_with_children(process)
        said.thread.join(1)
        text = said.text()
    return f"{text}{chr(10) * bool(text and not text.endswith(chr(10)))}[exit code {process.returncode}]"


class Written:
    """What comes out of a pipe, whatever its length: a thread reads it to its end."""

    def __init__(self, pipe: IO[bytes]):
        self._pipe, self._data, self._all = pipe, bytearray(), 0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._pipe:
            while piece := os.read(self._pipe.fileno(), 65536):
                self._all += len(piece)
                self._data += piece[: MOST - len(self._data)]

    def text(self) -> str:
        cut = f"\n[cut: of {self._all} bytes]" if self._all > len(self._data) else ""
        return bytes(self._data).decode(errors="replace") + cut
