"""The user's cache folder, which keeps machine code between starts."""

import errno
import os
from pathlib import Path

from localllm.system.files import absolute, folder_of, is_private


def cache_folder() -> Path:
    """Return the folder for files that can be created again. The environment variable LOCALLLM_CACHE overrides it.

    The path is always absolute, so that no machine code from the current directory is run.
    """
    folder = absolute(os.environ.get("LOCALLLM_CACHE"))
    if folder:
        return folder
    return folder_of("cache")


def make_private(folder: Path) -> None:
    """Create a folder, and its parent, in which only this user can write. Raises OSError if others can."""
    for each in (folder.parent, folder):
        each.mkdir(0o700, parents=True, exist_ok=True)
        if not is_private(each):
            raise PermissionError(errno.EACCES, "others can write there")
