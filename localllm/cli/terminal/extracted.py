"""Prints only a code block of the answer, while it is generated."""

from typing import TYPE_CHECKING

from localllm.cli.terminal.output import say
from localllm.cli.terminal.stream_renderer import Page, page
from localllm.services.search.code_blocks import BlockReader, extract_code

if TYPE_CHECKING:
    from localllm.generation.generate import Generation

CUT_OFF = "localllm: the code block is cut off, for the answer ended in it; raise -n or the context"
NO_BLOCK = "localllm: the answer has no code block; this is all of it"


class FirstBlock:
    """A Page that shows the first code block, and ends the answer after it."""

    def __init__(self, answer: "Generation"):
        self._answer, self._page, self._reader = answer, page(), BlockReader()
        self._text, self._held = "", ""

    def push(self, text: str, is_thought: bool = False) -> None:
        if is_thought or self._reader.is_done:
            return
        self._text += text
        self._show(self._reader.push(text))
        if self._reader.is_done:
            self._answer.stop()

    def _show(self, code: str) -> None:
        """Show all but the last line break, which `end` writes."""
        code = self._held + code
        self._held = "\n" if code.endswith("\n") else ""
        if shown_code := code.removesuffix("\n"):
            self._page.push(shown_code)

    def end(self) -> None:
        is_done = self._reader.is_done
        self._show(self._reader.end())
        if not self._reader.is_open:
            self._page.push(self._text)
        self._page.end()
        if not self._reader.is_open:
            say(NO_BLOCK)
        if self._reader.is_open and not is_done and self._answer.finish_reason == "length":
            say(CUT_OFF)


class LastBlock:
    """A Page that shows the last code block when the answer has ended."""

    def __init__(self) -> None:
        self._page, self._text = page(), ""

    def push(self, text: str, is_thought: bool = False) -> None:
        self._text += "" if is_thought else text

    def end(self) -> None:
        self._page.push(code_or_all(self._text, last=True))
        self._page.end()


def make_code_page(answer: "Generation", last: bool) -> Page:
    """Make the renderer of --extract, or of --extract-last."""
    return LastBlock() if last else FirstBlock(answer)


def code_or_all(text: str, last: bool) -> str:
    """Return an answer's first or last code block; without one, the whole answer, with a note on stderr."""
    code = extract_code(text, last)
    if code is None:
        say(NO_BLOCK)
    return text if code is None else code
