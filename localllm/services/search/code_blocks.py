"""Extract fenced code blocks from Markdown, also while it streams.

Fences are those of CommonMark 0.31, section 4.5, but with any indentation, as in lists.
"""

import re

FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`\n]*$)|~{3,})")  # a line that opens a block
MARKS = "`~"


class CodeBlockReader:
    """Extracts the first code block of streamed text.

    Attributes:
        is_open, is_done: whether the block has begun, and whether it has ended.
    """

    def __init__(self) -> None:
        self._line, self._fence, self._indent, self._is_begun = "", "", "", False
        self.is_open = self.is_done = False

    def push(self, text: str) -> str:
        """Add text; return the block's new content, except what may still be a closing fence."""
        content = ""
        *lines, rest = f"{self._line}{text}".split("\n")
        for line in lines:
            content += self._read_line(line)
            self._is_begun = False
        self._line = rest
        return content + self._read_partial_line(rest)

    def finish(self) -> str:
        """Return the rest of a block whose closing fence is missing."""
        if not self.is_open or self.is_done or self._is_closing_fence(self._line):
            return ""
        return self._strip_indent(self._line)

    def _read_line(self, line: str) -> str:
        if self.is_done:
            return ""
        if not self.is_open:
            if match := FENCE.match(line):
                self.is_open, self._fence = True, match[1]
                self._indent = line[: match.start(1)]
            return ""
        if not self._is_begun and self._is_closing_fence(line):
            self.is_done = True
            return ""
        return f"{self._strip_indent(line)}\n"

    def _read_partial_line(self, line: str) -> str:
        """Return the start of an unfinished line unless it may be a closing fence; keep the rest."""
        if not self.is_open or self.is_done:
            return ""
        if not self._is_begun and (not line.strip() or line.lstrip()[0] == self._fence[0]):
            return ""
        content, self._line, self._is_begun = self._strip_indent(line), "", True
        return content

    def _strip_indent(self, line: str) -> str:
        """Remove the block's indentation from a line."""
        return line if self._is_begun else line.removeprefix(self._indent)

    def _is_closing_fence(self, line: str) -> bool:
        mark = line.strip()
        return not self._is_begun and len(mark) >= len(self._fence) and not mark.strip(self._fence[0])


def extract_code_blocks(text: str) -> list[str]:
    """Return the contents of all code blocks in order, each without its final line break."""
    blocks = list[str]()
    reader, code = CodeBlockReader(), ""
    for line in text.splitlines(keepends=True):
        code += reader.push(line)
        if reader.is_done:
            blocks.append(code.removesuffix("\n"))
            reader, code = CodeBlockReader(), ""
    code += reader.finish()
    return [*blocks, code.removesuffix("\n")] if reader.is_open and not reader.is_done else blocks


def extract_code(text: str, last: bool = False) -> str | None:
    """Return the content of the first or last code block, or None."""
    blocks = extract_code_blocks(text)
    return blocks[-1 if last else 0] if blocks else None
