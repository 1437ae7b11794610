"""The line editor of `localllm chat`, with history and multi-line input, on stderr since stdout is for answers."""

import asyncio
import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO
from unicodedata import category

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, get_common_complete_suffix
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.bindings.search import accept_search_and_accept_input
from prompt_toolkit.output import DummyOutput, Output, create_output

from localllm.cli.terminal.output import exit_on_signals, has_colour, is_plain, is_terminal, make_printable
from localllm.cli.terminal.stream_renderer import measure_width
from localllm.cli.terminal.type_ahead import switch_pastes
from localllm.errors import LocalllmError
from localllm.files.safe_file import SafeFile, create_private_folder
from localllm.system.files import get_user_folder, open_file
from localllm.system.processes import can_handle_in_loop, list_fatal_signals
from localllm.system.terminal import echoes_keys, is_silent, use_raw_keys

QUOTES = '"""'
Complete = Callable[[str], Iterable[tuple[str, int]]]  # line up to the cursor -> (completion, its start in the line)
ENDS, ERASE, ERASE_LINE, ERASE_WORD, END_KEY, ESCAPE = "\r\n", "\x7f\b", "\x15", "\x17", "\x04", "\x1b"  # keys
PASTE_MARKS = {"\x1b[200~": True, "\x1b[201~": False}  # bracketed paste: whether pasted text follows
ARROWS = {"\x1b[A": 1, "\x1bOA": 1, "\x1b[B": -1, "\x1bOB": -1}  # up and down: steps in the history, latest first
BYTES = 65536  # maximum bytes of one read
PASTE_GAP = (
    0.05  # seconds without a key after which a line break counts as typed, and an escape key as a key of its own
)
MAX_SEQUENCE = 4096  # maximum characters of an escape sequence
# Keys with escape sequences: control sequences, function keys, strings up to BEL or ST, and Alt with a key (ECMA-48).
SEQUENCE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O.|[]PX^_].*?(?:\x07|\x1b\\\\)|[^][OPX^_])", re.DOTALL)
MAX_BYTES, MAX_ENTRY = (
    1_000_000,
    50_000,
)  # maximum bytes of the file, before its older half is removed, and of an entry


class LineEditor:
    """A line editor for prompts.

    Enter ends the input; Alt-Enter, or a backslash before Enter, begins a new line. After three quotes, Enter begins
    new
    lines until three more quotes are typed.
    """

    def __init__(self, complete: Complete = lambda line: ()) -> None:
        self._session: PromptSession[str] = PromptSession(
            format_prompt(), multiline=True, prompt_continuation="  ", key_bindings=make_key_bindings(),
            history=FileHistory(),
            completer=LineCompleter(complete), complete_while_typing=False, enable_open_in_editor=True,
            enable_suspend=True, output=open_output(),
        )  # fmt: skip
        self._signal = 0  # the signal that requested the end

    def read(self, text: str = "") -> str:
        """Read one input, prefilled with `text`.

        Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C, and SystemExit on a signal.
        """
        self._signal = 0
        try:
            text = self._session.prompt(default=text, pre_run=self._end_on_signals)
        finally:  # the editor's event loop has replaced the signal handlers
            exit_on_signals()
        if self._signal:
            raise SystemExit(128 + self._signal)
        return strip_quotes(strip_controls(text))

    def _end_on_signals(self) -> None:
        """Let the event loop handle signals between two of its callbacks.

        An exception inside a callback would leave the terminal unrestored, or be shown as the callback's error.
        """
        if can_handle_in_loop():
            for number in list_fatal_signals():
                asyncio.get_running_loop().add_signal_handler(number, self._end, number)

    def _end(self, number: int) -> None:
        future = self._session.app.future
        if future and not future.done():
            self._signal = number
            self._session.app.exit(result="")


class LineCompleter(Completer):
    def __init__(self, complete: Complete):
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        for text, begin in self._complete(line):
            yield Completion(text, start_position=begin - len(line))


class PlainLineEditor:
    """A line editor for plain output, which reads whole lines and draws nothing again."""

    def __init__(self, complete: Complete = lambda line: ()) -> None:
        self._history = FileHistory()
        self._entries = [*self._history.load_history_strings()]  # latest first
        self._lines = RawLineReader(complete, self._entries)

    def read(self, text: str = "") -> str:
        """Read one input, as LineEditor.read does; `text` is printed, and returned if the line is empty."""
        lines: list[str] = []
        if text:
            print(text, file=sys.stderr)
        while True:
            line = self._lines.read("  " if lines else "> ")
            if not line and not lines:
                raise EOFError
            goes_on = line.endswith("\\\n")
            lines.append(line.rstrip("\n").removesuffix("\\") if goes_on else line.rstrip("\n"))
            entry = "\n".join(lines)
            if not line or (not goes_on and not has_open_quotes(entry)):
                if entry.strip() and entry not in self._entries[:1]:
                    self._entries.insert(0, entry)
                    self._history.store_string(entry)
                return strip_quotes(entry) or text


def make_editor(complete: Complete) -> LineEditor | PlainLineEditor:
    return PlainLineEditor(complete) if is_plain() else LineEditor(complete)


def format_prompt() -> AnyFormattedText:
    return [("bold ansicyan" if has_colour() else "", "> ")]


def has_open_quotes(text: str) -> bool:
    """Return whether a text begins with three quotes that are not closed."""
    inner = text.strip()
    return inner.startswith(QUOTES) and not (len(inner) >= 2 * len(QUOTES) and inner.endswith(QUOTES))


def strip_quotes(text: str) -> str:
    """Return the text between triple quotes, or all of it without them."""
    if not text.lstrip().startswith(QUOTES) or has_open_quotes(text):
        return text
    return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n")


def open_output() -> Output:
    terminal: TextIO | None = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
    return DummyOutput() if terminal is None else create_output(terminal)


def make_key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        handle_enter(event.current_buffer)

    @bindings.add("tab", filter=~is_searching)
    def complete(event: KeyPressEvent) -> None:
        """Insert the common prefix of all completions; show a menu if it adds nothing."""
        buffer = event.current_buffer
        if buffer.complete_state:
            return buffer.complete_next()
        assert buffer.completer
        offers = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if suffix := get_common_complete_suffix(buffer.document, offers):
            buffer.insert_text(suffix)
        elif len(offers) > 1:
            buffer.start_completion()

    # Enter sends the result of Ctrl-R, as in a shell; the arrow keys end the search and keep the result.
    bindings.add("enter", filter=is_searching)(accept_search_and_accept_input)
    return bindings


def handle_enter(buffer: Buffer) -> None:
    """Send the text, or begin a new line within triple quotes."""
    if buffer.complete_state:
        buffer.complete_state = None
    elif buffer.document.text_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    elif has_open_quotes(buffer.text):
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


# ---- plain output


class RawLineReader:
    """A line editor like the terminal's own, without its limit of 4095 bytes per line.

    A pasted text, or lines that arrive together, are one input. Lines typed before the prompt stay separate. What an
    arrow key finds in the history, and what Tab cannot complete alone, is printed on new lines.
    """

    def __init__(self, complete: Complete = lambda line: (), entries: Sequence[str] = ()) -> None:
        """Create a reader; entries: the history, latest first."""
        self._complete, self._entries, self._place, self._draft = complete, entries, -1, ""  # -1: what was typed
        self._prompt, self._is_pasting = "", False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting, self._last = "", ""  # keys typed after the line, and the last key
        self._sequence, self._typed_ahead = (
            "",
            False,
        )  # an incomplete escape sequence; whether keys were typed before the prompt

    def read(self, prompt: str) -> str:
        """Read one input with its line break; "" at the end of input. Raises KeyboardInterrupt."""
        typed: list[str] = []
        echoes = echoes_keys(sys.stdin)
        self._prompt, self._place, self._is_pasting = prompt, -1, False

        def show_prompt() -> None:
            switch_pastes(True)
            write_stderr(prompt + (format_displayed("".join(typed)) if echoes else ""))

        with use_raw_keys(sys.stdin, lambda: switch_pastes(False), show_prompt) as can:
            self._typed_ahead = can and (bool(self._waiting) or not is_silent(sys.stdin, 0))
            if self._typed_ahead:
                self._wait_for_keys()
            show_prompt()
            if not can:
                return sys.stdin.readline()
            try:
                return self._edit(typed, write_stderr if echoes else lambda text: None)
            except KeyboardInterrupt:
                write_stderr("\n")
                raise
            finally:
                switch_pastes(False)

    def _edit(self, typed: list[str], echo: Callable[[str], None]) -> str:
        """Read keys until the input ends; return it. `typed` always has the keys so far."""
        while self._wait_for_keys():
            keys, self._waiting = self._waiting, ""
            for index, key in enumerate(keys):
                previous_key, self._last = self._last, key
                if sequence := self._collect_sequence(key):
                    self._follow(sequence, typed, echo)
                    continue
                if key in ENDS:
                    if key == "\n" and previous_key == "\r":
                        continue
                    echo("\n")
                    rest = keys[index + 1 :].removeprefix("\n" if key == "\r" else "")
                    is_alone = self._typed_ahead or not (rest or not is_silent(sys.stdin, PASTE_GAP))
                    if is_alone and not self._is_pasting:
                        self._waiting = keys[index + 1 :]
                        return "".join(typed) + "\n"
                    typed.append("\n")
                elif key in ERASE or key in (ERASE_LINE, ERASE_WORD):
                    kept_length = compute_kept_length("".join(typed), key)
                    echo(
                        "\b \b"
                        * sum(measure_width(format_displayed(each)) for each in typed[kept_length:] if each != "\n")
                    )
                    del typed[kept_length:]
                elif key == END_KEY and not typed:
                    self._waiting = keys[index + 1 :]
                    return ""
                elif key == "\t" and index == len(keys) - 1 and not self._is_pasting and self._offer(typed, echo):
                    continue
                elif category(key) != "Cc" or key == "\t":
                    typed.append(key)
                    echo(format_displayed(key))
            self._typed_ahead = False
        return "".join(typed)

    def _collect_sequence(self, key: str) -> str:
        """Return the escape sequence so far that a key belongs to, such as an arrow key's; "" for other keys."""
        if self._sequence == ESCAPE and key in ENDS + ERASE:
            self._sequence = ""
        if not self._sequence and key != ESCAPE:
            return ""
        sequence = self._sequence = self._sequence + key
        if SEQUENCE.fullmatch(sequence) or len(sequence) > MAX_SEQUENCE:
            self._sequence = ""
        return sequence

    def _follow(self, sequence: str, typed: list[str], echo: Callable[[str], None]) -> None:
        """Obey a key's escape sequence: the marks of pasted text, and the arrow keys for the history."""
        if sequence in PASTE_MARKS:
            self._is_pasting = PASTE_MARKS[sequence]
        place = self._place + ARROWS.get(sequence, 0)
        if place == self._place or not -1 <= place < len(self._entries):
            return
        if self._place < 0:
            self._draft = "".join(typed)
        self._place = place
        typed[:] = self._entries[place] if place >= 0 else self._draft
        self._show_again("", typed, echo)

    def _offer(self, typed: list[str], echo: Callable[[str], None]) -> bool:
        """Complete the line as far as all completions agree, or list them; return whether there are any."""
        document = Document("".join(typed))
        offers = [*LineCompleter(self._complete).get_completions(document, CompleteEvent(completion_requested=True))]
        if suffix := get_common_complete_suffix(document, offers):
            typed += suffix
            echo(format_displayed(suffix))
        elif len(offers) > 1:
            self._show_again("  ".join(offer.text for offer in offers) + "\n", typed, echo)
        return bool(offers)

    def _show_again(self, text: str, typed: list[str], echo: Callable[[str], None]) -> None:
        """Print a text, the prompt and the line on new lines."""
        echo(f"\n{text}{self._prompt}{format_displayed(''.join(typed))}")

    def _wait_for_keys(self) -> bool:
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


def strip_controls(text: str) -> str:
    """Remove escape sequences and control characters, except tab and newline."""
    return "".join(each for each in SEQUENCE.sub("", text) if category(each) != "Cc" or each in "\n\t")


def compute_kept_length(text: str, key: str) -> int:
    """Return how many characters remain after an erase key."""
    if key == ERASE_LINE:
        return text.rfind("\n") + 1
    if key == ERASE_WORD:
        return len(text.rstrip()) and len(text.rstrip().rpartition(" ")[0]) + (" " in text.rstrip())
    return max(0, len(text) - 1)


def format_displayed(text: str) -> str:
    """Return the text as it is printed, on one line."""
    return make_printable(text.replace("\t", " "))


def write_stderr(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


# ---- history


class FileHistory(History):
    """History for prompt_toolkit; without a usable file, entries are kept until the program ends."""

    def __init__(self, path: Path | None = None):
        super().__init__()
        self.path = path or get_user_folder("state") / "history"

    def load_history_strings(self) -> Iterable[str]:
        """Yield the entries, latest first; skip invalid lines."""
        for line in reversed(self._read_lines()):
            with suppress(ValueError, RecursionError):
                text = json.loads(line)
                if isinstance(text, str):
                    yield text

    def _read_lines(self) -> list[bytes]:
        try:
            return self.path.read_bytes().splitlines(keepends=True)
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry; several programs may do so concurrently."""
        line = json.dumps(string).encode() + b"\n"
        if len(line) > MAX_ENTRY:
            return
        with suppress(OSError, LocalllmError):
            create_private_folder(self.path.parent)
            descriptor = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line)
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > MAX_BYTES:
                self._shorten()

    def _shorten(self) -> None:
        lines, size = list[bytes](), 0
        for line in reversed(self._read_lines()):
            size += len(line)
            if size > MAX_BYTES // 2:
                break
            lines.append(line)
        with SafeFile(self.path) as file:
            file.write(b"".join(reversed(lines)))
        self.path.chmod(0o600)
