"""An environment of their own for programs that check localllm from outside."""

import os
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path


def python_with(packages: Iterable[str], folder: Path) -> Path:
    """Return the Python of the environment in a folder, which is made with the packages if it is not there."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True)
    return python
