"""Small PDF, Word and EPUB files, written by hand."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
APP = "http://schemas.openxmlformats.org/officeDocument/2006/extended-properties"
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OPS/book.opf"/></rootfiles></container>'
)


def write_pdf(path: Path, pages: Sequence[Sequence[str]], encrypt: str = "") -> Path:
    """Write a PDF with these lines on its pages; encrypt: an entry of its trailer."""
    font = 3 + 2 * len(pages)
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    for number, lines in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td 14 TL {' '.join(f'({line}) Tj T*' for line in lines)} ET"
        page = f"/Contents {4 + 2 * number} 0 R /Resources << /Font << /F1 {font} 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {page} >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    data, offsets = b"%PDF-1.4\n", list[int]()
    for number, each in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    rows = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R {encrypt} >>"
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}trailer {trailer}\nstartxref\n{len(data)}\n%%EOF\n"
    path.write_bytes(data + table.encode())
    return path


def write_docx(path: Path, body: str, pages: int = 0, **parts: str) -> Path:
    """Write a Word file; body: WordprocessingML, with the prefix w; parts: others of word/, by name.

    pages: the count in docProps/app.xml, 0 for none.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/document.xml", f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>')
        if pages:
            file.writestr("docProps/app.xml", f'<Properties xmlns="{APP}"><Pages>{pages}</Pages></Properties>')
        for name, content in parts.items():
            file.writestr(f"word/{name}.xml", f'<w:{name} xmlns:w="{W}">{content}</w:{name}>')
    return path


def paragraph(*runs: str) -> str:
    """Return a paragraph of runs: texts, or elements, which begin with <."""
    inside = "".join(run if run.startswith("<") else f'<w:t xml:space="preserve">{run}</w:t>' for run in runs)
    return f"<w:p><w:pPr/><w:r>{inside}</w:r></w:p>"


def write_epub(path: Path, chapters: Sequence[str], encrypted: str = "") -> Path:
    """Write an EPUB; chapters: HTML of each; encrypted: what META-INF/encryption.xml names."""
    items = "".join(f'<item id="c{n}" href="text/c%20{n}.xhtml"/>' for n in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    package = f"<manifest>{items}</manifest><spine>{spine}</spine>"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("META-INF/container.xml", CONTAINER)
        file.writestr("OPS/book.opf", f'<package xmlns="http://www.idpf.org/2007/opf">{package}</package>')
        for number, chapter in enumerate(chapters):
            file.writestr(f"OPS/text/c {number}.xhtml", f"<html><body>{chapter}</body></html>")
        if encrypted:
            file.writestr("META-INF/encryption.xml", f"<e>{encrypted}</e>")
    return path
