"""A tool that runs a shell command, and ends all of its processes afterwards.

On Linux the command can write only in the allowed folders, and read only these and installed programs.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from localllm.services.tools import confined
from localllm.services.tools.box import OfferedTool, ToolError, text_in
from localllm.services.tools.files import tool
from localllm.services.tools.folders import Folders
from localllm.system.pipes import PipeReader
from localllm.system.processes import kill_with_children, shell

SECONDS = 120.0
MOST = 1 << 20  # bytes of output that are kept
# Environment variables that the command gets: none with keys or passwords.
KEPT = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "USER", "USERPROFILE",
        "PATHEXT", "COMSPEC", "APPDATA"}  # fmt: skip


def run(folders: Folders) -> OfferedTool:
    """Create the tool that runs shell commands."""
    about = (
        f"Run a command of the shell in {folders.roots[0]}, at most {SECONDS:.0f} seconds. It gets no input. "
        "What it writes comes back, and its exit code."
    )
    parameters = {"command": {"type": "string"}}
    return tool("run", about, parameters, ["command"], lambda arguments: run_command(arguments, folders.roots))


def run_command(arguments: dict[str, object], folders: Sequence[str], seconds: float = SECONDS) -> str:
    """Run a command; return its output and exit status. Raises ToolError on timeout."""
    command = text_in(arguments, "command")
    if "\0" in command:
        raise ToolError("a command cannot contain NUL")
    words = shell(command)
    if confined.version() and not isinstance(words, str):
        words = [sys.executable, "-I", "-S", str(confined.__file__), *folders, "--", *words]
    environment = {name: value for name, value in os.environ.items() if name.upper() in KEPT or name[:3] == "LC_"}
    process = subprocess.Popen(
        words, cwd=folders[0], env={**environment, "TERM": "dumb"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    output = PipeReader(process.stdout, MOST)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"timed out after {seconds:.0f} seconds; output so far:\n{output.text()}") from None
    finally:
        kill_with_children(process)
        output.thread.join(1)
        text = output.text()
    return f"{text}{chr(10) * bool(text and not text.endswith(chr(10)))}[exit code {process.returncode}]"
