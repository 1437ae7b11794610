"""Reads lines in `localllm chat` on a terminal without escape sequences."""

import codecs
import os
import re
import sys
from collections.abc import Callable
from unicodedata import category

from localllm.cli.terminal.output import printable
from localllm.cli.terminal.stream_renderer import cells
from localllm.system.terminal import is_silent, raw_keys, shows_keys

ENDS, ERASE, ERASE_LINE, ERASE_WORD, LEAVE, ESCAPE = "\r\n", "\x7f\b", "\x15", "\x17", "\x04", "\x1b"  # keys
BYTES = 65536  # that are read at once
PASTE_GAP = 0.05  # seconds without a key after which a line break was typed, and an escape key is no sequence
LONGEST = 4096  # characters of an escape sequence
# Keys with escape sequences: control sequences, function keys, strings up to BEL or ST, and Alt with a key (ECMA-48).
SEQUENCE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O.|[]PX^_].*?(?:\x07|\x1b\\\\)|[^][OPX^_])", re.DOTALL)


class DumbLines:
    """A line editor like the terminal's own, without its limit of 4095 bytes per line.

    Lines that arrive at once, as pasted text does, are one text. Those typed before the prompt stay lines of their own.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting, self._last = "", ""  # keys typed after the line, and the last key
        self._sequence, self._typed_ahead = "", False  # an incomplete escape sequence; whether keys came before

    def read(self, prompt: str) -> str:
        """Read one text with its line break; "" at the end of input. Raises KeyboardInterrupt."""
        typed: list[str] = []
        echoes = shows_keys(sys.stdin)

        def show() -> None:
            print(prompt + (display_line("".join(typed)) if echoes else ""), end="", file=sys.stderr, flush=True)

        with raw_keys(sys.stdin, come_back=show) as can:
            self._typed_ahead = can and (bool(self._waiting) or not is_silent(sys.stdin, 0))
            if self._typed_ahead:
                self._more()
            show()
            if not can:
                return sys.stdin.readline()
            try:
                return self._edit(typed, write if echoes else lambda text: None)
            except KeyboardInterrupt:
                write("\n")
                raise

    def _edit(self, typed: list[str], echo: Callable[[str], None]) -> str:
        """Read keys until the text ends and return it; `typed` always has the keys so far."""
        while self._more():
            keys, self._waiting = self._waiting, ""
            for place, key in enumerate(keys):
                previous_key, self._last = self._last, key
                if self._is_in_sequence(key):
                    continue
                if key in ENDS:
                    if key == "\n" and previous_key == "\r":
                        continue
                    echo("\n")
                    rest = keys[place + 1 :].removeprefix("\n" if key == "\r" else "")
                    if self._typed_ahead or not (rest or not is_silent(sys.stdin, PASTE_GAP)):
                        self._waiting = keys[place + 1 :]
                        return "".join(typed) + "\n"
                    typed.append("\n")
                elif key in ERASE or key in (ERASE_LINE, ERASE_WORD):
                    kept_length = length_after_erasing("".join(typed), key)
                    echo("\b \b" * sum(cells(display_line(each)) for each in typed[kept_length:] if each != "\n"))
                    del typed[kept_length:]
                elif key == LEAVE and not typed:
                    self._waiting = keys[place + 1 :]
                    return ""
                elif category(key) != "Cc" or key == "\t":
                    typed.append(key)
                    echo(display_line(key))
            self._typed_ahead = False
        return "".join(typed)

    def _is_in_sequence(self, key: str) -> bool:
        """Return whether a key belongs to an escape sequence, such as that of an arrow key."""
        if self._sequence == ESCAPE and key in ENDS + ERASE:
            self._sequence = ""
        if not self._sequence and key != ESCAPE:
            return False
        self._sequence += key
        if SEQUENCE.fullmatch(self._sequence) or len(self._sequence) > LONGEST:
            self._sequence = ""
        return True

    def _more(self) -> bool:
        """Wait for keys; return whether there are any."""
        if self._sequence and not self._waiting and is_silent(sys.stdin, PASTE_GAP):
            self._sequence = ""  # the escape key alone
        while not self._waiting:
            try:
                data = os.read(sys.stdin.fileno(), BYTES)
            except OSError:  # the terminal is gone
                return False
            if not data:
                return False
            self._waiting = self._decoder.decode(data)
        return True


def without_controls(text: str) -> str:
    """Return a text without escape sequences and control characters, except tab and newline."""
    return "".join(each for each in SEQUENCE.sub("", text) if category(each) != "Cc" or each in "\n\t")


def length_after_erasing(text: str, key: str) -> int:
    """Return how many characters remain after an erase key."""
    if key == ERASE_LINE:
        return text.rfind("\n") + 1
    if key == ERASE_WORD:
        return len(text.rstrip()) and len(text.rstrip().rpartition(" ")[0]) + (" " in text.rstrip())
    return max(0, len(text) - 1)


def display_line(text: str) -> str:
    """Return the text as it is printed, on one line."""
    return printable(text.replace("\t", " "))


def write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
