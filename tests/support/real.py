"""Real models, which `python scripts/real_models.py` puts into the cache folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from real_models import read_table


def path_of(name: str) -> Path:
    """Return a model's path, whether it exists or not."""
    return read_table()[name].path


def reason_to_skip(name: str) -> str:
    """Return why a test that needs the model is skipped, or ""."""
    if path_of(name).exists():
        return ""
    return f"{name} is not here: python scripts/real_models.py {name} brings it"
