"""The text of PDF, Word, EPUB and HTML files. A form feed separates pages, or an EPUB's chapters, as pdftotext does.

PDF needs pypdfium2 (Chrome's PDF library), which the extra `documents` installs; the others are zip files of XML, or
HTML, which Python reads.
"""

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from posixpath import dirname, join, normpath
from unicodedata import normalize
from urllib.parse import unquote
from xml.etree import ElementTree

from localllm.errors import UsageError
from localllm.files.gguf.header import printable

PDF, WORD, EPUB = ".pdf", ".docx", ".epub"
HTML = ".html", ".htm", ".xhtml"
PAGED = PDF, WORD, EPUB
PAGE_BREAK = "\f"
MISSING = "reading PDF needs pypdfium2: pip install 'localllm[documents]'"
MAX_PART_BYTES = 64 << 20  # of a part of a zip file, unpacked
LIGATURES = str.maketrans({
    "ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st",
    "\x1b": "ff", "\x1c": "fi", "\x1d": "fl", "\x1e": "ffi", "\x1f": "ffl",  # in LaTeX's T1 fonts of bitmaps
})  # fmt: skip
DIVIDED = re.compile("(\\w+)[\x02\ufffe]\n?(\\w*)")  # PDFium marks the hyphen of a word that two lines share
# LaTeX's older fonts print an accent and then its letter, as in "caf´e" and "na¨ıve".
ACCENTS = dict(zip("´`¨ˆ˜¸˚ˇ˘¯", "\u0301\u0300\u0308\u0302\u0303\u0327\u030a\u030c\u0306\u0304", strict=True))
ACCENTED = re.compile(f"([{''.join(set(ACCENTS) - {'`'})}]|(?<=[a-z])`) ?([A-Za-zıȷ])")
W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
PAGES = "{http://schemas.openxmlformats.org/officeDocument/2006/extended-properties}Pages"
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats what stands before it
CONTAINER, OPF = "{urn:oasis:names:tc:opendocument:xmlns:container}", "{http://www.idpf.org/2007/opf}"


class MissingPackageError(UsageError):
    """A file that only an extra can read."""


def get_ending(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.fspath(path))[1].lower()


def is_document(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name says that it is one of these."""
    return get_ending(path) in (*PAGED, *HTML)


def read_document(path: str | os.PathLike[str]) -> str:
    """Return a document's text, with a form feed between pages.

    Raises UsageError, which begins with the path, for a file that cannot be read, is damaged or encrypted, or has no
    text; MissingPackageError without the package for it.
    """
    name, ending = printable(os.fspath(path), 4096), get_ending(path)
    try:
        if ending == PDF:
            text = read_pdf(path)
        elif ending in HTML:
            text = convert_html(Path(path).read_bytes())
        else:
            with zipfile.ZipFile(path) as file:
                text = read_word(file) if ending == WORD else read_epub(file)
    except MissingPackageError as error:
        raise MissingPackageError(f"{name}: {error}") from None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror or error}") from None
    except (
        zipfile.BadZipFile,
        ElementTree.ParseError,
        KeyError,
        ValueError,
        NotImplementedError,
        EOFError,
        RecursionError,
    ):
        raise UsageError(f"{name}: not a valid {ending[1:].upper()} file") from None
    if not text.strip():
        advice = ": it may be scanned, run OCR first" if ending == PDF else ""
        raise UsageError(f"{name}: the file contains no text{advice}")
    return text


def mark_pages(text: str) -> str:
    """Replace form feeds by lines with the number of the page that begins, for a model."""
    first, *rest = text.split(PAGE_BREAK)
    return "\n\n".join([first.strip(), *(f"[page {number}]\n{page.strip()}" for number, page in enumerate(rest, 2))])


def require_pdf_package() -> None:
    """Raise MissingPackageError without pypdfium2."""
    if find_spec("pypdfium2") is None:
        raise MissingPackageError(MISSING)


def read_pdf(path: str | os.PathLike[str]) -> str:
    """Return a PDF's text. Raises UsageError, OSError."""
    require_pdf_package()
    from pypdfium2 import PdfDocument, PdfiumError  # an extra

    with open(path, "rb") as file:
        data = file.read()
    try:
        with closing(PdfDocument(data)) as document:
            return join_divided_words(f"\n{PAGE_BREAK}".join(read_pdf_pages(document)))
    except PdfiumError as error:
        if "password" in str(error).lower():
            raise UsageError("is encrypted: save it without its password first") from None
        raise UsageError("not a valid PDF file") from None


def read_pdf_pages(document: object) -> Iterator[str]:
    for page in document:  # type: ignore[attr-defined]
        with closing(page), closing(page.get_textpage()) as characters:
            text = characters.get_text_bounded().replace("\r\n", "\n").replace("\r", "\n").replace(PAGE_BREAK, "\n")
            yield ACCENTED.sub(compose_accent, text.translate(LIGATURES).replace("\0", ""))


def compose_accent(match: re.Match[str]) -> str:
    """Return the letter with its accent, or what the PDF has if there is no such letter."""
    letter = {"ı": "i", "ȷ": "j"}.get(match[2], match[2])
    composed = normalize("NFC", letter + ACCENTS[match[1]])
    return composed if len(composed) == 1 else match[0]


def join_divided_words(text: str) -> str:
    """Join words that two lines share; keep the hyphen of one that has it elsewhere in the text, as "well-known"."""
    hyphenated = set(re.findall(r"\w+-\w+", text))
    return DIVIDED.sub(lambda match: match[1] + "-" * (f"{match[1]}-{match[2]}" in hyphenated) + match[2], text)


def read_part(file: zipfile.ZipFile, name: str) -> bytes:
    """Read a part of a zip file. Raises KeyError without it, UsageError if it is encrypted or too large."""
    info = file.getinfo(name)
    if info.flag_bits & 1:
        raise UsageError("is encrypted: save it without its password first")
    if info.file_size > MAX_PART_BYTES:
        raise UsageError(f"{printable(name)} exceeds the limit of {MAX_PART_BYTES >> 20} MB")
    with file.open(info) as part:
        data = part.read(MAX_PART_BYTES + 1)
    if len(data) > MAX_PART_BYTES:
        raise UsageError(f"{printable(name)} exceeds the limit of {MAX_PART_BYTES >> 20} MB")
    return data


def parse_xml(data: bytes) -> ElementTree.Element:
    """Parse XML. Raises ParseError, ValueError for a part that declares entities, which may expand without end."""
    if b"<!ENTITY" in data:
        raise ValueError("entities are not supported")
    return ElementTree.fromstring(data)


# ---- Word


def read_word(file: zipfile.ZipFile) -> str:
    """Return the text of a .docx file: paragraphs, rows of tables, and notes at the end.

    Pages are those at which the program that saved it broke lines (`lastRenderedPageBreak`). LibreOffice only records
    how many there are: if the text has as many breaks of its own, these are the pages.
    """
    body = parse_xml(read_part(file, "word/document.xml")).find(f"{W}body")
    if body is None:
        raise ValueError("no body")
    mark_own_breaks(body, read_page_count(file))
    blocks = [*read_blocks(body)]
    for part in ("word/footnotes.xml", "word/endnotes.xml"):
        if part in file.namelist():
            notes = parse_xml(read_part(file, part))
            blocks += [text for note in notes if note.get(f"{W}type") is None for text in read_blocks(note)]
    return "\n".join(blocks).replace(f"{PAGE_BREAK}\n", f"\n{PAGE_BREAK}")


def read_page_count(file: zipfile.ZipFile) -> int:
    """Return the number of pages that the program which saved a .docx file counted, 0 if it did not."""
    if "docProps/app.xml" not in file.namelist():
        return 0
    text = parse_xml(read_part(file, "docProps/app.xml")).findtext(PAGES) or ""
    return int(text) if text.isdecimal() else 0


def mark_own_breaks(body: ElementTree.Element, pages: int) -> None:
    """Mark the breaks that a text's author made as rendered ones, if they are all breaks between this many pages."""
    rendered = f"{W}lastRenderedPageBreak"
    breaks = [each for each in body.iter(f"{W}br") if each.get(f"{W}type") == "page"]
    before = ((each, each.find(f"{W}pPr/{W}pageBreakBefore")) for each in body.iter(f"{W}p"))
    paragraphs = [each for each, mark in before if mark is not None and mark.get(f"{W}val") not in ("0", "false")]
    if body.find(f".//{rendered}") is None and len(breaks) + len(paragraphs) + 1 == pages:
        for each in breaks:
            each.tag = rendered
        for each in paragraphs:
            each.insert(0, ElementTree.Element(rendered))


def read_blocks(parent: ElementTree.Element) -> Iterator[str]:
    """Yield the text of each paragraph, and of each row of a table with tabs between its cells."""
    for block in parent:
        if block.tag == f"{W}p":
            yield "".join(read_inline(block))
        elif block.tag == f"{W}tbl":
            for row in block.iter(f"{W}tr"):
                yield "\t".join(" ".join(read_blocks(cell)) for cell in row.findall(f"{W}tc"))
        elif block.tag != FALLBACK:  # content controls, insertions and the like
            yield from read_blocks(block)


def read_inline(element: ElementTree.Element) -> Iterator[str]:
    """Yield the texts of a paragraph; text boxes in it follow in lines of their own."""
    plain = {f"{W}tab": "\t", f"{W}br": "\n", f"{W}cr": "\n", f"{W}noBreakHyphen": "-"}
    for each in element:
        if each.tag == f"{W}t":
            yield each.text or ""
        elif each.tag == f"{W}lastRenderedPageBreak":
            yield PAGE_BREAK
        elif each.tag == f"{W}txbxContent":
            yield "\n" + "\n".join(read_blocks(each))
        elif each.tag in plain:
            yield plain[each.tag]
        elif each.tag not in (FALLBACK, f"{W}pPr", f"{W}rPr", f"{W}delText"):
            yield from read_inline(each)


# ---- EPUB


def read_epub(file: zipfile.ZipFile) -> str:
    """Return the text of an EPUB, its chapters in reading order."""
    container = parse_xml(read_part(file, "META-INF/container.xml"))
    rootfile = container.find(f".//{CONTAINER}rootfile")
    opf = "" if rootfile is None else rootfile.get("full-path", "")
    package = parse_xml(read_part(file, opf))
    hrefs = {item.get("id"): item.get("href", "") for item in package.iter(f"{OPF}item")}
    names = [normpath(join(dirname(opf), unquote(hrefs[each.get("idref")]))) for each in package.iter(f"{OPF}itemref")]
    if "META-INF/encryption.xml" in file.namelist():
        encryption = read_part(file, "META-INF/encryption.xml").decode(errors="replace")
        if any(name in encryption for name in names):
            raise UsageError("is encrypted (DRM): it cannot be read")
    return f"\n{PAGE_BREAK}".join(convert_html(read_part(file, name)) for name in names)


# ---- HTML

BLOCK_NAMES = (
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure footer"
    " form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu nav ol optgroup option p pre section summary"
    " table tbody tfoot thead title tr ul"
)
BLOCKS = frozenset(BLOCK_NAMES.split())
SKIPPED = frozenset(("script", "style", "template", "svg", "annotation", "noscript", "iframe", "object"))
CHARSET = re.compile(rb"""<meta[^>]*charset\s*=\s*["']?\s*([\w-]+)|<\?xml[^>]*encoding\s*=\s*["']([\w-]+)""", re.I)


class TextExtractor(HTMLParser):
    """Collects the text of HTML, in lines as a browser would break them at blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._lines, self._line = list[str](), ""
        self._skipped = self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._skipped += 1
        elif tag == "br":
            self._break()
        elif tag in BLOCKS:
            self._break(has_margin=tag in ("p", "pre", "table", "ul", "ol", "blockquote") or tag[0] == "h")
            self._preformatted += tag == "pre"
            self._line = "- " if tag == "li" else ""
        elif tag in ("td", "th") and self._line.strip():
            self._line += "\t"
        elif tag == "img" and not self._skipped:
            self._line += dict(attrs).get("alt") or ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SKIPPED:  # <script/> has no end
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipped = max(self._skipped - 1, 0)
        elif tag in BLOCKS:
            self._break(has_margin=tag in ("p", "pre", "table") or tag in ("h1", "h2", "h3", "h4", "h5", "h6"))
            self._preformatted = max(self._preformatted - (tag == "pre"), 0)

    def handle_data(self, data: str) -> None:
        if self._skipped:
            return
        if self._preformatted:
            first, *rest = data.split("\n")
            self._line += first
            for line in rest:
                self._lines.append(self._line.rstrip())
                self._line = line
            return
        words = re.sub(r"[ \t\n\r\f]+", " ", data)
        self._line += words.lstrip(" ") if not self._line or self._line[-1] in " \t" else words

    def _break(self, has_margin: bool = False) -> None:
        if self._line.strip(" \t-"):
            self._lines.append(self._line.rstrip())
        self._line = ""
        if has_margin and self._lines and self._lines[-1]:
            self._lines.append("")

    def get_text(self) -> str:
        """Return the text, after `close`."""
        self._break()
        return "\n".join(self._lines).strip("\n")


def convert_html(data: bytes) -> str:
    """Return the text of an HTML file, in the encoding that it declares, by default UTF-8."""
    declared = CHARSET.search(data[:2048])
    encoding = next(filter(None, declared.groups()), b"utf-8").decode() if declared else "utf-8"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    try:
        text = data.decode(encoding, errors="replace")
    except LookupError:
        text = data.decode(errors="replace")
    extractor = TextExtractor()
    extractor.feed(text.removeprefix("\ufeff"))
    extractor.close()
    return extractor.get_text()
