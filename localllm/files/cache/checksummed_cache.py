"""Files in the user's cache folder that are as good as code: machine code, for which CPU to make it, and tables.

Each is behind a checksum, and written atomically, so any number of programs may do it at once.
"""

import hashlib
import os
from pathlib import Path

from localllm.files.safe_file import temporary_prefix
from localllm.quant.cache import make_private
from localllm.system.files import is_private, lock, open_file, replace, temporary_file


def checksum(path: Path, content: bytes | memoryview) -> bytes:
    """32 bytes, of a content and of the place that it is made for: the names of its folder and its file."""
    found = hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode())
    found.update(content)
    return found.digest()


def write_kept(path: Path, content: bytes) -> None:
    """Keep a content behind its checksum, in folders private to the user. Readers see the whole file or none.

    Raises OSError.
    """
    make_private(path.parent)
    handle, temporary = temporary_file(str(path.parent), temporary_prefix())
    try:
        with os.fdopen(handle, "wb") as file:
            lock(handle)
            file.write(checksum(path, content) + content)
        replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_kept(path: Path) -> bytes | None:
    """What `write_kept` wrote there; None if there is none, it was damaged since, or others could have written it."""
    try:
        with open(path, "rb", opener=open_file) as file:  # others may replace it meanwhile
            data = file.read() if is_private(path.parent) and is_private(file.fileno()) else b""
    except OSError:
        return None
    return data[32:] if checksum(path, memoryview(data)[32:]) == data[:32] else None
