"""Checksummed files in the user's cache folder: machine code, CPU names and tables.

They are as good as code. Each begins with a checksum and is written atomically, so any number of programs may write at
once.
"""

import hashlib
import os
from pathlib import Path

from localllm.files.safe_file import temporary_prefix
from localllm.quant.cache import make_private
from localllm.system.files import is_private, lock, open_file, replace, temporary_file


def checksum(path: Path, content: bytes | memoryview) -> bytes:
    """Compute the 32-byte checksum of a content and of the names of its folder and file."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode())
    digest.update(content)
    return digest.digest()


def write_checksummed(path: Path, content: bytes) -> None:
    """Write a content after its checksum, in folders private to the user.

    Readers see the whole file or none. Raises OSError.
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


def read_checksummed(path: Path) -> bytes | None:
    """Read what `write_checksummed` wrote.

    None if there is no such file, it is damaged, or others could have written it.
    """
    try:
        with open(path, "rb", opener=open_file) as file:  # others may replace it meanwhile
            data = file.read() if is_private(path.parent) and is_private(file.fileno()) else b""
    except OSError:
        return None
    return data[32:] if checksum(path, memoryview(data)[32:]) == data[:32] else None
