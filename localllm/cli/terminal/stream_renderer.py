"""Render an answer on a terminal while it is generated.

Lines are wrapped between words, and Markdown is rendered; or only a code block is shown.
"""

import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from localllm.cli.terminal import output as terminal

if TYPE_CHECKING:
    from localllm.generation.scheduler import Generation

# Characters that must not begin a line, in scripts without spaces.
NEVER_FIRST = frozenset("、。，．！？：；）」』】〕》〉”’…・ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ")
UNBREAKABLE = frozenset("\xa0\u2007\u202f")  # spaces that do not allow a line break
JOINER, TONES, FLAGS = "\u200d", ("\U0001f3fb", "\U0001f3ff"), ("\U0001f1e6", "\U0001f1ff")
FRAME_SECONDS = 0.05  # minimum seconds between two drawings of the same block
CUT_OFF = "localllm: the code block is incomplete because the answer reached its limit; raise -n or the context"
NO_BLOCK = "localllm: the answer has no code block; printing all of it"


class AnswerPage(Protocol):
    """A renderer of a streamed answer."""

    def push(self, text: str, is_thought: bool = False) -> None:
        """Add text of the answer."""

    def end(self) -> None:
        """End the answer; further output begins on a new line."""


def make_page(markdown: bool = False, names_answer: bool = False) -> AnswerPage:
    """Create a renderer that suits stdout.

    markdown: render Markdown if the terminal can.  names_answer: see WrappedPage.
    """
    if not terminal.is_terminal(sys.stdout):
        return PlainPage()
    return MarkdownPage() if markdown and not terminal.is_plain() else WrappedPage(names_answer=names_answer)


def get_width() -> int:
    return terminal.get_width(sys.stdout)


class PlainPage:
    def push(self, text: str, is_thought: bool = False) -> None:
        if not is_thought:
            terminal.write(text)

    def end(self) -> None:
        terminal.write("\n")


class WrappedPage:
    """Wraps at words; shows reasoning dim, or under a heading without colours, followed by an empty line.

    names_answer: without colours, an answer without reasoning has a heading, too.
    """

    def __init__(self, width: Callable[[], int] = get_width, names_answer: bool = False):
        self._width, self._wrapper, self._was_thought, self._has_begun = width, WordWrapper(width), False, False
        self._needs_name = names_answer

    def push(self, text: str, is_thought: bool = False) -> None:
        if self._needs_name and not is_thought:
            terminal.write(terminal.format_heading("answer"))
        self._needs_name = False
        if self._was_thought and not is_thought:
            self.end()
            terminal.write("\n" + terminal.format_heading("answer"))
            self._wrapper, self._has_begun = WordWrapper(self._width), False
        elif is_thought and not self._was_thought:
            self.end()
            terminal.write(terminal.format_heading("thinking"))
            self._wrapper, self._has_begun = WordWrapper(self._width), False
        if not self._has_begun:
            text = text.lstrip("\n")
        self._was_thought, self._has_begun = is_thought, self._has_begun or bool(text)
        self._write(self._wrapper.push(terminal.make_printable(text)))

    def _write(self, text: str) -> None:
        if text:
            dims = self._was_thought and not text.isspace()
            sys.stdout.buffer.write((terminal.add_attribute(text, "2") if dims else text).encode(errors="replace"))
            sys.stdout.buffer.flush()

    def end(self) -> None:
        self._write(self._wrapper.flush())
        if self._wrapper.column:
            terminal.write("\n")


class WordWrapper:
    """Breaks lines between words at the terminal's current width, except in code.

    A word is held back until it is complete, which is one token in most cases. Characters of scripts without spaces,
    and
    emoji, are words of their own; a word that exceeds a line is left to the terminal.

    Attributes:
        column: column of the next character.
    """

    def __init__(self, width: Callable[[], int]):
        self._width = width
        self._word, self._space, self._in_code = "", "", False
        self._begin_line()

    def _begin_line(self) -> None:
        self.column, self._space, self._has_words, self._is_endless = 0, "", False, False

    def push(self, text: str) -> str:
        """Add text; return the text that can be shown now."""
        *complete, last = split_clusters(self._word + text) or [""]
        self._word, output = "", ""
        for cluster in complete:
            output += self._add_cluster(cluster)
        if last and is_space(last):  # later text cannot change it
            return output + self._add_cluster(last)
        if self._word and begins_word(self._word, last):
            output += self._format_pending()
        self._word += last
        return output

    def flush(self) -> str:
        return self._format_pending()

    def _add_cluster(self, cluster: str) -> str:
        """Add a character (grapheme cluster); return the text that can be printed now."""
        if is_space(cluster):
            output = self._format_pending()
            self._is_endless = False
            if cluster != "\n":
                self._space += cluster
                return output
            self._begin_line()
            return output + "\n"
        output = self._format_pending() if self._word and begins_word(self._word, cluster) else ""
        self._word += cluster
        if measure_width(self._word) > self._width():
            output += self._format_pending()
            self._is_endless = True
        return output

    def _format_pending(self) -> str:
        """Return the pending word with the space or line break before it."""
        word, space, self._word = self._word, self._space, ""
        if not word:
            return ""
        width, size, gap, self._space = self._width(), measure_width(word), self._measure_gap(space), ""
        if not self._has_words and word.startswith("```"):
            self._in_code = not self._in_code
        self._has_words = True
        if self.column > width:  # the terminal became narrower, or broke a long word
            self.column %= width
        if self.column and not self._in_code and not self._is_endless and self.column + gap + size > width:
            self.column = size
            return f"\n{word}"
        if not self.column and not self._in_code and gap + size > width:  # the indentation leaves no room
            gap = max(0, width - size)
            space = " " * gap
        self.column += gap + size
        return space + word

    def _measure_gap(self, space: str) -> int:
        """Return the width in columns of white space at the current column."""
        column = self.column
        for character in space:
            column = column // 8 * 8 + 8 if character == "\t" else column + measure_width(character)
        return column - self.column


def is_space(cluster: str) -> bool:
    return cluster.isspace() and cluster not in UNBREAKABLE


def begins_word(word: str, cluster: str) -> bool:
    """Return whether a line may break between a word and a character without a space."""
    return cluster not in NEVER_FIRST and (is_wide(word[-1]) or is_wide(cluster[0]) or measure_width(cluster) > 1)


def is_wide(character: str) -> bool:
    """Return whether a character is wide, or a symbol that the next character may turn into an emoji."""
    return character > "\u1100" and (
        measure_width(character) > 1 or "\u2190" <= character <= "\u2bff" or character == "\ufe0f"
    )


def measure_width(text: str) -> int:
    """Return the width in columns of a text without control characters."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    return max(wcswidth(text), 0)


def split_clusters(text: str) -> list[str]:
    """Split a text into grapheme clusters: a letter with its accents, an emoji of several characters, a flag."""
    result: list[str] = []
    for character in text:
        if result and joins_cluster(result[-1], character):
            result[-1] += character
        else:
            result.append(character)
    return result


def joins_cluster(cluster: str, character: str) -> bool:
    """Return whether a character is displayed as part of the preceding cluster."""
    if character.isascii() or cluster == "\n":
        return False
    if cluster.endswith(JOINER) or TONES[0] <= character <= TONES[1]:
        return True
    if FLAGS[0] <= character <= FLAGS[1]:
        return len(cluster) == 1 and FLAGS[0] <= cluster <= FLAGS[1]
    return measure_width(character) == 0


class MarkdownPage:
    """A renderer of Markdown with rich, block by block; the last block is redrawn whenever it grows.

    If a block is higher than the screen, lines that have scrolled off stay unchanged.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(
            file=sys.stdout, force_terminal=True, no_color=not terminal.has_colour(), highlight=False
        )
        self._thoughts = WrappedPage()
        self._text, self._live, self._lines_done, self._drawn_at = "", 0, 0, 0.0
        self._has_thought = self._follows = False

    def push(self, text: str, is_thought: bool = False) -> None:
        if is_thought:
            self._has_thought = True
            return self._thoughts.push(text, is_thought)
        self._end_thoughts()
        self._text += terminal.make_printable(text)
        *complete, self._text = split_blocks(self._text)
        for block in complete:
            self._draw(block, is_whole=True)
        if self._text.strip() and monotonic() - self._drawn_at > FRAME_SECONDS:
            self._draw(self._text)

    def end(self) -> None:
        if self._has_thought and not self._text:
            return self._thoughts.end()
        self._end_thoughts()
        self._draw(self._text, is_whole=True)
        self._text = ""

    def _end_thoughts(self) -> None:
        if self._has_thought:
            self._has_thought = False
            self._thoughts.end()
            terminal.write("\n" + terminal.format_heading("answer"))

    def _draw(self, block: str, is_whole: bool = False) -> None:
        """Draw a block over its earlier, partial version."""
        self._console.size = terminal.get_size(sys.stdout)  # rich uses COLUMNS, which may be outdated
        lines = self._lay_out(block)
        fixed = len(lines) if is_whole else max(self._lines_done, len(lines) - (self._console.height - 2))
        output = f"\r\x1b[{self._live}A\x1b[J" if self._live else ""
        if lines and self._follows and not (self._live or self._lines_done):
            output = "\n"
        output += "".join(f"{line}\n" for line in lines[self._lines_done :])
        sys.stdout.buffer.write(output.encode(errors="replace"))
        sys.stdout.buffer.flush()
        self._live, self._lines_done, self._drawn_at = max(0, len(lines) - fixed), fixed, monotonic()
        if is_whole:
            self._lines_done, self._follows = 0, self._follows or bool(lines)

    def _lay_out(self, block: str) -> list[str]:
        """Lay out the text in lines as the terminal shows them."""
        from rich.markdown import Markdown as Rendered

        if not block.strip():
            return []
        with self._console.capture() as captured:
            self._console.print(Rendered(block, code_theme="ansi_dark", hyperlinks=False))
        return "\n".join(line.rstrip() for line in captured.get().split("\n")).strip("\n").split("\n")


def split_blocks(text: str) -> list[str]:
    """Split Markdown at empty lines outside fenced code; the last block may be incomplete."""
    texts, lines, in_code = [""], text.split("\n"), False
    for number, line in enumerate(lines):
        is_last = number == len(lines) - 1
        texts[-1] += line if is_last else f"{line}\n"
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        if not line.strip() and not is_last and not in_code:
            texts.append("")
    return texts


# ---- code blocks only


class FirstBlockPage:
    """A Page that shows the first code block, and stops the answer after it."""

    def __init__(self, answer: "Generation"):
        from localllm.services.search.code_blocks import CodeBlockReader  # seldom needed

        self._answer, self._page, self._reader = answer, make_page(), CodeBlockReader()
        self._text, self._held = "", ""

    def push(self, text: str, is_thought: bool = False) -> None:
        if is_thought or self._reader.is_done:
            return
        self._text += text
        self._show(self._reader.push(text))
        if self._reader.is_done:
            self._answer.stop()

    def _show(self, code: str) -> None:
        """Show all except the final line break, which `end` writes."""
        code = self._held + code
        self._held = "\n" if code.endswith("\n") else ""
        if shown_code := code.removesuffix("\n"):
            self._page.push(shown_code)

    def end(self) -> None:
        is_done = self._reader.is_done
        self._show(self._reader.finish())
        if not self._reader.is_open:
            self._page.push(self._text)
        self._page.end()
        if not self._reader.is_open:
            terminal.say(NO_BLOCK)
        if self._reader.is_open and not is_done and self._answer.finish_reason == "length":
            terminal.say(CUT_OFF)


class LastBlockPage:
    """A Page that shows the last code block after the end of the answer."""

    def __init__(self) -> None:
        self._page, self._text = make_page(), ""

    def push(self, text: str, is_thought: bool = False) -> None:
        self._text += "" if is_thought else text

    def end(self) -> None:
        self._page.push(extract_or_all(self._text, last=True))
        self._page.end()


def make_code_page(answer: "Generation", last: bool) -> AnswerPage:
    """Create the renderer of --extract or --extract-last."""
    return LastBlockPage() if last else FirstBlockPage(answer)


def extract_or_all(text: str, last: bool) -> str:
    """Return an answer's first or last code block; without one, the whole answer, with a note on stderr."""
    from localllm.services.search.code_blocks import extract_code  # seldom needed

    code = extract_code(text, last)
    if code is None:
        terminal.say(NO_BLOCK)
    return text if code is None else code
