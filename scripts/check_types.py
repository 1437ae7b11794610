"""Run mypy over the package as it is installed, a copy of localllm/ with quant/ inside. Arguments go to mypy."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".mypy_cache" / "installed"
CRASHED = 2  # also for files that cannot be parsed; mypy 2.4.1 ended with an internal error once in six runs

shutil.rmtree(TREE, ignore_errors=True)
shutil.copytree(ROOT / "localllm", TREE / "localllm", ignore=shutil.ignore_patterns("__pycache__"))
shutil.copytree(ROOT / "quant", TREE / "localllm" / "quant", ignore=shutil.ignore_patterns("__pycache__"))
command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:], "localllm"]
command += ["--cache-dir", str(ROOT / ".mypy_cache")]
code = subprocess.run(command, cwd=TREE).returncode
if code == CRASHED:
    print("Running mypy again ...", file=sys.stderr, flush=True)
    code = subprocess.run(command, cwd=TREE).returncode
sys.exit(code)
