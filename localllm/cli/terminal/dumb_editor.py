"""Reads lines in `localllm chat` on a terminal without escape sequences."""

import codecs
import os
import sys
from collections.abc import Callable

from localllm.cli.terminal.output import printable
from localllm.cli.terminal.stream_renderer import cells
from localllm.system.terminal import raw_keys, shows_keys

ENDS, ERASE, ERASE_LINE, ERASE_WORD, LEAVE = "\r\n", "\x7f\b", "\x15", "\x17", "\x04"  # keys
BYTES = 65536  # that are read at once


class DumbLines:
    """A line editor like the terminal's own, without its limit of 4095 bytes per line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting, self._last = "", ""  # keys typed after the line, and the last key

    def read(self, prompt: str) -> str:
        """Read one line with its line break; "" at the end of input. Raises KeyboardInterrupt."""
        typed: list[str] = []
        echoes = shows_keys(sys.stdin)

        def show() -> None:
            print(prompt + (display_line("".join(typed)) if echoes else ""), end="", file=sys.stderr, flush=True)

        with raw_keys(sys.stdin, come_back=show) as can:
            show()
            if not can:
                return sys.stdin.readline()
            try:
                return self._edit(typed, write if echoes else lambda text: None)
            except KeyboardInterrupt:
                write("\n")
                raise

    def _edit(self, typed: list[str], echo: Callable[[str], None]) -> str:
        """Read keys until the line ends and return it; `typed` always has the keys so far."""
        while self._more():
            keys, self._waiting = self._waiting, ""
            for place, key in enumerate(keys):
                previous_key, self._last = self._last, key
                if key in ENDS:
                    if key == "\n" and previous_key == "\r":
                        continue
                    self._waiting = keys[place + 1 :]
                    echo("\n")
                    return "".join(typed) + "\n"
                if key in ERASE or key in (ERASE_LINE, ERASE_WORD):
                    kept_length = length_after_erasing("".join(typed), key)
                    echo("\b \b" * sum(cells(display_line(each)) for each in typed[kept_length:]))
                    del typed[kept_length:]
                elif key != LEAVE:
                    typed.append(key)
                    echo(display_line(key))
                elif not typed:  # else Ctrl-D sends the incomplete line, as some editors do
                    self._waiting = keys[place + 1 :]
                    return ""
        return "".join(typed)

    def _more(self) -> bool:
        """Wait for keys; return whether there are any."""
        while not self._waiting:
            try:
                data = os.read(sys.stdin.fileno(), BYTES)
            except OSError:  # the terminal is gone
                return False
            if not data:
                return False
            self._waiting = self._decoder.decode(data)
        return True


def length_after_erasing(text: str, key: str) -> int:
    """Return how many characters remain after an erase key."""
    if key == ERASE_LINE:
        return 0
    if key == ERASE_WORD:
        return len(text.rstrip()) and len(text.rstrip().rpartition(" ")[0]) + (" " in text.rstrip())
    return max(0, len(text) - 1)


def display_line(text: str) -> str:
    """Return the text as it is printed, on one line."""
    return printable(text.replace("\t", " "))


def write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
