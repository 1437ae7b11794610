"""The line editor of `localllm chat`, with history and multi-line texts; on stderr, since stdout is for answers."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, get_common_complete_suffix
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.bindings.search import accept_search_and_accept_input
from prompt_toolkit.output import DummyOutput, Output, create_output

from localllm.cli.terminal.dumb_editor import DumbLines, without_controls
from localllm.cli.terminal.history import FileHistory
from localllm.cli.terminal.output import exit_on_signals, has_colour, is_dumb, is_terminal
from localllm.system.processes import can_handle_in_loop, fatal_signals

QUOTES = '"""'
Complete = Callable[[str], Iterable[tuple[str, int]]]  # line up to the cursor -> (completion, its start in the line)


class LineEditor:
    """A line editor for prompts.

    Enter ends the text; Alt-Enter, or a backslash before Enter, begins a new line. After three quotes, Enter begins new
    lines until three more quotes are typed.
    """

    def __init__(self, complete: Complete = lambda line: ()) -> None:
        self._session: PromptSession[str] = PromptSession(
            prompt(),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=key_bindings(),
            history=FileHistory(),
            completer=Completions(complete),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
            output=screen(),
        )
        self._signal = 0  # that has asked to end

    def read(self, text: str = "") -> str:
        """Read one text, prefilled with `text`.

        Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C, and SystemExit when asked to end.
        """
        self._signal = 0
        try:
            text = self._session.prompt(default=text, pre_run=self._end_on_signals)
        finally:  # the editor's event loop has replaced the signal handlers
            exit_on_signals()
        if self._signal:
            raise SystemExit(128 + self._signal)
        return without_quotes(without_controls(text))

    def _end_on_signals(self) -> None:
        """Let the event loop handle signals between two of its callbacks.

        An exception inside a callback would leave the terminal unrestored, or be shown as the callback's error.
        """
        if can_handle_in_loop():
            for number in fatal_signals():
                asyncio.get_running_loop().add_signal_handler(number, self._end, number)

    def _end(self, number: int) -> None:
        future = self._session.app.future
        if future and not future.done():
            self._signal = number
            self._session.app.exit(result="")


class Completions(Completer):
    """Completions for prompt_toolkit."""

    def __init__(self, complete: Complete):
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        for text, begin in self._complete(line):
            yield Completion(text, start_position=begin - len(line))


class DumbEditor:
    """A line editor for a terminal without escape sequences: whole lines."""

    def __init__(self) -> None:
        self._lines = DumbLines()

    def read(self, text: str = "") -> str:
        """Read one text, as LineEditor.read; the given text is printed, and sent if the line is empty."""
        lines: list[str] = []
        if text:
            print(text, file=sys.stderr)
        while True:
            line = self._lines.read("  " if lines else "> ")
            if not line and not lines:
                raise EOFError
            goes_on = line.endswith("\\\n")
            lines.append(line.rstrip("\n").removesuffix("\\") if goes_on else line.rstrip("\n"))
            if not line or (not goes_on and not is_open("\n".join(lines))):
                return without_quotes("\n".join(lines)) or text


def editor(complete: Complete) -> LineEditor | DumbEditor:
    """Make the editor that suits the terminal."""
    return DumbEditor() if is_dumb() else LineEditor(complete)


def prompt() -> AnyFormattedText:
    return [("bold ansicyan" if has_colour() else "", "> ")]


def is_open(text: str) -> bool:
    """Return whether a text begins with three quotes that are not closed yet."""
    inner = text.strip()
    return inner.startswith(QUOTES) and not (len(inner) >= 2 * len(QUOTES) and inner.endswith(QUOTES))


def without_quotes(text: str) -> str:
    """Return the text between triple quotes, or all of it if there are none."""
    if not text.lstrip().startswith(QUOTES) or is_open(text):
        return text
    return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n")


def screen() -> Output:
    """Return the terminal on which the prompt can be shown, or a dummy output."""
    terminal: TextIO | None = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
    return DummyOutput() if terminal is None else create_output(terminal)


def key_bindings() -> KeyBindings:
    """Return key bindings: Enter sends the text, where prompt_toolkit would begin a new line."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        enter(event.current_buffer)

    @bindings.add("tab", filter=~is_searching)
    def complete(event: KeyPressEvent) -> None:
        """Insert the common prefix of all completions at once; show a menu if it adds nothing."""
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


def enter(buffer: Buffer) -> None:
    """Send the text, or begin a new line within triple quotes."""
    if buffer.complete_state:
        buffer.complete_state = None
    elif buffer.document.text_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    elif is_open(buffer.text):
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()
