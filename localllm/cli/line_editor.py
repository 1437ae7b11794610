"""The prompt of `localllm chat`: editing, history, several lines. Drawn on stderr, because stdout is for answers."""

import sys
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import DummyOutput, Output, create_output

from localllm.cli.terminal import is_terminal


class LineEditor:
    """Reads what the user types. Enter ends it; Alt-Enter, or a backslash before Enter, begins a new line."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ", multiline=True, prompt_continuation="  ", key_bindings=key_bindings(), output=screen()
        )

    def read(self) -> str:
        """One text. Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C."""
        try:
            return self._session.prompt()
        finally:  # once more: a signal can end the editor before it tidies up
            self._session.output.disable_bracketed_paste()
            self._session.output.flush()


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
