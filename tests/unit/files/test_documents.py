"""Test the text of PDF, Word, EPUB and HTML files, their pages, and files that cannot be read."""

import zipfile
from pathlib import Path

import pytest
from documents import paragraph, write_docx, write_epub, write_pdf

from localllm.errors import UsageError
from localllm.files import documents
from localllm.files.documents import (
    MissingPackageError,
    convert_html,
    is_document,
    join_divided_words,
    mark_pages,
    read_document,
)

BREAK = "<w:lastRenderedPageBreak/>"
ENCRYPTION = "/ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{0}> /U <{0}> >>".format("00" * 32)


def test_a_pdf_has_its_lines_and_pages(tmp_path: Path):
    path = write_pdf(tmp_path / "a.pdf", [["Whales are mammals.", "They breathe."], ["Sharks are fish."], []])
    assert read_document(path) == "Whales are mammals.\nThey breathe.\n\fSharks are fish.\n\f"
    assert mark_pages("a\n\fb\n\fc") == "a\n\n[page 2]\nb\n\n[page 3]\nc"


def test_divided_words_are_joined():
    text = "exam\ufffe\nple of a well\ufffe\nknown, well-known thing\x02s"
    assert join_divided_words(text) == "example of a well-known, well-known things"


@pytest.mark.parametrize(
    ("printed", "text"),
    [("caf´e na¨ıve", "café naïve"), ("voil`a", "voilà"), ("a `b", "a `b"), ("x´q", "x´q"), ("Erd˝os", "Erd˝os")],
)
def test_accents_are_put_on_their_letters(printed: str, text: str):
    assert documents.ACCENTED.sub(documents.compose_accent, printed) == text


def test_ligatures_are_letters():
    assert "eﬃcient ﬁle".translate(documents.LIGATURES) == "efficient file"
    assert (
        "a\x1ermed co\x1bee, \x1du\x1by wa\x1fes \x1c".translate(documents.LIGATURES)
        == "affirmed coffee, fluffy waffles fi"
    )


def test_a_word_file_has_paragraphs_tables_and_notes(tmp_path: Path):
    cell = "<w:tc>{}</w:tc>".format
    row = f"<w:tr>{cell(paragraph('a'))}{cell(paragraph('b') + paragraph('c'))}</w:tr>"
    body = paragraph("One", "<w:tab/>", "two &amp; three") + f"<w:tbl>{row}</w:tbl>"
    body += f"<w:sdt><w:sdtContent>{paragraph('inside')}</w:sdtContent></w:sdt>"
    body += paragraph("<w:delText>gone</w:delText>", "stays", "<w:br/>", "below")
    notes = (
        f'<w:footnote w:type="separator">{paragraph("--")}</w:footnote><w:footnote>{paragraph("a note")}</w:footnote>'
    )
    path = write_docx(tmp_path / "a.docx", body, footnotes=notes)
    assert read_document(path) == "One\ttwo & three\na\tb c\ninside\nstays\nbelow\na note"


def test_a_word_file_has_the_pages_that_were_recorded(tmp_path: Path):
    body = paragraph("first") + paragraph("sec", BREAK, "ond") + paragraph(BREAK, "third")
    assert read_document(write_docx(tmp_path / "a.docx", body)) == "first\nsec\fond\n\fthird"


@pytest.mark.parametrize(("pages", "text"), [(3, "a\n\fb\n\fc"), (2, "a\n\nb\nc"), (4, "a\n\nb\nc"), (0, "a\n\nb\nc")])
def test_breaks_of_the_author_are_pages_if_there_are_no_others(tmp_path: Path, pages: int, text: str):
    """LibreOffice records the number of pages, but not where it broke lines."""
    body = (
        paragraph("a", '<w:br w:type="page"/>')
        + paragraph("b")
        + paragraph("c").replace("<w:pPr/>", "<w:pPr><w:pageBreakBefore/></w:pPr>")
    )
    found = read_document(write_docx(tmp_path / "a.docx", body, pages))
    assert found == text and mark_pages(found).count("[page") == text.count("\f")


def test_an_epub_has_its_chapters_in_order(tmp_path: Path):
    path = write_epub(tmp_path / "a.epub", ["<h1>One</h1><p>It began.</p>", "<p>It ended.</p>"])
    assert read_document(path) == "One\n\nIt began.\n\fIt ended."


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>a  <b>b</b>\nc<p>d", "a b c\n\nd"), ("a<br>b<br/>c", "a\nb\nc"),
        ("<script>x</script>a<style>y</style><noscript>z</noscript>", "a"), ("<script/>a</script>b", "ab"),
        ("<ul><li>one<li>two</ul>", "- one\n- two"), ("<pre>x\n  y</pre>z", "x\n  y\n\nz"),
        ("<table><tr><th>a<th>b</tr><tr><td>1<td>2</table>", "a\tb\n1\t2"),
        ("<div><div>a</div></div><div>b</div>", "a\nb"), ("&lt;p&gt; &eacute;", "<p> é"),
        ('<img alt="a cat">', "a cat"), ("<h1>A</h1>b", "A\n\nb"), ("", ""),
    ],
)  # fmt: skip
def test_html_becomes_lines_of_text(html: str, text: str):
    assert convert_html(html.encode()) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('<meta charset="iso-8859-1">é'.encode("latin-1"), "é"), ("é".encode(), "é"), ("\ufeffé".encode(), "é"),
        ("é".encode("utf-16"), "é"), (b'<?xml version="1.0" encoding="utf-8"?><p>\xc3\xa9</p>', "é"),
        (b'<meta charset="nosuch">a', "a"), (b"\xe9", "\ufffd"),
    ],
)  # fmt: skip
def test_html_is_decoded_as_it_says(data: bytes, text: str):
    assert convert_html(data) == text


def test_a_pdf_without_the_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"a\.pdf: reading PDF needs pypdfium2: pip install 'localllm\[doc"):
        read_document(write_pdf(tmp_path / "a.pdf", [["x"]]))


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.epub"])
@pytest.mark.parametrize("data", [b"", b"nothing", b"%PDF-1.4\nx", b"PK\x03\x04"])
def test_damaged_files_are_one_line(name: str, data: bytes, tmp_path: Path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"{name}: not a valid {name[2:].upper()} file$"):
        read_document(tmp_path / name)


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.epub", "a.html"])
def test_files_that_do_not_exist_are_one_line(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=f"{name}: cannot be read: No such file or directory$"):
        read_document(tmp_path / name)


def test_files_cut_anywhere_are_refused_or_read(tmp_path: Path):
    whole = {
        "a.pdf": write_pdf(tmp_path / "w.pdf", [["one"], ["two"]]), "a.docx": write_docx(tmp_path / "w.docx", "<w:p/>"),
        "a.epub": write_epub(tmp_path / "w.epub", ["<p>x</p>"]),
    }  # fmt: skip
    for name, path in whole.items():
        data = path.read_bytes()
        for end in range(0, len(data), 37):
            (tmp_path / name).write_bytes(data[:end])
            try:
                read_document(tmp_path / name)
            except UsageError as error:
                assert str(error).startswith(str(tmp_path / name)) and "\n" not in str(error)


def test_encrypted_files_are_one_line(tmp_path: Path):
    pdf = write_pdf(tmp_path / "a.pdf", [["x"]], ENCRYPTION)
    epub = write_epub(tmp_path / "a.epub", ["<p>x</p>"], "OPS/text/c 0.xhtml")
    word = write_docx(tmp_path / "a.docx", paragraph("x"))
    data = bytearray(word.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    word.write_bytes(data)
    for path in (pdf, epub, word):
        with pytest.raises(UsageError, match="is encrypted"):
            read_document(path)


def test_files_without_text_say_so(tmp_path: Path):
    with pytest.raises(UsageError, match=r"a\.pdf: the file contains no text: it may be scanned, run OCR first$"):
        read_document(write_pdf(tmp_path / "a.pdf", [[], []]))
    with pytest.raises(UsageError, match=r"a\.docx: the file contains no text$"):
        read_document(write_docx(tmp_path / "a.docx", "<w:p/>"))


def test_parts_that_grow_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.docx"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>')
    with pytest.raises(UsageError, match="not a valid DOCX file"):
        read_document(path)
    monkeypatch.setattr(documents, "MAX_PART_BYTES", 100)
    with pytest.raises(UsageError, match=r"word/document\.xml exceeds the limit"):
        read_document(write_docx(path, paragraph("x" * 100)))


def test_deeply_nested_parts_are_refused(tmp_path: Path):
    path = write_docx(tmp_path / "a.docx", "<w:sdt>" * 20_000 + "</w:sdt>" * 20_000)
    with pytest.raises(UsageError, match="not a valid DOCX file"):
        read_document(path)


@pytest.mark.parametrize(("name", "expected"), [("A.PDF", True), ("a.htm", True), ("a.txt", False), ("pdf", False)])
def test_documents_are_recognized_by_name(name: str, expected: bool):
    assert is_document(name) == expected
