"""Test the pages: links lead somewhere, every page can be found, and the README stays short."""

import re
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import write_diagrams
import write_models
import write_plots

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_to_existing_pages_and_headings(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if not link.startswith(("http:", "https:", "mailto:")):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target.read_text(encoding="utf-8")), link


def test_the_index_lists_every_page():
    index = {link.partition("#")[0] for link in LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index


def test_the_site_and_the_list_of_decisions_have_every_page():
    docs = ROOT / "docs"
    navigation = set(re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]))
    decisions = {f"decisions/{page.name}" for page in (docs / "decisions").glob("*.md")}
    assert {page.name for page in docs.glob("*.md")} | decisions <= navigation
    listed = set(LINK.findall((docs / "decisions" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in (docs / "decisions").glob("*.md")} - {"README.md"} <= listed


def test_the_table_of_models_is_current():
    page = write_models.FILE.read_text(encoding="utf-8")
    assert page == write_models.document(), "scripts/write_models.py writes it anew"


def test_plots_show_the_numbers_of_the_page():
    for path, picture in write_plots.documents().items():
        assert path.read_text(encoding="utf-8") == picture, "scripts/write_plots.py draws it anew"


def test_pictures_load_nothing_and_are_shown():
    assert write_diagrams.FILE.read_text(encoding="utf-8") == write_diagrams.document()


def test_the_readme_stays_short():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs" / "assets").glob("*.svg"):
        addresses = set(re.findall(r"https?://[^\"' )<]+", picture.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}, picture.name
        assert f"assets/{picture.name})" in pages, picture.name


GENERATED = {"architectures.md", "llama-cpp-options.md"}  # tables to look things up in
READABLE = [page for page in PAGES if page.parent.name not in ("commands", "decisions") and page.name != "CHANGELOG.md"]
FENCE = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)
MAX_WORDS, MAX_SENTENCE = 1200, 35


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs and list items; code and addresses count as a word."""
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", FENCE.sub("\n", text)))
    lines = ["" if line.startswith(("    ", "#", "|", "!", "===", ":::", "<")) else line for line in text.splitlines()]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [part for paragraph in paragraphs for part in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[\w\"*\[(])", paragraph)]


def count_words(text: str) -> int:
    return len([word for word in text.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", READABLE, ids=[page.relative_to(ROOT).as_posix() for page in READABLE])
def test_a_page_is_short_and_plain(page):
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "docs" and page.name not in GENERATED:
        assert count_words(text) <= MAX_WORDS
    assert not [sentence for sentence in sentences(text) if count_words(sentence) > MAX_SENTENCE]
    headers = re.findall(r"^(\|.*\|)\n\|[ :|-]+\|$", FENCE.sub("\n", text), re.MULTILINE)
    assert not [header for header in headers if any(not cell.strip() for cell in header[1:-1].split("|"))]
    assert "pip install 'localllm" not in text, "a clone installs '.[extra]'"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
