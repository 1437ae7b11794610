"""The shell idioms of docs/shell.md, each as it stands there, with a tiny model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT
from tiny_model import write_tiny_model

import localllm

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

BLOCKS = {
    match["title"]: (match["language"], match["code"])
    for match in re.finditer(
        r"\*\*(?P<title>[^*]+)\.\*\*(?:(?!```|\*\*).)*```(?P<language>bash|make)\n(?P<code>.*?)```",
        (ROOT / "docs" / "shell.md").read_text(encoding="utf-8"),
        re.DOTALL,
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
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=200_000)
    localllm.open(path).close()  # compiles the kernels, once
    return path


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Where the idioms are at home: a model, some texts, and the program in bin/."""
    shutil.copy(tiny, tmp_path / "model.gguf")
    (tmp_path / "notes").mkdir()
    for name in ("notes.txt", "notes/a.txt", "notes/b.txt"):
        (tmp_path / name).write_text("The sea was calm.\n")
    (tmp_path / "countries.txt").write_text("".join(f"{name}\n" for name in COUNTRIES))
    program = tmp_path / "bin" / "localllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m localllm "$@"\n')
    program.chmod(0o755)
    return tmp_path


def test_all_of_them_are_found():
    assert BLOCKS.keys() == ANSWERS.keys()


def test_the_readme_shows_some_of_them():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## In shell scripts\n")[1].split("\n## ")[0]
    shown = [block.replace("\n    ", "\n")[4:] for block in section.strip().split("\n\n") if block.startswith("    ")]
    assert len(shown) == 2
    for block in shown:
        assert any(block + "\n" == code for _, code in BLOCKS.values()), block


@pytest.mark.slow
@pytest.mark.parametrize("title", ANSWERS)
def test_an_idiom(folder: Path, title: str):
    language, code = BLOCKS[title]
    if language == "make":
        (folder / "Makefile").write_text(code)
        code = "make --silent"
    tools = {"jq", "make", "timeout", "flock", "xargs", "find"} & set(re.findall(r"\w+", code))
    if missing := sorted(tool for tool in tools if shutil.which(tool) is None):
        pytest.skip(f"needs {', '.join(missing)}")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "MODEL": "model.gguf"}
    environment["LOCALLLM_SEED"] = "1"  # noise as a model says anything, also what no variable of a shell can hold
    code = code.replace("/tmp/digest.lock", str(folder / "lock")).replace("INT 20", "INT 3")
    done = subprocess.run(
        ["bash", "-e", "-u", "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    for name in ANSWERS[title]:
        assert (folder / name).read_bytes().strip(), f"{name} is empty"
    if title == "A loop over lines":
        lines = (folder / "capitals.txt").read_text(errors="replace").splitlines()
        assert [country for country in COUNTRIES if any(line.startswith(f"{country}: ") for line in lines)] == COUNTRIES
    if title == "See it and keep it":
        assert done.stdout == (folder / "rain.txt").read_bytes()
    if title == "JSON":
        assert re.match(rb"20 tokens: ", done.stdout)
    if title == "Where an answer came from":
        assert done.stdout.endswith(b"\nthe same text\n")


def test_make_keeps_no_half_file(folder: Path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    (folder / "Makefile").write_text(BLOCKS["Make"][1])
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "MODEL": "missing.gguf"}
    done = subprocess.run(["make", "-k"], cwd=folder, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"missing.gguf: no such file" in done.stderr
    assert not list(folder.glob("notes/*.summary"))
