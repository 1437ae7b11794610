"""Measure speed and quality: python scripts/measure NAME [ARGUMENTS]; NAME --help says what it does and needs.

Leave the machine idle, and quote ratios from one run. PEER is the Python of an environment with llama-cpp-python.
Without a name: what there is.
"""

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PARTS = ("__main__", "common", "json_tasks", "synthetic_blocks", "synthetic_recurrent")  # not cases
sys.path[:0] = map(str, (ROOT, ROOT / "scripts", ROOT / "scripts" / "tools", ROOT / "tests" / "support"))


def list_cases() -> str:
    cases = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in PARTS]
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in cases}
    return "\n".join(f"    {name:20}{text.splitlines()[0]}" for name, text in texts.items())


def main() -> None:
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name in PARTS or not (FOLDER / f"{name}.py").exists():
        sys.exit(f"{__doc__}\n{list_cases()}")
    sys.argv = [f"measure {sys.argv[1]}", *sys.argv[2:]]
    importlib.import_module(name).main()


main()
