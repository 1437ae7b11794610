"""Where a user's files are: what must not be lost, and what programs note for themselves (XDG base directories)."""

import os
import sys
from pathlib import Path

from localllm.errors import LocalllmError
from localllm.quant.cache import absolute


def data_folder() -> Path:
    """Of what the user has made and would miss."""
    return _folder("XDG_DATA_HOME", Path(".local", "share"))


def state_folder() -> Path:
    """Of what makes the next start more comfortable, such as a history."""
    return _folder("XDG_STATE_HOME", Path(".local", "state"))


def _folder(variable: str, usual: Path) -> Path:
    home = absolute(os.path.expanduser("~")) or Path("/")
    usual = Path("Library", "Application Support") if sys.platform == "darwin" else usual
    return (absolute(os.environ.get(variable)) or home / usual) / "localllm"


def make_private(folder: Path) -> Path:
    """Make the folder, which only its user can read; the same folder. Raises LocalllmError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalllmError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder
