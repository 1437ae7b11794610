"""Test the shell idioms of docs/shell.md as they are written there, with a tiny model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT, complaints
from tiny_model import write_tiny_model

import localllm

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

PAGES = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("shell.md", "shell-files.md"))
BLOCKS = {
    match["title"]: (match["language"], match["code"])
    for match in re.finditer(
        r"### (?P<title>[^\n]+)\n(?:(?!```|\n#).)*```(?P<language>bash|make)\n(?P<code>.*?)```", PAGES, re.DOTALL
    )
}
COUNTRIES = ["France", "Peru"]
ANSWERS = {  # what is there afterwards: files that are not empty
    "A file, a question": [], "A here-document": [], "JSON": ["capitals.txt"],
    "Where an answer came from": ["color.json"],
    "A loop over lines": ["capitals.txt"], "Several at once": ["France.txt", "Peru.txt"],
    "Every file of a folder": ["notes/a.txt.title", "notes/b.txt.title"], "An answer in a variable": ["story.md"],
    "See it and keep it": ["rain.txt"], "At most so long": ["story.txt"], "Cron": ["notes.txt.digest"],
    "Make": ["notes/a.summary", "notes/b.summary"],
    "A second question on the same text": [], "Several files": ["differs.txt"], "Only the code": ["count.sh"],
    "A follow-up": ["german.txt"], "A session": ["trip.txt"], "The end of a long log": ["errors.txt"],
    "The lines that matter": ["numbers.txt"],
    "All of a long text": ["missing.txt"], "A commit message": ["message.txt"], "A translation": ["french.txt"],
    "File names": [], "A prompt of your own": ["haiku.txt"], "A table": ["summaries.csv"],
    "Fields of texts as columns": ["facts.csv"], "Sort rows into classes": ["novels.csv"],
    "Lines as they come": ["alarms.txt"], "Facts as JSON": ["mood.txt"], "A decision": ["decision.txt"],
    "Find the passage": ["passage.txt", "files.txt"], "Rank what grep finds": ["best.txt"],
    "An answer from a folder": ["answer.txt"],
    "All files of a folder": ["common.txt", "differences.txt", "titles.csv"],
    "JSON from another program": ["writers.txt"],
}  # fmt: skip
NOTES = {  # what stderr says
    "Only the code": rb"localllm: the (answer has no code block; printing all of it|code block is incomplete .*)\n",
    "The end of a long log": rb"localllm: the prompt exceeds the context of 2048 tokens: reads \d+ of 9999 lines\n",
    "The lines that matter": rb"localllm: the prompt exceeds the context: scoring its 900 lines\n"
    rb"localllm: the prompt exceeds the context of 2048 tokens: reads \d+ of 900 lines\n",
    "All of a long text": rb"localllm: the prompt exceeds the context: asking the question of its \d+ "
    rb"chunks\n(localllm: .*\n)*",
}
CONTENTS = {  # what the last of the files has
    "Fields of texts as columns": r"line,continent,coast\nFrance,(Europe|America),(true|false)\nPeru,.*\n",
    "Sort rows into classes": r"title,author,output,probability\nEmma,Austen,(yes|no),[01]\..*\n",
    "Lines as they come": r"(yes|no)\n(yes|no)\n", "Facts as JSON": r"(good|bad)\n",
    "All files of a folder": r"file,text,output\nnotes/a.txt,\"The sea was calm.\n\",(.|\n)+",
    "A decision": r"(read it now|later)\n", "Rank what grep finds": r"notes/[ab].txt:1:The sea was calm.\n",
    "A table": r"title,author,output\nEmma,Austen,(.|\n)+\n", "A session": r"user: Where (.|\n)*",
    "An answer from a folder": r"(.|\n)*\n\n\[1\] notes/[ab].txt:1\n(.|\n)*",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=200_000)
    localllm.open(path).close()  # compiles the kernels, once
    return path


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Make a folder for the idioms: a model, some texts, and the program in bin/."""
    shutil.copy(tiny, tmp_path / "model.gguf")
    (tmp_path / "notes").mkdir()
    for name in ("notes.txt", "notes/a.txt", "notes/b.txt"):
        (tmp_path / name).write_text("The sea was calm.\n")
    (tmp_path / "countries.txt").write_text("".join(f"{name}\n" for name in COUNTRIES))
    (tmp_path / "books.csv").write_text("title,author\nEmma,Austen\n")
    program = tmp_path / "bin" / "localllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m localllm "$@"\n')
    program.chmod(0o755)
    return tmp_path


def test_every_idiom_of_the_page_is_found():
    assert RIGHT.keys() < ANSWERS.keys()
    assert BLOCKS.keys() == ANSWERS.keys()


def test_the_readme_shows_some_of_the_idioms():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## In shell scripts\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    shown = code.split("\n\n")
    assert len(shown) == 2
    for block in shown:
        assert any(block.strip("\n") + "\n" == code for _, code in BLOCKS.values()), block


def environment_of(folder: Path) -> dict[str, str]:
    """Return the variables for commands in the folder."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "MODEL": "model.gguf"}
    environment |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CONFIG", "DATA", "STATE")}
    environment["LOCALLLM_SEED"] = "1"  # noise as a model says anything, also what no variable of a shell can hold
    return environment


def run_idiom(folder: Path, title: str, is_real: bool = False) -> bytes:
    """Run an idiom on the folder's model.gguf; return stdout, and check what holds for every model.

    is_real: a real model may need more time, and does what is asked, so that stderr must be empty.
    """
    language, code = BLOCKS[title]
    if language == "make":
        (folder / "Makefile").write_text(code)
        code = "make --silent"
    tools = {"jq", "make", "timeout", "flock", "xargs", "find"} & set(re.findall(r"\w+", code))
    if missing := sorted(tool for tool in tools if shutil.which(tool) is None):
        pytest.skip(f"needs {', '.join(missing)}")
    environment = environment_of(folder)
    if "localllm search" in code:
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    code = code.replace("/tmp/digest.lock", str(folder / "lock"))
    code = code if is_real else code.replace("INT 20", "INT 3")
    done = subprocess.run(
        ["bash", "-e", "-u", "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    notes = NOTES.get(title, b"")
    stderr = complaints(done.stderr).encode()
    assert re.fullmatch(notes, stderr) or (is_real and not stderr), stderr
    for name in ANSWERS[title]:
        assert (folder / name).read_bytes().strip(), f"{name} is empty"
    if title == "See it and keep it":
        assert done.stdout == (folder / "rain.txt").read_bytes()
    return done.stdout


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("title", ANSWERS)
def test_an_idiom_runs_as_documented(folder: Path, title: str):
    stdout = run_idiom(folder, title)
    if title in CONTENTS:
        assert re.fullmatch(CONTENTS[title], (folder / ANSWERS[title][-1]).read_text(errors="replace"))
    if title == "File names":
        assert {path.suffix for path in (folder / "notes").iterdir()} == {".text"}
    if title == "A loop over lines":
        lines = (folder / "capitals.txt").read_text(errors="replace").splitlines()
        assert [country for country in COUNTRIES if any(line.startswith(f"{country}: ") for line in lines)] == COUNTRIES
    if title == "JSON":
        assert re.match(rb"20 tokens: ", stdout)
    if title == "Where an answer came from":
        assert stdout.endswith(b"\nthe same text\n")


SAILING = (
    "Anna Berg is the captain of the ferry Selma. On Monday morning she sailed from Oslo to Copenhagen with forty cars"
    " and two hundred guests. The sea was calm and the sky was blue, and everybody was in a good mood.\n"
)
ROADS = "The road to the north was closed in the winter of 1956, because a bridge had been destroyed by ice.\n"
RIGHT = {  # what the answer of a real model has: of the file, or of stdout where it is ""
    "A file, a question": {"": "Anna Berg|ferry|Selma"},
    "A loop over lines": {"capitals.txt": "France: .*Paris(.|\n)*Peru: .*Lima"},
    "Several at once": {"France.txt": "France|country|Europe", "Peru.txt": "Peru|country|America"},
    "Every file of a folder": {"notes/a.txt.title": "Selma|Ferry|Sea|Voyage|Berg|Oslo|Copenhagen"},
    "A here-document": {"": "lines|count"},
    "An answer in a variable": {"story.md": "# .*[A-Z]"},
    "A second question on the same text": {"": "Anna Berg(.|\n)*Monday"},
    "Only the code": {"count.sh": r"wc|count"},
    "A follow-up": {"german.txt": "Kapitän|Meer|Fähre|Reise|Schiff|segel|fähr|fahr|von Oslo|nach Kopenhagen"},
    "A translation": {"french.txt": "mer|capitaine|ferry|lundi"},
    "A table": {"summaries.csv": "Emma,Austen,.*(novel|Emma|Austen)"},
    "Fields of texts as columns": {"facts.csv": "France,Europe,true\nPeru,America,true"},
    "Sort rows into classes": {"novels.csv": r"Emma,Austen,yes,0\.|Emma,Austen,yes,1"},
    "JSON from another program": {"writers.txt": "Austen(.|\n)*Dune"},
    "Lines as they come": {"alarms.txt": "yes\nno"},
    "Facts as JSON": {"mood.txt": "good"},
    "Find the passage": {"passage.txt": "sea was calm"},
    "Rank what grep finds": {"best.txt": "sea was calm"},
    "An answer from a folder": {"answer.txt": "calm"},
    "All files of a folder": {"titles.csv": "notes/a.txt,(.|\n)*notes/b.txt,(.|\n)*[A-Z]"},
    "JSON": {"capitals.txt": "Paris(.|\n)*Lima"},
    "See it and keep it": {"rain.txt": "[Rr]ain|drop|sky|wet"},
    "A commit message": {"message.txt": "[A-Za-z]{3}"},
    "Make": {"notes/a.summary": "Anna|ferry|Selma|Oslo|captain"},
    "Cron": {"notes.txt.digest": "Anna|ferry|Selma|Oslo|captain"},
    "A prompt of your own": {"haiku.txt": "[a-z]{3}.*\n"},
    "Several files": {"differs.txt": "ferry|Anna|sea|road|bridge|different|a.txt"},
}  # fmt: skip


@pytest.mark.real
@pytest.mark.sampled
@pytest.mark.parametrize("title", ANSWERS)
def test_a_real_model_gives_the_right_answer_to_an_idiom(folder: Path, real_model, title: str):
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").symlink_to(real_model("qwen-1.5b"))
    for name, text in {"notes.txt": SAILING, "notes/a.txt": SAILING, "notes/b.txt": ROADS}.items():
        (folder / name).write_text(text)
    stdout = run_idiom(folder, title, is_real=True)
    for name, pattern in RIGHT.get(title, {}).items():
        answer = (folder / name).read_text() if name else stdout.decode()
        assert re.search(pattern, answer), answer


def test_make_keeps_no_partial_file(folder: Path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    (folder / "Makefile").write_text(BLOCKS["Make"][1])
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "MODEL": "missing.gguf"}
    done = subprocess.run(["make", "-k"], cwd=folder, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"missing.gguf: no such file" in done.stderr
    assert not list(folder.glob("notes/*.summary"))
