"""SHA-256 hashes of large files, cached until the files change.

A 5 GB file takes seconds to read. So the hash is stored in the user's cache folder, under a name made of the file's
device, inode number, size and times of change, one of which (ctime) programs cannot easily set.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localllm.system.files import cache_folder, is_private, version_of

PIECE = 1 << 23  # bytes read at once
HEX_DIGITS = 64  # of a hash

OnProgress = Callable[[int, int], None]  # (bytes read so far, bytes to read)


def sha256_of(path: str | os.PathLike[str], on_progress: OnProgress | None = None) -> str:
    """Compute a file's SHA-256, 64 hexadecimal digits. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        entry = entry_path(file.fileno())
        if cached := read_entry(entry):
            return cached
        digest, size = hashlib.sha256(), os.fstat(file.fileno()).st_size
        while data := file.read(PIECE):
            digest.update(data)
            if on_progress:
                on_progress(file.tell(), size)
        if entry_path(file.fileno()) == entry:  # the file did not change meanwhile
            with suppress(OSError):
                entry.parent.mkdir(0o700, parents=True, exist_ok=True)
                entry.write_text(digest.hexdigest(), encoding="ascii")
    return digest.hexdigest()


def entry_path(descriptor: int) -> Path:
    """Return the path of the cached hash of an open file in its present state. Raises OSError."""
    state = os.fstat(descriptor)
    identity = state.st_dev, state.st_ino, *version_of(descriptor)
    return cache_folder() / "sha256" / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def read_entry(entry: Path) -> str | None:
    """Read a hash that this user has cached, None if there is none."""
    try:
        text = entry.read_text(encoding="ascii") if is_private(entry.parent) else ""
    except (OSError, ValueError):
        return None
    return text if len(text) == HEX_DIGITS and set(text) <= set("0123456789abcdef") else None
