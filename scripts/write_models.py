#!/usr/bin/env python3
"""Write the table at the end of docs/models.md: every architecture that runs, from the registry. A test compares."""

import ast
from collections import defaultdict
from pathlib import Path

from localllm.arch import ARCHITECTURES
from localllm.convert.records import records

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "models.md"
BEGINNING = """\
## Every architecture that runs

What `general.architecture` may say in a GGUF file, the small file that computes it, what it is, and which checkpoints
(`architectures` in config.json) are converted to it. scripts/write_models.py writes this table from the registry.

| architecture | file | what it is | checkpoints |
|---|---|---|---|
"""


def table() -> str:
    """Return the section, with its heading."""
    checkpoints = defaultdict[str, list[str]](list)
    for name, (arch, _) in sorted(records().items(), key=lambda its: its[0].lower()):
        if not name.startswith("vision+"):  # the language models of LLaVA and others
            checkpoints[arch].append(name.partition("For")[0].partition("+")[0])
    rows = []
    for name, module in sorted(ARCHITECTURES.items()):
        converted = ", ".join(dict.fromkeys(checkpoints[name]))
        rows.append(
            f"| `{name}` | [{module}](../localllm/arch/families/{module}.py) | {described(module)} | {converted} |\n"
        )
    return BEGINNING + "".join(rows)


def described(module: str) -> str:
    """Return the first paragraph of a family's docstring, in a line."""
    tree = ast.parse((ROOT / "localllm" / "arch" / "families" / f"{module}.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split()).replace("|", "\\|")


def document() -> str:
    """Return the whole page, with the table as it should be."""
    before, _, _ = FILE.read_text(encoding="utf-8").partition(BEGINNING.splitlines()[0])
    return before.rstrip("\n") + "\n\n" + table()


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
