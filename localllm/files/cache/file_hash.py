"""The SHA-256 of large files, remembered for as long as they stay as they are.

A 5 GB file takes seconds to read. So the hash goes to the user's cache folder, under a name made of the file's device,
number, size and times of change, the last of which programs cannot easily set.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localllm.quant.cache import cache_folder
from localllm.system.files import is_private, version_of

PIECE = 1 << 23  # bytes read at once
HEX_DIGITS = 64  # of a hash

OnProgress = Callable[[int, int], None]  # (bytes read so far, bytes to read)


def sha256_of(path: str | os.PathLike[str], on_progress: OnProgress | None = None) -> str:
    """64 hexadecimal digits. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        kept = place_of(file.fileno())
        if known := recalled(kept):
            return known
        digest, size = hashlib.sha256(), os.fstat(file.fileno()).st_size
        while data := file.read(PIECE):
            digest.update(data)
            if on_progress:
                on_progress(file.tell(), size)
        if place_of(file.fileno()) == kept:  # nobody has changed it meanwhile
            with suppress(OSError):
                kept.parent.mkdir(0o700, parents=True, exist_ok=True)
                kept.write_text(digest.hexdigest(), encoding="ascii")
    return digest.hexdigest()


def place_of(descriptor: int) -> Path:
    """Where the hash of an open file, as it is now, is kept. Raises OSError."""
    state = os.fstat(descriptor)
    told = state.st_dev, state.st_ino, *version_of(descriptor)
    return cache_folder() / "sha256" / hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def recalled(kept: Path) -> str | None:
    """A hash that was kept, by this user."""
    try:
        text = kept.read_text(encoding="ascii") if is_private(kept.parent) else ""
    except (OSError, ValueError):
        return None
    return text if len(text) == HEX_DIGITS and set(text) <= set("0123456789abcdef") else None
