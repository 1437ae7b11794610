"""Test localllm search and ask: passages of files by words and meaning, and answers from them."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from documents import write_epub, write_pdf
from project import ROOT

from localllm import builtin_model
from localllm.cli.prompt_input import read_prompt
from localllm.errors import UsageError
from localllm.files import documents
from localllm.services.search.answers import list_citations
from localllm.services.search.embed import read_text_file
from localllm.services.search.files import FileFilter, iter_text_files, matches_pattern
from localllm.services.search.index import PassageIndex
from localllm.services.search.passages import Passage, split_passages
from localllm.services.search.ranking import PassageSearch, SearchModels, drop_repetitions, extract_words

GUIDE = builtin_model()
NOTES = """# Boats

The ferry leaves at nine.

## In winter

There is no ferry. A bus goes to the harbour.

# Trains

The train to the mountains leaves every hour from platform four.
"""
CODE = '''"""Users."""

import hashlib


@cache
def check_password(user, given):
    """Compare."""
    return hashlib.sha256(given) == user.key


class Store:
    def load(self):
        return 1
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Change to a folder with notes, code, and files that a search should skip."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in {
        "home/notes/travel.md": NOTES, "home/src/users.py": CODE, "home/.hidden/a.md": "ferry",
        "home/build/b.txt": "ferry",
        "home/notes/todo.txt": "buy milk\nwrite to the harbour master\n", "home/.gitignore": "build/\n*.log\n",
        "home/x.log": "ferry",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "home" / "data.bin").write_bytes(b"ferry\0ferry")
    (tmp_path / "home" / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


# ---- passages


def test_sections_are_passages_with_their_headings():
    passages = split_passages("a.md", NOTES)
    assert [(each.first, each.last, each.heading) for each in passages] == [
        (1, 3, "Boats"), (5, 7, "Boats > In winter"), (9, 11, "Trains"),
    ]  # fmt: skip
    assert passages[1].text == "## In winter\n\nThere is no ferry. A bus goes to the harbour."
    assert passages[1].embedded.startswith("a.md > Boats > In winter\n## In winter")


def test_a_heading_stays_with_the_text_below_it():
    """Exceed the size for that: a heading alone says nothing, and resembles all of its subject."""
    text = "# Ferries\n\n" + "The ferry leaves. " * 15 + "\n\n" + "There is a bus. " * 15 + "\n"
    passages = split_passages("a.md", text, size=250)
    assert [(each.first, each.last) for each in passages] == [(1, 3), (5, 5)]


def test_no_passage_is_a_heading_alone():
    """Avoid passages that resemble every question and answer none."""
    text = (
        "# Boats\n\n## Ferries\n\n"
        + "They leave at nine. " * 30
        + "\n\n## Usage\n\n```\n"
        + "ferry --now\n" * 60
        + "```\n"
    )
    passages = split_passages("a.md", text, size=250)
    assert [each.text.split("\n")[0] for each in passages if each.text[0] == "#"] == ["# Boats", "## Usage"]
    assert passages[0].heading == "Boats > Ferries" and "They leave" in passages[0].text
    assert min(len(each.text) for each in passages) > 200  # of a long block, too: its parts are about as long


def test_code_is_split_before_definitions():
    passages = split_passages("a.py", CODE * 6, size=200)
    firsts = {(CODE * 6).splitlines()[each.first - 1] for each in passages}
    assert {"@cache", "class Store:"} <= firsts and not any(line.startswith("def check") for line in firsts)


@pytest.mark.parametrize("name", ["a.md", "a.py", "a.txt", "a.csv"])
@pytest.mark.parametrize(
    "text", [NOTES * 9, CODE * 9, "x" * 5000, "one line\n" * 999, "\n\n", "```\n# no heading\n```\n"]
)
def test_every_line_is_in_a_passage(name: str, text: str):
    lines, passages = text.splitlines(), split_passages(name, text, 300)
    covered = {number for each in passages for number in range(each.first, each.last + 1)}
    assert {number for number, line in enumerate(lines, 1) if line.strip()} <= covered
    for each in passages:
        assert each.text == "\n".join(lines[each.first - 1 : each.last])
        assert len(each.text) <= 450 or each.first == each.last
    assert not any("no heading" in each.heading for each in passages)


# ---- files


def test_searched_files_are_those_of_ripgrep(folder: Path):
    names = [*iter_text_files(["."], FileFilter())]
    assert names == ["data.bin", "notes/todo.txt", "notes/travel.md", "src/users.py"]
    assert "build/b.txt" in [*iter_text_files(["."], FileFilter(ignored=True))]
    assert ".hidden/a.md" in [*iter_text_files(["."], FileFilter(hidden=True))]
    assert [*iter_text_files(["."], FileFilter(include=["*.md"]))] == ["notes/travel.md"]
    assert [*iter_text_files(["."], FileFilter(exclude=["notes", "*.bin"]))] == ["src/users.py"]
    (folder / "notes" / ".gitignore").write_text("*.txt\n!todo.txt\nsub/\n")
    (folder / "notes" / "b.txt").write_text("b")
    assert [*iter_text_files(["notes"], FileFilter())] == ["notes/todo.txt", "notes/travel.md"]
    assert [*iter_text_files(["x.log"], FileFilter())] == ["x.log"]  # named by the user
    with pytest.raises(UsageError, match="none: no such file or folder"):
        [*iter_text_files(["none"], FileFilter())]
    assert (
        matches_pattern("a/b/c.md", "b/*.md")
        and matches_pattern("a/c.md", "c.*")
        and not matches_pattern("a/c.md", "b/*.md")
    )


# ---- the command


def test_search_prints_passages_after_their_positions(cli, folder: Path):
    code, out, err = cli("search", ".", "when does the ferry leave?", "-k", 1)
    assert (code, out, err) == (0, "notes/travel.md:1\n# Boats\n\nThe ferry leaves at nine.\n", "")
    assert cli("search", "when does the ferry leave?", ".", "-k", 1)[1] == out  # as with grep
    assert cli("search", "-e", "when does the ferry leave?", "notes", "-k", 1)[1] == out
    assert cli("search", "passwords", "src")[1].startswith("src/users.py:1\n")


def test_search_accepts_flags_of_grep(cli, folder: Path):
    ask = ("search", ".", "ferry harbour", "-k", 2)
    assert cli(*ask, "-l")[1] == "notes/travel.md\nnotes/todo.txt\n"
    out = cli("search", ".", "bus", "-n")[1]
    assert out.splitlines()[0] == "notes/travel.md:5:## In winter" and len(out.splitlines()) == 3
    out = cli("search", ".", "bus", "-n", "-C", 2)[1].splitlines()
    assert [line.split(":")[1] for line in out] == [*map(str, range(3, 10))]
    assert cli("search", ".", "ferry", "-g", "*.py")[0] == 1
    assert cli("search", ".", "ferry", "-g", "!*.md", "--no-ignore", "-l")[1].split() == ["x.log", "build/b.txt"]
    hit = json.loads(cli("search", ".", "bus", "--json")[1])
    assert {**hit, "score": 0, "text": ""} == {
        "file": "notes/travel.md", "line": 5, "last_line": 7, "heading": "Boats > In winter", "text": "", "score": 0,
    }  # fmt: skip


def test_search_without_a_match_exits_with_1(cli, folder: Path):
    assert cli("search", ".", "zeppelin") == (1, "", "localllm: no matching passage\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("search",), "QUESTION is missing: localllm search FOLDER"),
        (("search", "none", "Hi"), "none: no such file or folder"),
        (("search", ".", " "), "QUESTION is empty"),
        (("search", ".", "Hi", "-k", "0"), "-k must be 1 or greater"),
        (("search", ".", "Hi", "--threshold", "0.5"), "--threshold is a cosine similarity: name an embedding model"),
        (("search", "-", ".", "Hi"), "- (stdin) cannot be combined with files"),
        (("ask", ".", "Hi"), "MODEL is missing: name a model with -m MODEL"),
        (("ask", ".", "zeppelin", "--model", GUIDE), "no passage in . matches the question"),
    ],
)
def test_invalid_command_lines_of_search_are_refused(refused, folder: Path, words: tuple[str, ...], problem: str):
    refused(words, problem)


def test_lines_of_a_pipe_are_ranked(cli, folder: Path):
    lines = b"a.txt:3: the train is late\na.txt:9: a ferry, and another ferry\n\nb.txt:1: the ferry leaves\n"
    code, out, _ = cli("search", "-", "ferry leaves", stdin=lines)
    assert (code, out) == (0, "b.txt:1: the ferry leaves\na.txt:9: a ferry, and another ferry\n")
    assert cli("search", "ferry leaves", stdin=lines)[1] == out


# ---- the index


def test_only_changed_files_are_read_again(folder: Path, tmp_path: Path):
    names = [*iter_text_files(["."], FileFilter())]
    with PassageIndex(tmp_path / "i.sqlite") as index:
        index.update(names)
        count = index.count
        assert index.added == count > 3
        assert index.embed(lambda texts: np.ones((len(texts), 2), np.float32)) == count
    os.utime(folder / "src" / "users.py")
    (folder / "notes" / "travel.md").write_text(NOTES.replace("every hour", "at noon"))
    (folder / "notes" / "todo.txt").unlink()
    with PassageIndex(tmp_path / "i.sqlite") as index:
        index.update([*iter_text_files(["."], FileFilter())])
        assert index.added == 3  # of the changed file; the other one has the same content
        asked: list[str] = []
        index.embed(lambda texts: asked.extend(texts) or np.ones((len(texts), 2), np.float32))
        assert len(asked) == 1 and "at noon" in asked[0]
        assert index.search_words(["milk"], 9) == [] and len(index.search_words(["noon"], 9)) == 1


def test_a_damaged_index_is_rebuilt(cli, folder: Path):
    ask = ("search", ".", "bus", "-l")
    assert cli(*ask)[1] == "notes/travel.md\n"
    [index] = (folder.parent / "cache").rglob("*.sqlite")
    index.write_bytes(b"no database, but something else" * 99)
    assert cli(*ask)[:2] == (0, "notes/travel.md\n")
    (folder.parent / "cache2").write_text("no folder")
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "cache2")
    assert cli(*ask)[:2] == (0, "notes/travel.md\n")


def test_words_and_meaning_are_merged_by_rank(folder: Path, monkeypatch):
    """Prefer a passage that is second in both ranks to the first of one."""
    lines = ["ferry ferry", "ferry boat ship wagon", "quay", "tree"]
    with PassageSearch([], FileFilter(), SearchModels(None), lines=lines) as search:
        answers = {"embed": lambda self, texts, options: np.array([[1, 0]], np.float32)}
        search._embedder = type("Made", (), {**answers, "get_usual_role": lambda self, role: None})()
        cosines = {1: -0.1, 2: 0.8, 3: 0.9, 4: 0.0}
        rows = np.array([[cosines[id], 0] for id in range(1, 5)], np.float32)
        search.index.embed(lambda texts: rows[[lines.index(text) for text in texts]])
        hits = search.find("ferry", 4)
        assert [hit.passage.text for hit in hits] == [lines[1], lines[0], lines[2], lines[3]]
        assert [round(hit.cosine, 1) for hit in search.find("ferry", 4, 0.5)] == [0.8, 0.9]


def test_common_words_of_a_question_are_ignored():
    assert extract_words("How do I resume a map?") == ["resume", "map"]
    assert extract_words("what is it?") == ["what", "is", "it"]


def test_a_repeated_passage_is_dropped():
    passages = [Passage("a", 1, 10, ""), Passage("a", 4, 12, ""), Passage("a", 10, 20, ""), Passage("b", 1, 10, "")]
    assert [id for id, _ in drop_repetitions([*enumerate(passages)], 3)] == [0, 2, 3]
    copies = [
        Passage("a", 1, 3, "one\ntwo\nthree"),
        Passage("a", 5, 7, "  one\n  two\n4"),
        Passage("a", 9, 10, "one\n2"),
        Passage("b", 1, 3, "one\ntwo\nthree"),  # of another file, which -l must name
    ]
    assert [id for id, _ in drop_repetitions([*enumerate(copies)], 3)] == [0, 2, 3]


def test_passages_start_at_list_items_and_options():
    """Do not split an item, or what is indented below an option."""
    item = "- `tool` starts a program.\n" + "  It goes on with a line that is rather long, and says more of it.\n" * 5
    passages = split_passages("a.md", "# Tools\n\n" + item * 6)
    assert len(passages) > 2 and all(each.text.startswith(("# Tools", "- `tool`")) for each in passages)
    option = "  --option N    Sets it, and has a text\n" + " " * 16 + "that goes on here.\n"
    passages = split_passages("b.md", "```text\n" + option * 40 + "```\n")
    assert len(passages) > 2 and all(each.text.startswith(("```", "  --option")) for each in passages)


# ---- MCP


def test_search_is_a_tool_for_mcp_clients(folder: Path, tmp_path: Path, monkeypatch):
    """Call it by the official package's client, as `localllm chat --mcp` does; read a changed file again."""
    pytest.importorskip("mcp")
    from localllm.services.tools.mcp import McpServers

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "localllm", "search", "--mcp", str(folder / "notes"), "-k", "1"]
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "XDG_CACHE_HOME")}
    server = {"command": command[0], "args": command[1:], "env": environment}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"notes": server}}))
    with McpServers(str(tmp_path / "mcp.json")) as servers:
        [offered] = servers.offered
        assert offered.tool.name == "notes__search" and str(folder / "notes") in offered.tool.description
        answer = offered.perform({"question": "when does the ferry leave?"})
        assert answer == f"{folder / 'notes' / 'travel.md'}:1\n# Boats\n\nThe ferry leaves at nine."
        (folder / "notes" / "todo.txt").write_text("the zeppelin is late\n")
        assert offered.perform({"question": "zeppelin", "passages": 3}).endswith("todo.txt:1\nthe zeppelin is late")
        assert offered.perform({"question": "submarine"}) == "nothing was found"


def test_invalid_options_of_search_mcp_are_refused(cli, folder: Path):
    assert "none: no such file or folder" in cli("search", "--mcp", "none")[2]
    assert "leave out --query" in cli("search", "--mcp", "-e", "Hi")[2]


# ---- ask


def test_ask_cites_the_positions_of_its_answer(cli, folder: Path):
    code, out, _ = cli("ask", ".", "when does the ferry leave?", "--model", GUIDE, "--temp", 0, "-n", 6, "-k", 2)
    answer, _, places = out.partition("\n\n")
    assert code == 0 and answer and places.splitlines()[0] == "[1] notes/travel.md:1" and len(places.splitlines()) == 2
    grammar = ["--grammar", 'root ::= "At nine [1]."']
    out = cli("ask", ".", "when does the ferry leave?", "--model", GUIDE, "--temp", 0, *grammar)[1]
    assert out == "At nine [1].\n\n[1] notes/travel.md:1\n"


def test_cited_passages_are_listed_and_all_without_a_citation():
    passages = [Passage("a", 1, 2, ""), Passage("b", 7, 9, ""), Passage("c", 3, 3, "")]
    assert list_citations("So it is [3, 1], and [9].", passages) == ["[1] a:1", "[3] c:3"]
    assert list_citations("Nothing.", passages) == ["[1] a:1", "[2] b:7", "[3] c:3"]


def test_search_by_a_model_is_reproducible_and_cached(cli, folder: Path, model_path):
    """Use a tiny random model, whose vectors mean nothing but stay the same."""
    embedder = model_path("bert")
    text = "The train to the mountains leaves every hour from platform four."
    ask = ("search", ".", f"# Trains\n\n{text}", "-m", embedder, "-k", "1", "--json")
    code, out, err = cli(*ask)
    hit = json.loads(out)
    assert code == 0 and Path(hit["file"]).exists() and -1 <= hit["cosine"] <= 1, err
    assert json.loads(cli(*ask)[1]) == hit
    assert cli(*ask, "--threshold", hit["cosine"] + 1e-4)[1] != out


# ---- documents


@pytest.fixture
def papers(folder: Path) -> Path:
    """Add documents to the folder: two that can be read, and a damaged one."""
    write_pdf(folder / "paper.pdf", [["Whales are mammals."], ["Sharks are fish.", "They have gills."]])
    write_epub(folder / "book.epub", ["<p>It began.</p>", "<h1>End</h1><p>A zebra came.</p>"])
    (folder / "page.html").write_text("<script>giraffe</script><p>A giraffe &amp; a lion", encoding="utf-8")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4")
    return folder


def test_passages_of_documents_have_their_page(papers: Path, cli):
    status, out, err = cli("search", ".", "gills", "--json", "--top", "1")
    row = json.loads(out)
    assert (row["file"], row["page"], row["line"], row["text"]) == (
        "paper.pdf", 2, 3, "Sharks are fish.\nThey have gills.",
    )  # fmt: skip
    assert status == 0 and "warning: left out: broken.pdf: not a valid PDF file" in err
    assert cli("search", ".", "zebra", "--top", "1")[1] == "book.epub:2\nEnd\n\nA zebra came.\n"
    assert cli("search", ".", "gills", "--top", "1", "-n")[1].startswith("paper.pdf:2:Sharks are fish.\n")
    assert cli("search", ".", "giraffe", "--top", "1")[1] == "page.html:1\nA giraffe & a lion\n"


def test_pages_are_kept_in_the_index_and_around_passages(papers: Path, cli):
    for _ in range(2):
        assert cli("search", ".", "whales", "--top", "1", "-C", "2")[1].startswith("paper.pdf:1\nWhales are mammals.\n")


def test_a_document_is_indexed_once_its_package_is_there(papers: Path, cli, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(documents, "find_spec", lambda name: None)
        assert "paper.pdf: reading PDF needs pypdfium2" in cli("search", ".", "gills zebra", "--top", "1")[2]
    assert cli("search", ".", "gills", "--top", "1", "-l")[1] == "paper.pdf\n"


def test_a_prompt_holds_the_pages_of_a_document(papers: Path):
    inputs = read_prompt([], ["paper.pdf"], use_stdin=False)
    assert inputs.text == "Whales are mammals.\n\n[page 2]\nSharks are fish.\nThey have gills."


def test_embed_reads_documents(papers: Path):
    assert read_text_file("book.epub") == "It began.\n\fEnd\n\nA zebra came."
    with pytest.raises(UsageError, match=r"^broken\.pdf: not a valid PDF file$"):
        read_text_file("broken.pdf")
