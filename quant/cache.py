"""Where machine code is kept between starts."""

import errno
import os
from pathlib import Path

from localllm.system.files import absolute, folder_of, is_private


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again; LOCALLLM_CACHE overrides it.

    Always absolute: machine code from a folder that one happens to stand in should not be run.
    """
    chosen = absolute(os.environ.get("LOCALLLM_CACHE"))
    if chosen:
        return chosen
    return folder_of("cache")


def make_private(folder: Path) -> None:
    """Have a folder, in another, where only this user can write. Raises OSError."""
    for each in (folder.parent, folder):
        each.mkdir(0o700, parents=True, exist_ok=True)
        if not is_private(each):
            raise PermissionError(errno.EACCES, "others can write there")
