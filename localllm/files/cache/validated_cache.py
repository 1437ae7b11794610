"""A record of checks that passed, by a hash of what was checked, so that slow checks run once.

An empty file in the user's cache folder for each, which only the user can write to. A folder that cannot be written to
costs the check at every start. The file's name includes the state of the checks' sources: after a change of them,
everything is checked again.
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
    """Return whether `remember` recorded this kind of check for this hash."""
    folder = cache_folder() / "known"
    return os.path.exists(folder / _mark(kind, digest)) and is_private(folder)


def remember(kind: str, digest: str) -> None:
    """Record a passed check, if the cache folder can be written."""
    folder = cache_folder() / "known"
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / _mark(kind, digest)).touch(0o600)
        remove_oldest(folder)


def remove_oldest(folder: Path, most: int = MOST) -> None:
    """Remove the oldest half of a folder's files if there are more than `most`."""
    with os.scandir(folder) as entries:
        by_age = [(entry.stat().st_mtime, entry.path) for entry in entries]
    for _, path in sorted(by_age)[: len(by_age) - most // 2] if len(by_age) > most else ():
        os.unlink(path)


def _mark(kind: str, digest: str) -> str:
    return f"{kind}-{sources_hash(*CHECKS)}-{digest}"


@functools.cache
def sources_hash(*folders: Path) -> str:
    """Hash the names, times and sizes of the sources in folders.

    Takes 0.13 ms; reading all of them takes 2.
    """
    digest = hashlib.sha256()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    digest.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
