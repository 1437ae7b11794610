"""Where a user's files are: what must not be lost, and what programs note for themselves."""

from pathlib import Path

from localllm.errors import LocalllmError
from localllm.system.files import folder_of


def data_folder() -> Path:
    """Of what the user has made and would miss."""
    return folder_of("data")


def state_folder() -> Path:
    """Of what makes the next start more comfortable, such as a history."""
    return folder_of("state")


def make_private(folder: Path) -> Path:
    """Make the folder, which only its user can read; the same folder. Raises LocalllmError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalllmError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder
