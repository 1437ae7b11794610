"""A terminal for tests: the program on a pseudo-terminal, with typed keys and recorded output."""

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

import pexpect
from project import ROOT, SUPPORT

PROGRAM = [sys.executable, "-m", "localllm"]
PROMPT = "\x1b\\[[0-9;]*m> "  # as the editor draws it
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


class Terminal:
    """A program on a pseudo-terminal.

    Attributes:
        seen: all output so far.
        drawn: the output after the latest typed line.
    """

    def __init__(
        self,
        *arguments: str,
        columns: int = 120,
        program: Sequence[str] = PROGRAM,
        alone: bool = False,
        timeout: float = 90,
        **environment: str,
    ):
        """environment: variables besides those of this process, or instead of them if alone; timeout: seconds."""
        self.seen = self.drawn = ""
        known = {} if alone else {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(SUPPORT)))}
        known |= {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", **environment}
        self._process = pexpect.spawn(
            program[0],
            [*program[1:], *arguments],
            env=known,
            dimensions=(50, columns),
            encoding="utf-8",
            timeout=timeout,
        )
        self._process.delaybeforesend = None
        self._process.delayafterclose = self._process.ptyproc.delayafterclose = 0.01

    def expect(self, pattern: str) -> str:
        """Wait for a match in new output; return the output up to its end."""
        try:
            self._process.expect(pattern)
        except (pexpect.TIMEOUT, pexpect.EOF):
            raise AssertionError(f"{pattern!r} did not come: {self._process.before!r}") from None
        output = self._process.before + self._process.after
        self.seen += output
        return output

    def prompt(self) -> str:
        """Wait for the prompt and return the output before it."""
        return self.expect(PROMPT)

    def type(self, text: str) -> None:
        self._process.send(text)

    def say(self, text: str) -> str:
        """Type a line and return the visible output until the next prompt."""
        return self.press(f"{text}\r")

    def press(self, keys: str) -> str:
        """Press keys that send a line and return the visible output until the next prompt."""
        self.type(keys)
        self.expect("\x1b\\[\\?2004l")  # the editor has taken it
        self.drawn = self.prompt()
        return plain(self.drawn)

    def log(self, file: TextIO) -> None:
        """Set the width, once the editor has redrawn its prompt."""
        self._process.logfile_read = file

    def resize(self, columns: int) -> None:
        """Be as wide, once the editor has drawn its prompt anew."""
        if self._process.getwinsize() != (50, columns):
            self._process.setwinsize(50, columns)
            self.prompt()

    def signal(self, number: int) -> None:
        """Wait for the end and return the exit code, negative for a signal."""
        self._process.kill(number)

    def end(self) -> int:
        """Return the visible text, without overwritten lines."""
        self._process.expect(pexpect.EOF)
        self.seen += self._process.before
        self._process.close()
        return -self._process.signalstatus if self._process.signalstatus else self._process.exitstatus


def drawn(text: str) -> str:
    """Return a text without escape sequences."""
    return plain(re.sub("[^\n]*\r\x1b\\[2?K", "", text))


def plain(text: str) -> str:
    """Return the text without escape sequences."""
    return ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "")
