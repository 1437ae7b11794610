"""Split text into passages: prose at headings and paragraphs, code at definitions, with an overlap."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from localllm.files.documents import PAGE_BREAK, PAGED, get_ending
from localllm.frozen import frozen
from localllm.services.search.code_blocks import FENCE

SIZE = 600  # characters of a passage, about 150 tokens
WHOLE = 1.5  # a section of up to this many times the size stays in one passage
CHARACTERS = 3  # minimum per token, for most embedding models
OVERLAP = 160  # characters of a paragraph that the next passage may repeat
HEADINGS = {".md", ".markdown", ".mdx", ".qmd", ".txt", ".adoc", ".org", ""}
CODE_ENDINGS = (
    ".py .pyi .js .jsx .ts .tsx .go .rs .c .h .cc .cpp .hpp .cs .java .kt .swift .scala .rb .php .pl .lua .sh .bash"
    " .zsh .fish .r .jl .sql .ex .hs"
)
CODE = frozenset(CODE_ENDINGS.split())
HEADING = re.compile(r"(#{1,6}|={1,5}|\*{1,5})[ \t]+(\S.*?)[ \t#=]*$")
DEFINITION = re.compile(
    r"(?:@\w|(?:(?:export|pub(?:\([^)]*\))?|public|private|protected|static|async|default|abstract|unsafe|inline) )*"
    r"(?:def|class|func|fn|function|struct|enum|interface|trait|impl|type|module|namespace|object|record|macro_rules!"
    r"|create|sub)\b|\w[\w ]*\(\) *\{|[A-Za-z_][\w *:<>,&]*\([^;]*\)\s*\{?\s*$)",
    re.IGNORECASE,
)


ITEM = re.compile(r" {0,3}(?:[-*+]|\d+[.)]) ")
MARGIN = 3  # a line indented by more columns than this, relative to the least indented one, continues the line before


@frozen
class Passage:
    """A range of lines in a file.

    Attributes:
        first, last: its line numbers, from 1.  heading: its section's, preceded by those of the enclosing sections.
        page: number of the page that it begins on, or of an EPUB's chapter; 0 for a file without pages.
    """

    path: str
    first: int
    last: int
    text: str
    heading: str = ""
    page: int = 0

    @property
    def place(self) -> str:
        """The path and the page, or the first line of a file without pages."""
        return f"{self.path}:{self.page or self.first}"

    @property
    def embedded(self) -> str:
        """The text to embed: the file's name and the heading, then the passage."""
        about = " > ".join(filter(None, (os.path.basename(self.path), self.heading)))
        return f"{about}\n{self.text}" if about else self.text


def compute_passage_size(context: int) -> int:
    """Return the characters of a passage for an embedding model with this context, in tokens."""
    return min(SIZE, max(200, CHARACTERS * (context - 16)))


def split_passages(path: str, text: str, size: int = SIZE) -> list[Passage]:
    """Split a file's text into passages, in order; every non-blank line is in one, and none is on two pages."""
    if PAGE_BREAK in text and get_ending(path) in PAGED:
        return split_pages(path, text, size)
    lines, ending = text.splitlines(), os.path.splitext(path)[1].lower()
    passages = list[Passage]()
    for first, last, heading in split_sections(lines, ending):
        blocks = [*split_blocks(lines, first, last, is_code=ending in CODE)]
        for begin, end in merge_blocks(lines, blocks, size):
            passages += split_block(path, lines, begin, end, heading, size)
    return passages


def split_pages(path: str, text: str, size: int) -> list[Passage]:
    """Split the text of a document with pages, which form feeds separate."""
    passages, before = list[Passage](), 0
    for number, page in enumerate(text.split(PAGE_BREAK), 1):
        passages += [
            replace(each, first=each.first + before, last=each.last + before, page=number)
            for each in split_passages(path, page, size)
        ]
        before += len((page + PAGE_BREAK).splitlines())
    return passages


def split_sections(lines: Sequence[str], ending: str) -> Iterator[tuple[int, int, str]]:
    """Yield sections as (first line, line after the last, headings)."""
    if ending in CODE or ending not in HEADINGS:
        yield 0, len(lines), ""
        return
    path, start, in_fence = list[tuple[int, str]](), 0, False
    starts = [(0, "")]
    for number, line in enumerate(lines):
        if FENCE.match(line):
            in_fence = not in_fence
        match = None if in_fence else HEADING.match(line)
        if match and not (match[1][0] == "*" and ending != ".org"):
            depth = len(match[1])
            path = [*((level, title) for level, title in path if level < depth), (depth, match[2])]
            starts.append((number, " > ".join(title for _, title in path)))
    begin: int | None = None
    for (start, heading), (end, _) in pairwise([*starts, (len(lines), "")]):
        begin = start if begin is None else begin
        is_bare = heading and not any(line.strip() for line in lines[start + 1 : end])  # a heading without text
        if not is_bare or end == len(lines):
            if any(line.strip() for line in lines[begin:end]):
                yield begin, end, heading
            begin = None


def split_blocks(lines: Sequence[str], first: int, last: int, is_code: bool) -> Iterator[tuple[int, int]]:
    """Yield paragraphs and list items, or code's definitions, as (first line, line after the last)."""
    start: int | None = None
    in_fence = False
    for number in range(first, last):
        line = lines[number]
        is_blank = not line.strip()
        if is_code:
            begins = bool(line[:1].strip()) and bool(DEFINITION.match(line))
            follows = number > first and lines[number - 1].startswith("@")
            if start is not None and begins and not follows:
                yield start, number
                start = None
        elif start is not None and not in_fence and (is_blank or ITEM.match(line)):
            yield start, number
            start = None
        if FENCE.match(line) and not is_code:
            in_fence = not in_fence
        if start is None and not is_blank:
            start = number
    if start is not None:
        yield start, last


def merge_blocks(lines: Sequence[str], blocks: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Merge consecutive small blocks to about `size` characters; repeat a short last block in the next passage."""

    def count_characters(begin: int, end: int) -> int:
        return sum(len(line) + 1 for line in lines[begin:end])

    if blocks and count_characters(blocks[0][0], blocks[-1][1]) <= WHOLE * size:
        yield blocks[0][0], blocks[-1][1]
        return
    begin = None
    for number, (start, end) in enumerate(blocks):
        if begin is None:
            begin = start
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        is_short = count_characters(begin, end) <= OVERLAP  # such as a heading or an introduction
        if following is None or (count_characters(begin, following[1]) > size and not is_short):
            yield begin, end
            overlaps = begin != start and count_characters(start, end) <= OVERLAP
            begin = start if following and overlaps and count_characters(start, following[1]) <= size else None


def split_block(path: str, lines: Sequence[str], begin: int, end: int, heading: str, size: int) -> Iterator[Passage]:
    """Yield a block as one passage, or as several of about equal length if it exceeds WHOLE sizes.

    It is split before unindented lines, if there are enough of them.
    """
    while end > begin and not lines[end - 1].strip():
        end -= 1
    remaining = sum(len(line) + 1 for line in lines[begin:end])
    start, length, aim = begin, 0, compute_equal_length(remaining, WHOLE * size)
    for first, last in split_indented_units(lines, begin, end, size):
        following = length + sum(len(line) + 1 for line in lines[first:last])
        if length > OVERLAP and (following > WHOLE * size or following - aim > aim - length):
            yield Passage(path, start + 1, first, "\n".join(lines[start:first]), heading)
            remaining -= length
            start, following, aim = first, following - length, compute_equal_length(remaining, WHOLE * size)
        length = following
    if start < end:
        yield Passage(path, start + 1, end, "\n".join(lines[start:end]), heading)


def split_indented_units(lines: Sequence[str], begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) for each line and the indented lines below it.

    If such a unit exceeds `size`, yield its lines one by one.
    """
    indents = [len(line) - len(line.lstrip()) for line in lines[begin:end]]
    margin = MARGIN + min((indent for indent, line in zip(indents, lines[begin:end], strict=True) if line.strip()))
    starts = [
        begin,
        *(begin + at for at in range(1, end - begin) if indents[at] <= margin and lines[begin + at].strip()),
    ]
    for first, last in pairwise([*starts, end]):
        if sum(len(line) + 1 for line in lines[first:last]) > size:
            yield from ((number, number + 1) for number in range(first, last))
        else:
            yield first, last


def compute_equal_length(length: int, maximum: float) -> float:
    """Return the length of equal segments, as few as possible, with at most `maximum` each."""
    return length / ceil(length / maximum) if length else 0
