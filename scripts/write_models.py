#!/usr/bin/env python3
"""Write docs/architectures.md: every architecture that runs, from the registry. A test compares."""

import ast
from collections import defaultdict
from pathlib import Path

from localllm.arch import ARCHITECTURES
from localllm.convert.records import load_records

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "architectures.md"
BEGINNING = """\
# Every architecture that runs

`localllm inspect MODEL` shows a file's architecture (`general.architecture`). For each, this table has the source file
that computes it, what it is, and which checkpoints (`architectures` in config.json) are converted to it. By type:
[what-runs.md](what-runs.md).

`python scripts/write_models.py` writes this page.

| architecture | file | what it is | checkpoints |
|---|---|---|---|
"""


def document() -> str:
    """Return the whole page."""
    checkpoints = defaultdict[str, list[str]](list)
    for name, (arch, _) in sorted(load_records().items(), key=lambda its: its[0].lower()):
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


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
