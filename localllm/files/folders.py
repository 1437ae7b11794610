"""The user's folders for data and for state."""

from pathlib import Path

from localllm.errors import LocalllmError
from localllm.system.files import folder_of


def data_folder() -> Path:
    """Return the folder for files that cannot be made again, such as models and sessions."""
    return folder_of("data")


def state_folder() -> Path:
    """Return the folder for conveniences such as the input history."""
    return folder_of("state")


def make_private(folder: Path) -> Path:
    """Create a folder that only its user can read, and return it. Raises LocalllmError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalllmError(f"{folder}: cannot be created: {error.strerror}") from None
    return folder
