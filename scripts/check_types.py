"""Run mypy over the package as it is installed, a copy of localllm/ with quant/ inside. Arguments go to mypy."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".mypy_cache" / "installed"

shutil.rmtree(TREE, ignore_errors=True)
shutil.copytree(ROOT / "localllm", TREE / "localllm", ignore=shutil.ignore_patterns("__pycache__"))
shutil.copytree(ROOT / "quant", TREE / "localllm" / "quant", ignore=shutil.ignore_patterns("__pycache__"))
command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:], "localllm"]
sys.exit(subprocess.run([*command, "--cache-dir", str(ROOT / ".mypy_cache")], cwd=TREE).returncode)
