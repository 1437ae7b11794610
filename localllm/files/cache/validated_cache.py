"""What has been looked at before and found good, remembered by a hash of it: long checks are made once.

An empty file in the user's cache folder for each, which only the user can write to. A folder that cannot be written
to costs the check at every start. The file's name has the state of the checks' sources: what an older check has passed
is looked at again.
"""

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from localllm.quant.cache import cache_folder
from localllm.system.files import is_private

MOST = 1000  # remembered; more than that, and the oldest half is forgotten
CHECKS = tuple(
    Path(__file__).parents[2] / package for package in ("files", "files/cache", "files/gguf", "text")
)  # where the checks' sources are


def is_known(kind: str, digest: str) -> bool:
    """Whether `remember` was called with this kind of check and this hash of what it looked at."""
    folder = cache_folder() / "known"
    return os.path.exists(folder / _mark(kind, digest)) and is_private(folder)


def remember(kind: str, digest: str) -> None:
    """For the next start, if that is possible."""
    folder = cache_folder() / "known"
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / _mark(kind, digest)).touch(0o600)
        forget_oldest(folder)


def forget_oldest(folder: Path, most: int = MOST) -> None:
    """Of what is in a folder, the oldest half, if that is more than so many."""
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime, entry.path) for entry in entries]
    for _, path in sorted(found)[: len(found) - most // 2] if len(found) > most else ():
        os.unlink(path)


def _mark(kind: str, digest: str) -> str:
    return f"{kind}-{state_of(*CHECKS)}-{digest}"


@functools.cache
def state_of(*folders: Path) -> str:
    """A hash of when these folders' sources were changed and of their sizes: 0.13 ms, to read them all takes 2."""
    found = hashlib.sha256()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    found.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}\0".encode())
    return found.hexdigest()[:16]
