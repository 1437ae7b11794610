"""Test command lines by the habits of llm, mods, aichat, fabric, files-to-prompt, grep and jq."""

import json
from pathlib import Path

import pytest

from localllm import builtin_model
from localllm.services.records.lines import convert_document, read_records
from localllm.services.records.stream import RecordStream

GUIDE = builtin_model()
SHORT = "--temp", 0, "-n", 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Change to a folder with notes."""
    for kind in ("CACHE", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    (tmp_path / "home" / "notes").mkdir(parents=True)
    for name, text in {"a.txt": "The ferry leaves at nine.\n", "b.md": "Trains leave every hour.\n"}.items():
        (tmp_path / "home" / "notes" / name).write_text(text)
    (tmp_path / "home" / "notes" / "c.bin").write_bytes(b"\0\1")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "help"),
    [
        (("why is the sky blue?",), "a question needs a command: localllm run MODEL 'why is the sky blue?'"),
        (("summarize",), "localllm run MODEL --template NAME"),
        (("logs",), "`localllm run --continue` follows up on the last answer"),
        (("grep", "-r", "x"), "did you mean search?"),
        (("patterns",), "did you mean templates?"),
        (("run", GUIDE, "-s", "You are a pirate", "Hi"), "-s sets the seed; use -sys TEXT for a system message"),
        (("run", GUIDE, "-t", "summarize"), "-t sets the thread count; use --template NAME for a named prompt"),
        (("run", GUIDE, "-c", "And in German?"), "--continue to follow up on the last answer"),
        (("run", GUIDE, "-C", "-p", "And in German?"), "-C needs a value; to follow up on the last"),
        (("run", GUIDE, "--pattern", "summarize"), "use --template NAME"),
        (("run", GUIDE, "-a", "cat.jpg", "Hi"), "use --image FILE for an image, -f FILE for a text"),
        (("run", GUIDE, "What", "is", "this"), "'is': put quotes around a prompt of several words"),
        (("run", GUIDE, "-f", "notes", "What", "is"), "'is'"),
        (("map", GUIDE, "notes/a.txt", "notes/b.md"), "for whole files, give their folder"),
        (("search", "notes", "ferry", "boats"), "ferry: no such file or folder; put the question in quotes"),
        (("search", "notes"), 'QUESTION is missing: localllm search notes "QUESTION"'),
        (("ask", "notes", "-m", GUIDE), 'QUESTION is missing: localllm ask notes "QUESTION"'),
        (("run", "--template", "summarize"), "MODEL is missing: localllm run MODEL --template summarize"),
        (("run", GUIDE, "--stream", "Hi"), "an answer is always printed as it is generated"),
        (("map", GUIDE, "notes/a.txt", "Translate {line}"), "give the prompt with -p TEXT"),
        (("search", "-c", "ferry", "notes"), "use -l to list the matching files"),
    ],
)  # fmt: skip
def test_missing_options_and_commands_are_explained(refused, folder: Path, words: tuple[str, ...], help: str):
    refused(words, help)


def last_question(folder: Path) -> str:
    """Return the last question of `run`."""
    kept = folder.parent / "STATE" / "localllm" / "last-answer.jsonl"
    return json.loads(kept.read_text().splitlines()[1])["content"]


def test_a_pattern_after_f_selects_several_files(cli, folder: Path):
    code, _, err = cli("run", GUIDE, "-f", "notes/a.txt", "notes/b.md", "-p", "When?", *SHORT)
    assert (code, err) == (0, "")
    both = "==> notes/a.txt <==\nThe ferry leaves at nine.\n\n==> notes/b.md <==\nTrains leave every hour.\n\nWhen?"
    assert last_question(folder) == both
    assert (
        cli("run", GUIDE, "-f", "notes/a.txt", "notes/b.md", "When?", *SHORT)[0] == 0 and last_question(folder) == both
    )
    assert cli("run", GUIDE, "-f", "notes", "When?", *SHORT)[0] == 0 and last_question(folder) == both  # without c.bin
    (folder / "empty").mkdir()
    assert "empty: the folder contains no text files" in cli("run", GUIDE, "-f", "empty", "When?")[2]


def test_a_prompt_that_is_a_file_name_is_reported(cli, folder: Path):
    code, _, err = cli("run", GUIDE, "notes/a.txt", *SHORT)
    assert code == 0 and last_question(folder) == "notes/a.txt"
    assert err == (
        "localllm: the prompt is the text 'notes/a.txt'; to read the file with this name, use -f notes/a.txt\n"
    )


def test_map_of_a_folder_has_a_record_per_file(cli, folder: Path):
    command = "map", GUIDE, "notes", "-p", "Summarize: {text}", *SHORT, "-o", "notes/out.jsonl"
    assert cli(*command) == (0, "", "")
    lines = [json.loads(line) for line in Path("notes/out.jsonl").read_text().splitlines()]
    assert [each["id"] for each in lines] == ["notes/a.txt", "notes/b.md"]
    assert lines[0]["input"] == {"file": "notes/a.txt", "text": "The ferry leaves at nine.\n"}
    assert "2 of 2" in cli(*command)[2], "the output is no record"
    (folder / "none").mkdir()
    assert "none: the folder contains no text files" in cli("map", GUIDE, "none", "-p", "{text}")[2]


BOOKS = [{"title": "Emma"}, {"title": "Dune", "tags": ["sand"]}]


@pytest.mark.parametrize(
    "text",
    [json.dumps(BOOKS), json.dumps(BOOKS, indent=2), "\n".join(json.dumps(book, indent=4) for book in BOOKS) + "\n"],
    ids=["an array", "an array over lines", "objects as jq prints them"],
)
def test_map_reads_json_over_several_lines(cli, folder: Path, text: str):
    (folder / "books.json").write_text(text)
    for source in (("books.json",), ()):
        stdin = b"" if source else text.encode()
        code, out, err = cli("map", GUIDE, *source, "-p", "Who wrote {title}?", *SHORT, stdin=stdin)
        assert (code, err) == (0, "")
        assert [json.loads(line)["input"] for line in out.splitlines()] == BOOKS


@pytest.mark.parametrize(
    "text", ['["a", "b"]\n["c"]\n', "[12:00] started\n", "[\nno JSON\n", '{"a": 1}\n{"a": 2}\n', "{\n}}\n", "[1, 2]\n"]
)
def test_text_that_resembles_json_is_read_as_lines(text: str):
    assert convert_document(text.encode()) is None
    assert len(read_records(text.encode())) == text.count("\n")
    stream = RecordStream(__import__("io").BytesIO(text.encode()))
    assert len([*stream]) == text.count("\n")


def test_strings_in_a_json_array_are_lines():
    assert [record.input for record in read_records(b'["a",\n"b"]')] == [{"line": "a"}, {"line": "b"}]


def test_search_accepts_flags_of_grep(cli, folder: Path):
    Path("notes/a.txt").write_text("one\n\ntwo\n\nThe ferry leaves.\n\nthree\n" + "x\n\n" * 999)
    plain = cli("search", "ferry", "notes", "-n", "-k", 1)[1]
    assert cli("search", "-rni", "ferry", "notes", "-k", 1)[1] == plain
    Path("notes/a.txt").write_text("# A\n\none\n\n# B\n\nThe ferry leaves.\n\n# C\n\nthree\n")

    def numbers(*more: object) -> list[int]:
        return [
            int(line.split(":")[1]) for line in cli("search", "ferry", "notes", "-n", "-k", 1, *more)[1].splitlines()
        ]

    assert (numbers(), numbers("-B", 2), numbers("-A", 1), numbers("-B", 1, "-A", 1), numbers("-C", 1)) == (
        [5, 6, 7], [3, 4, 5, 6, 7], [5, 6, 7, 8], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8],
    )  # fmt: skip


def test_run_accepts_the_model_first(cli, folder: Path):
    out = cli("ask", GUIDE, "notes", "when does the ferry leave?", *SHORT, "-k", 1)[1]
    assert out.splitlines()[-1] == "[1] notes/a.txt:1"


def test_embed_accepts_a_text_in_quotes(cli, folder: Path, model_path):
    code, out, _ = cli("embed", model_path("bert"), "some words")
    assert code == 0 and json.loads(out)["id"] == "some words"
    out = cli("embed", model_path("bert"), "--near", "ferry", "notes")[1]
    assert sorted(line.split("\t")[1] for line in out.splitlines()) == ["notes/a.txt:1", "notes/b.md:1"]
    assert "cannot read word: No such file" in cli("embed", model_path("bert"), "word")[2]


def test_tokenize_counts_tokens(cli):
    tokens = cli("tokenize", GUIDE, "Hello world")[1].count("\n")
    assert cli("tokenize", GUIDE, "Hello world", "--count") == (0, f"{tokens}\n", "")
