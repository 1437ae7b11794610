"""List the product's files whose functions run before a command writes its first byte on stdout, in order.

    scripts/journey run MODEL -p Hi

Module and class bodies do not count as functions, nor does what they call during an import. All threads count; other
processes do not. The list goes to stderr after the command's own output; its last line is the count.
"""

import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("localllm", "quant"))


class Journey:
    """A profile hook that records files until the first byte is written.

    Attributes:
        files: paths relative to the repository, in the order in which their functions first ran.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._has_ended = False
        self._importing = threading.local()  # .depth: how many module bodies of the product run in a thread

    def start(self) -> None:
        """Begin to record, in this thread and in those that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            self._has_ended |= is_write(called)
            return
        code = frame.f_code
        if self._has_ended or event not in ("call", "return") or not code.co_filename.startswith(FOLDERS):
            return
        depth = getattr(self._importing, "depth", 0)
        if code.co_name == "<module>":
            self._importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth and code.co_flags & inspect.CO_OPTIMIZED:
            self.files.setdefault(str(Path(code.co_filename).relative_to(ROOT)))


def is_write(called: Any) -> bool:
    """Return whether a C function writes to stdout, as cli.terminal.output.write does; `print` only serves stderr."""
    owner = getattr(called, "__self__", None)
    return called.__name__ == "write" and owner is not None and owner in (sys.stdout, getattr(sys.stdout, "buffer", 0))


def main(arguments: list[str]) -> int:
    """Run a command line under the hook; its exit code."""
    journey = Journey()
    sys.argv = ["localllm", *arguments]
    from localllm.cli.main import main as command

    journey.start()
    code = 0
    try:
        command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.setprofile(None)
    threading.setprofile(None)
    print("", *journey.files, f"{len(journey.files)} files", sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
