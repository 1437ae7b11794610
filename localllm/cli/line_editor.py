"""The prompt of `localllm chat`: editing, history, several lines. Drawn on stderr, because stdout is for answers."""

import asyncio
import signal
import sys
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import DummyOutput, Output, create_output

from localllm.cli.terminal import exit_on_sigterm, is_terminal


class LineEditor:
    """Reads what the user types. Enter ends it; Alt-Enter, or a backslash before Enter, begins a new line."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ", multiline=True, prompt_continuation="  ", key_bindings=key_bindings(), output=screen()
        )
        self._is_ended = False

    def read(self) -> str:
        """One text. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C, and SystemExit when asked to end."""
        self._is_ended = False
        try:
            text = self._session.prompt(pre_run=self._end_on_sigterm)
        finally:  # the editor's event loop has taken the signal's handler away
            exit_on_sigterm()
        if self._is_ended:
            raise SystemExit(128 + signal.SIGTERM)
        return text

    def _end_on_sigterm(self) -> None:
        """The event loop hears of the signal between two of its callbacks: inside of one, an exception that ends it
        leaves the terminal as it is, or is shown as the callback's error.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)

    def _end(self) -> None:
        future = self._session.app.future
        if future and not future.done():
            self._is_ended = True
            self._session.app.exit(result="")


def screen() -> Output:
    """Where the prompt can be seen: a terminal, or nowhere."""
    terminal: TextIO | None = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
    return DummyOutput() if terminal is None else create_output(terminal)


def key_bindings() -> KeyBindings:
    """Enter sends, where prompt_toolkit's editor of several lines would begin a new one."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return bindings
