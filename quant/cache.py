"""Where machine code is kept between starts."""

import errno
import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again; LOCALLLM_CACHE overrides it.

    Always absolute: machine code from a folder that one happens to stand in should not be run.
    """
    chosen = absolute(os.environ.get("LOCALLLM_CACHE"))
    if chosen:
        return chosen
    home = absolute(os.path.expanduser("~")) or Path("/")
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return (absolute(os.environ.get("XDG_CACHE_HOME")) or caches) / "localllm"


def absolute(folder: str | None) -> Path | None:
    """The folder, unless it is empty or relative, which the XDG specification says to ignore."""
    return Path(folder) if folder and os.path.isabs(folder) else None


def is_private(folder: Path) -> bool:
    """Whether only this user, or the system's, can write there."""
    if sys.platform == "win32":
        return True
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def make_private(folder: Path) -> None:
    """Have a folder, in another, where only this user can write. Raises OSError."""
    for each in (folder.parent, folder):
        each.mkdir(0o700, parents=True, exist_ok=True)
        if not is_private(each):
            raise PermissionError(errno.EACCES, "others can write there")
