"""List the product's files whose functions run before a command writes its first byte on stdout; count a token's calls.

    scripts/journey run MODEL -p Hi

Module and class bodies do not count as functions, nor does what they call during an import. All threads count; other
processes do not. The list goes to stderr after the command's own output, then the number of files, and for a streamed
answer the calls of functions between two pieces of text, as most pieces have them: a generator counts whenever it
resumes, a comprehension as a call of the function that it stands in.
"""

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("localllm", "quant"))


class Journey:
    """A profile hook that records files until the first byte is written, and calls between later writes.

    Attributes:
        files: paths relative to the repository, in the order in which their functions first ran.
        tokens: the functions that were called before each write of this thread after the first.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.tokens = list[list[CodeType]]()
        self._thread = threading.get_ident()
        self._importing = threading.local()  # .depth: how many module bodies of the product run in a thread

    def start(self) -> None:
        """Begin to record, in this thread and in those that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            if is_write(called):
                self.tokens.append([])
            return
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(FOLDERS):
            return
        if self.tokens:
            if event == "call" and threading.get_ident() == self._thread:
                self.tokens[-1].append(code)
            return
        depth = getattr(self._importing, "depth", 0)
        if code.co_name == "<module>":
            self._importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth and code.co_flags & inspect.CO_OPTIMIZED:
            self.files.setdefault(str(Path(code.co_filename).relative_to(ROOT)))

    def count_calls(self) -> tuple[int, int]:
        """Return the calls and the functions of a usual token; zeros for an answer of few pieces."""
        numbers = Counter(len(calls) for calls in self.tokens[2:-2])
        if not numbers:
            return 0, 0
        usual = numbers.most_common(1)[0][0]
        calls = next(calls for calls in self.tokens[2:-2] if len(calls) == usual)
        names = {(code.co_filename, code.co_qualname.partition(".<locals>")[0]) for code in calls}
        return usual, len(names)


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
    print("a token: {} calls of {} functions".format(*journey.count_calls()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
