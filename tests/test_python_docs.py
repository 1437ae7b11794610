"""docs/python.md: its blocks run, one after another."""

import re

import pytest
from conftest import ROOT

import localllm

TEXT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.slow(20)
def test_blocks_run(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(localllm, "open", lambda path, **options: OPEN(GUIDE, **options))
    monkeypatch.setattr(localllm.Tokenizer, "from_file", classmethod(lambda cls, path: FROM_FILE(GUIDE)))
    names: dict = {"__name__": "docs"}
    assert len(BLOCKS) >= 10
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
    assert names["verdict"].sentiment in ("good", "bad") and names["matrix"].shape == (2, 8)
    assert names["choices"][0].text in ("yes", "no") and len(names["messages"]) == 3


GUIDE = str(localllm.builtin_model())
OPEN, FROM_FILE = localllm.open, localllm.Tokenizer.from_file


def test_every_method_is_there():
    """Check that every name on the page exists."""
    for name in re.findall(r"\bmodel\.(\w+)\(", TEXT):
        assert hasattr(localllm.Model, name), name
    for name in re.findall(r"localllm\.errors\.(\w+)", TEXT):
        assert hasattr(localllm.errors, name)
