"""Take fenced code blocks out of Markdown, also while it is being generated.

Fences are those of CommonMark 0.31, section 4.5, but indented as far as one likes, as in lists.
"""

import re

FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`\n]*$)|~{3,})")  # a line that opens a block
MARKS = "`~"


class BlockReader:
    """Finds the first code block of a streamed text.

    Attributes:
        is_open, is_done: whether the block has begun, and whether it has ended.
    """

    def __init__(self) -> None:
        self._line, self._fence, self._indent, self._is_begun = "", "", "", False
        self.is_open = self.is_done = False

    def push(self, text: str) -> str:
        """Add a piece; return what of the block is certain now."""
        found = ""
        *whole, rest = f"{self._line}{text}".split("\n")
        for line in whole:
            found += self._whole_line(line)
            self._is_begun = False
        self._line = rest
        return found + self._beginning(rest)

    def end(self) -> str:
        """Return the rest of a block whose closing fence is missing."""
        if not self.is_open or self.is_done or self._closes(self._line):
            return ""
        return self._content(self._line)

    def _whole_line(self, line: str) -> str:
        if self.is_done:
            return ""
        if not self.is_open:
            if match := FENCE.match(line):
                self.is_open, self._fence = True, match[1]
                self._indent = line[: match.start(1)]
            return ""
        if not self._is_begun and self._closes(line):
            self.is_done = True
            return ""
        return f"{self._content(line)}\n"

    def _beginning(self, line: str) -> str:
        """Return the part of an unfinished line that cannot belong to a closing fence, and keep the rest."""
        if not self.is_open or self.is_done:
            return ""
        if not self._is_begun and (not line.strip() or line.lstrip()[0] == self._fence[0]):
            return ""
        found, self._line, self._is_begun = self._content(line), "", True
        return found

    def _content(self, line: str) -> str:
        """Remove from a line's beginning the indentation that its block has."""
        return line if self._is_begun else line.removeprefix(self._indent)

    def _closes(self, line: str) -> bool:
        mark = line.strip()
        return not self._is_begun and len(mark) >= len(self._fence) and not mark.strip(self._fence[0])


def code_blocks(text: str) -> list[str]:
    """Return the contents of all code blocks of a text, in order, without the line break at the end."""
    found = list[str]()
    reader, code = BlockReader(), ""
    for line in text.splitlines(keepends=True):
        code += reader.push(line)
        if reader.is_done:
            found.append(code.removesuffix("\n"))
            reader, code = BlockReader(), ""
    code += reader.end()
    return [*found, code.removesuffix("\n")] if reader.is_open and not reader.is_done else found


def extract_code(text: str, last: bool = False) -> str | None:
    """Return the content of a text's first code block, or the last one's; None if there is none."""
    blocks = code_blocks(text)
    return blocks[-1 if last else 0] if blocks else None
