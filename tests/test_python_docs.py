"""Test docs/python.md and the pages below it: their blocks run in order, and the names they use exist."""

import importlib
import re
from pathlib import Path

import pytest
from project import ROOT

import localllm

PYTHON = ROOT / "docs" / "python.md"
REFERENCE = ROOT / "docs" / "python" / "reference.md"
PAGES = [PYTHON, *sorted(page for page in (ROOT / "docs" / "python").glob("*.md") if page != REFERENCE)]
GUIDE = str(localllm.builtin_model())
OPEN, FROM_FILE = localllm.open, localllm.Tokenizer.from_file
RESULTS = {  # what names have in the end
    "python": lambda names: len(names["messages"]) == 3,
    "structured-output": lambda names: names["verdict"].certain in (True, False) and names["answer"].text in "yes no",
    "choices": lambda names: names["choices"][0].text in ("yes", "no"),
    "tools": lambda names: names["run"].messages,
    "concurrency": lambda names: names["answer"]("map"),
    "inside": lambda names: names["states"].shape[0] == names["model"].engine.hyperparameters.layers + 1,
    "embeddings": lambda names: names["matrix"].shape == (2, 8),
    "sessions": lambda names: len(names["one"].messages) == 2,
}  # fmt: skip


@pytest.mark.slow(20)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_of_the_page_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(localllm, "open", lambda path, **options: OPEN(GUIDE, **options))
    monkeypatch.setattr(localllm.Tokenizer, "from_file", classmethod(lambda cls, path: FROM_FILE(GUIDE)))
    names: dict = {"__name__": "docs"}
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks[:-1] if page != PYTHON else blocks):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert RESULTS[page.stem](names)
    names["model"].close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_methods_and_errors_named_by_the_page_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bmodel\.(\w+)\(", text):
        assert hasattr(localllm.Model, name), name
    for name in re.findall(r"localllm\.errors\.(\w+)", text):
        assert hasattr(localllm.errors, name)


def test_the_reference_names_existing_functions():
    names = re.findall(r"^::: (\S+)$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) >= 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(name), name
