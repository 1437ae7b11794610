"""Output: the answer goes to stdout as bytes, everything else to stderr, decoration only to a terminal.

Text from models and files is not trusted: control characters, which could move the cursor, change the window's title or
hide text, are never printed on a terminal.
"""

import json
import os
import re
import sys
from time import monotonic
from typing import BinaryIO, NoReturn, Self, TextIO

from localllm.system.processes import handle_termination, restore_termination
from localllm.system.terminal import is_console, is_silent, restore_terminal, supports_escapes

HINT_SECONDS = 2.0  # seconds before a hint about missing input, and before the first progress line of plain output
UPDATE_SECONDS = 10.0  # seconds between two progress lines of plain output
PLAIN = "LOCALLLM_PLAIN"  # the variable of --plain, for commands without that option, too
_is_plain = False  # whether --plain was given
# Replaced by U+FFFD: C0 and C1 controls except tab and newline, DEL, line separators, and marks that change the text
# direction.
_HARMFUL = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
# Dropped: zero-width spaces, invisible operators, and tag characters of flags.
_INVISIBLE = [0x180E, 0x200B, *range(0x2060, 0x2066), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC),
              *range(0xE0000, 0xE0080)]  # fmt: skip
_HARMLESS: dict[int, str | None] = {code: "\ufffd" for code in _HARMFUL if chr(code) not in "\t\n"}
_HARMLESS |= dict.fromkeys(_INVISIBLE) | {ord("\r"): None}
# Joiners are dropped unless they follow a letter of a script that joins letters, or are in an emoji.
_JOINERS = re.compile("(?<=[\\x00-\\xff\u200c\u200d])[\u200c\u200d]+")
_BREAKS = re.compile("[ \t]*[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]\\s*")


def make_printable(text: str) -> str:
    """Replace control characters, except tab and newline, and drop invisible characters."""
    return text if text.isascii() and text.isprintable() else _JOINERS.sub("", text.translate(_HARMLESS))


def join_lines(text: str) -> str:
    """Replace each line break or tab, and the spaces around it, by one space; keep other spaces."""
    return _BREAKS.sub(" ", text).strip(" ")


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and is_console(stream)
    except ValueError:  # closed
        return False


def write(text: str) -> None:
    """Write a segment of the answer to stdout and flush it: as UTF-8; on a terminal, printable characters only."""
    if is_terminal(sys.stdout):
        text = make_printable(text)
    sys.stdout.buffer.write(text.encode(errors="replace"))
    sys.stdout.buffer.flush()


def to_json_line(value: object) -> str:
    """Format a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def write_paths(text: str) -> None:
    """Write to stdout as `write` does; if not on a terminal, keep the exact bytes of paths."""
    if is_terminal(sys.stdout):
        return write(text)
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()


def open_stdin() -> BinaryIO:
    """Return stdin as a binary stream; print a hint if no input arrives for PATIENCE seconds."""
    if not is_terminal(sys.stdin) and is_silent(sys.stdin, HINT_SECONDS):
        say("localllm: waiting for input on stdin; use --no-stdin or </dev/null if there is none, Ctrl-C to quit")
    return sys.stdin.buffer


def end_output() -> None:
    """Close stdout, so that the reader of a pipe sees the end."""
    sys.stdout.flush()
    discard_output()


def discard_output() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """Print one line to stderr, wrapped between words on a terminal; do nothing if stderr is closed."""
    if sys.stderr is None:  # print would write to stdout
        return
    try:
        print(wrap_line(make_printable(join_lines(line)), sys.stderr), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def wrap_line(line: str, stream: TextIO | None) -> str:
    """Wrap a line between words at the terminal's width; return it unchanged if the stream is no terminal."""
    if not is_terminal(stream) or len(line) <= (width := get_width(stream)):
        return line
    from textwrap import fill

    return fill(line, width, break_long_words=False, break_on_hyphens=False)


def is_dumb() -> bool:
    """Return whether the terminal does not interpret escape sequences."""
    return os.environ.get("TERM") in ("dumb", "unknown") or not supports_escapes(sys.stdout, sys.stderr)


def set_plain(is_on: bool) -> None:
    """Print plain text from now on, as --plain requests."""
    global _is_plain
    _is_plain = is_on


def is_plain() -> bool:
    """Return whether to print plain text: no cursor movement, no colours, and states in words."""
    return _is_plain or os.environ.get(PLAIN, "").lower() in ("1", "true", "yes", "on") or is_dumb()


def has_colour() -> bool:
    """Return whether to use colours on a terminal, by TERM and no-color.org; an empty NO_COLOR has no effect."""
    return not os.environ.get("NO_COLOR") and not is_plain()


def add_attribute(text: str, code: str) -> str:
    """Add a terminal attribute to the text (ECMA-48's SGR): "1" bold, "2" dim, "36" cyan."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and has_colour() else text


def format_heading(name: str) -> str:
    """Return a heading for the reasoning or the answer if colours cannot tell them apart, else ""."""
    return "" if has_colour() else f"{name}:\n"


def say_dim(line: str) -> None:
    if is_plain():
        line = line.replace(" · ", ", ")  # screen readers read the dot out
    print_dim(wrap_line(join_lines(line), sys.stderr))


def print_dim(text: str) -> None:
    if is_terminal(sys.stderr):
        print(add_attribute(make_printable(text), "2"), file=sys.stderr, flush=True)


def get_size(stream: TextIO | None) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno() if stream else -1)
    except (OSError, ValueError, AttributeError):
        return 80, 24
    return size.columns or 80, size.lines or 24


def get_width(stream: TextIO | None) -> int:
    return get_size(stream)[0]


def truncate_columns(text: str, width: int) -> str:
    """Return the start of a text that fits `width` columns; most East Asian characters and emoji take two."""
    if text.isascii():
        return text[:width]
    from unicodedata import east_asian_width

    for end, character in enumerate(text):
        width -= 2 if east_asian_width(character) in "WF" else 1
        if width < 0:
            return text[:end]
    return text


def print_dim_inline(text: str) -> None:
    """Print dim text that continues the current line, only on a terminal."""
    if is_terminal(sys.stderr):
        print(add_attribute(make_printable(text), "2"), end="", file=sys.stderr, flush=True)


class ProgressLine:
    """A line on stderr that is overwritten, and removed at the end; a context manager.

    Plain output gets a new line from time to time; a file gets none.
    """

    def __init__(self) -> None:
        self._shown = ""
        self._next = 0.0  # time of the next line of plain output; 0: none shown yet

    def show(self, text: str) -> None:
        """Show the text, truncated to the terminal's width."""
        if not is_terminal(sys.stderr):
            return
        if is_plain():
            self._next = self._next or monotonic() + HINT_SECONDS
            if monotonic() >= self._next:
                self._next = monotonic() + UPDATE_SECONDS
                say(f"localllm: {text}")
            return
        text = truncate_columns(text, get_width(sys.stderr) - 1)
        if text != self._shown:
            self._shown = text
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        self._next = 0.0
        if self._shown:
            self._shown = ""
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def exit_on_signals() -> None:
    """Raise SystemExit on every signal that would end the process, so that terminal and files are restored."""

    def exit_on_signal(number: int, frame: object) -> NoReturn:
        restore_terminal()
        restore_termination()  # a second signal does not wait
        raise SystemExit(128 + number)

    handle_termination(exit_on_signal)
