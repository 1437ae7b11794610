"""Run mypy over the package as it is installed, a copy of localllm/ with quant/ inside, and over tests/.

Arguments go to mypy.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".mypy_cache" / "installed"
COPIES = {"localllm": "localllm", "quant": "localllm/quant", "tests": "tests"}
SUPPORT = "tests/support"  # whose modules are imported by their name alone
CRASHED = 2  # also for files that cannot be parsed; mypy 2.4.1 ended with an internal error once in six runs


def list_others(folder: str, names: list[str]) -> list[str]:
    """Return which names in a folder are neither modules nor folders of them."""
    files = [name for name in names if not name.endswith(".py") and not os.path.isdir(os.path.join(folder, name))]
    return [*files, "__pycache__"]


shutil.rmtree(TREE, ignore_errors=True)
for source, copy in COPIES.items():
    shutil.copytree(ROOT / source, TREE / copy, ignore=list_others)
folder = TREE / SUPPORT
names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
settings = (ROOT / "pyproject.toml").read_text("utf-8")
settings = settings.replace('"tests.support.*"', ", ".join(f'"{name}.*"' for name in names))
(TREE / "pyproject.toml").write_text(settings, "utf-8")
command = [sys.executable, "-m", "mypy", "--explicit-package-bases", *sys.argv[1:], "localllm", "tests"]
command += ["--cache-dir", str(ROOT / ".mypy_cache")]
environment = {**os.environ, "MYPYPATH": os.pathsep.join([SUPPORT, "."])}
code = subprocess.run(command, cwd=TREE, env=environment).returncode
if code == CRASHED:
    print("Running mypy again ...", file=sys.stderr, flush=True)
    code = subprocess.run(command, cwd=TREE, env=environment).returncode
sys.exit(code)
