"""Real models, which `python scripts/real_models.py` brings into the cache folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from real_models import read_table


def path_of(name: str) -> Path:
    """Where a model lies, or would."""
    return read_table()[name].path


def reason_to_skip(name: str) -> str:
    """Why a test that needs the model cannot run; "" if it can."""
    if path_of(name).exists():
        return ""
    return f"{name} is not here: python scripts/real_models.py {name} brings it"
