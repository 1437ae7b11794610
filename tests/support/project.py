"""The project's folders, and what its program says on stderr."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SUPPORT = ROOT / "tests" / "support"


def complaints(stderr: bytes) -> str:
    """Return stderr without the line that says that kernels are compiled, which depends on what ran before."""
    return re.sub(r"(?m)^localllm: compiling .*\n", "", stderr.decode())
