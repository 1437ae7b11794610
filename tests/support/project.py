"""The project's folders, and the filtering of its stderr."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SUPPORT = ROOT / "tests" / "support"


def complaints(stderr: bytes) -> str:
    """Return stderr without the line about compiling kernels, which depends on earlier runs."""
    return re.sub(r"(?m)^localllm: compiling .*\n", "", stderr.decode())
