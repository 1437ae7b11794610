"""Make a separate Python environment for programs that test localllm from outside."""

import os
import subprocess
import venv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def python_with(packages: Iterable[str], folder: Path) -> Path:
    """Return the Python of the environment in a folder, which is made with the packages if it is not there."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True)
    return python


def run_task(command: Sequence[str | Path], task: str, variables: Mapping[str, str], seconds: int) -> bool:
    """Run a task in a process of its own, print a line, and return whether its answer is right.

    variables: of the environment, in addition to this process's.  seconds: after which the task has failed.
    """
    environment = os.environ | dict(variables)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        problem = done.stderr.strip().rpartition("\n")[2][:300] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no end after {seconds} s"
    print(f"{task}: {problem or 'right'}", flush=True)
    return not problem
