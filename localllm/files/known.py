"""What has been looked at before and found good, remembered by a hash of it: long checks are made once.

An empty file in the user's cache folder for each, which only the user can write to. A folder that cannot be written
to costs the check at every start.
"""

import os
from contextlib import suppress
from pathlib import Path

from localllm.quant.cache import cache_folder, is_private

MOST = 1000  # remembered; more than that, and the oldest half is forgotten


def is_known(name: str) -> bool:
    """Whether `remember` was called with this name, which has the kind of a check, its version and a hash."""
    folder = cache_folder() / "known"
    return (folder / name).exists() and is_private(folder)


def remember(name: str) -> None:
    """For the next start, if that is possible."""
    folder = cache_folder() / "known"
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / name).touch(0o600)
        forget_oldest(folder)


def forget_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime, entry.path) for entry in entries]
    for _, path in sorted(found)[: len(found) - MOST // 2] if len(found) > MOST else ():
        os.unlink(path)
