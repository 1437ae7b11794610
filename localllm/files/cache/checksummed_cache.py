"""Cache checksummed files, passed checks, and SHA-256 hashes in the user's cache folder.

The files hold machine code, CPU names and tables. Whoever can write them can run code, so only the user may. Each
begins with a checksum and is written atomically, so any number of programs may write at once.

A slow check runs once per content: for each passed check there is an empty file, named by a hash of the checked content
and of the sources of the checks. After a change of these sources everything is checked again. If the folder cannot be
written, the check runs at every start.

A 5 GB file takes seconds to hash. So its SHA-256 is stored under a name made of the file's device, inode number, size
and times of change, one of which (ctime) programs cannot easily set.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localllm.files.safe_file import get_temporary_prefix
from localllm.system.files import (
    create_temporary_file,
    get_cache_folder,
    get_file_version,
    is_private,
    make_private_folder,
    open_file,
    replace_file,
)
from localllm.system.locks import lock_file


def compute_checksum(path: Path, content: bytes | memoryview) -> bytes:
    """Compute the SHA-256 (32 bytes) of a file's content, its name and its folder's name."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode())
    digest.update(content)
    return digest.digest()


def write_checksummed(path: Path, content: bytes) -> None:
    """Write a checksum and the content, atomically, in folders private to the user. Raises OSError."""
    make_private_folder(path.parent)
    handle, temporary = create_temporary_file(str(path.parent), get_temporary_prefix())
    try:
        with os.fdopen(handle, "wb") as file:
            lock_file(handle)
            file.write(compute_checksum(path, content) + content)
        replace_file(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_checksummed(path: Path) -> bytes | None:
    """Return the content that `write_checksummed` wrote.

    None if the file is missing or damaged, or if another user could have written it.
    """
    try:
        with open(path, "rb", opener=open_file) as file:  # lets other programs replace the file while it is open
            data = file.read() if is_private(path.parent) and is_private(file.fileno()) else b""
    except OSError:
        return None
    return data[32:] if compute_checksum(path, memoryview(data)[32:]) == data[:32] else None


MAX_RECORDS = 1000  # maximum of recorded checks; beyond it, the oldest half is removed
CHECKS = tuple(  # folders of the checks' source files
    Path(__file__).parents[2] / package for package in ("files", "files/cache", "files/gguf", "text")
)


def is_recorded(kind: str, digest: str) -> bool:
    """Return whether `record_check` has recorded that a content passed a check.

    kind: name of the check. digest: hash of the content.
    """
    folder = get_cache_folder() / "known"
    return os.path.exists(folder / _name_record(kind, digest)) and is_private(folder)


def record_check(kind: str, digest: str) -> None:
    """Record that a content passed a check, if the cache folder can be written."""
    folder = get_cache_folder() / "known"
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / _name_record(kind, digest)).touch(0o600)
        remove_oldest(folder)


def remove_oldest(folder: Path, max_files: int = MAX_RECORDS) -> None:
    """Remove files, oldest first, until half of `max_files` are left, if there are more than `max_files`."""
    with os.scandir(folder) as entries:
        by_age = [(entry.stat().st_mtime, entry.path) for entry in entries]
    for _, path in sorted(by_age)[: len(by_age) - max_files // 2] if len(by_age) > max_files else ():
        os.unlink(path)


def _name_record(kind: str, digest: str) -> str:
    return f"{kind}-{hash_sources(*CHECKS)}-{digest}"


@functools.cache
def hash_sources(*folders: Path) -> str:
    """Hash the names, sizes and modification times of the source files in folders, as 16 hexadecimal digits.

    This takes 0.13 ms; hashing their contents would take 2 ms.
    """
    digest = hashlib.sha256()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    digest.update(f"{entry.name} {status.st_size} {status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


# ---- SHA-256 hashes of large files

CHUNK_BYTES = 1 << 23  # bytes read at once
HEX_DIGITS = 64  # of a hash

OnProgress = Callable[[int, int], None]  # (bytes read so far, bytes to read)


def get_sha256(path: str | os.PathLike[str], on_progress: OnProgress | None = None) -> str:
    """Return a file's SHA-256 as 64 hexadecimal digits, from the cache if the file is unchanged. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        entry = get_entry_path(file.fileno())
        if cached := read_entry(entry):
            return cached
        digest, size = hashlib.sha256(), os.fstat(file.fileno()).st_size
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
            if on_progress:
                on_progress(file.tell(), size)
        if get_entry_path(file.fileno()) == entry:  # the file did not change meanwhile
            with suppress(OSError):
                entry.parent.mkdir(0o700, parents=True, exist_ok=True)
                entry.write_text(digest.hexdigest(), encoding="ascii")
    return digest.hexdigest()


def get_entry_path(descriptor: int) -> Path:
    """Return the path of the cached hash of an open file in its current state. Raises OSError."""
    state = os.fstat(descriptor)
    identity = state.st_dev, state.st_ino, *get_file_version(descriptor)
    return get_cache_folder() / "sha256" / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def read_entry(entry: Path) -> str | None:
    """Return a cached hash; None if it is missing or invalid, or if another user could have written it."""
    try:
        text = entry.read_text(encoding="ascii") if is_private(entry.parent) else ""
    except (OSError, ValueError):
        return None
    return text if len(text) == HEX_DIGITS and set(text) <= set("0123456789abcdef") else None
