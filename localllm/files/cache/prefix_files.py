"""Store the prefix cache in files of the user's cache folder, each named by its key.

    magic      8 bytes
    length     of the header, 4 bytes, little-endian
    header     JSON: the key, the fields of PrefixChunkInfo, and the name, size and CRC-32 of each section
    checksum   CRC-32 of the header, 4 bytes
    sections   one after the other

Files are written atomically, and a damaged one is removed, so that its prompt is prefilled again: any number of
programs may read, write and remove files at once.
"""

import json
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from localllm.errors import LocalllmError
from localllm.files.safe_file import SafeFile, create_private_folder
from localllm.files.settings import load_settings
from localllm.frozen import frozen
from localllm.system.files import get_cache_folder, open_file

MAGIC = b"LLPREFX1"
MAX_HEADER_BYTES = 1 << 16  # bytes
FILE_NAME = re.compile("[0-9a-f]{32}")
DAY = 24 * 3600  # seconds
TIME_STEP = 1000  # nanoseconds between the times of use of a prompt's chunks
DEFAULT_LIMIT = 4_000_000_000  # bytes of all files
DISK_SHARE = 4  # the files take at most 1 / DISK_SHARE of the free disk space and their own
SIZE_VARIABLE = "LOCALLLM_PREFIX_GB"  # environment variable for another limit, in GB; 0: store nothing


@frozen
class PrefixChunkInfo:
    """The tokens of a prompt that a file holds: those after the chunk `before`, up to position `end`."""

    model: str
    end: int
    before: str  # key of the file with the tokens before; "" for the first chunk


@frozen
class PrefixEntry:
    """A file of the prefix cache as it is listed."""

    key: str
    about: PrefixChunkInfo
    size: int  # bytes
    used: float  # seconds since 1970


class PrefixFile:
    """An open file of the prefix cache, to be used in a `with` block.

    Attributes:
        about: the chunk that it holds.  parts: the size in bytes of each section, by name.
    """

    def __init__(self, key: str, file: BinaryIO):
        """Read the header. Raises ValueError unless the file is complete and belongs to the key."""
        self._key, self._file, self._places = key, file, dict[str, tuple[int, int]]()
        start, length = file.read(len(MAGIC)), file.read(4)
        if start != MAGIC or len(length) < 4 or (size := int.from_bytes(length, "little")) > MAX_HEADER_BYTES:
            raise ValueError("not a file of the prefix cache")
        header, checksum = file.read(size), file.read(4)
        if len(checksum) < 4 or zlib.crc32(header) != int.from_bytes(checksum, "little"):
            raise ValueError("the header is damaged")
        fields = json.loads(header)
        if fields["key"] != key:
            raise ValueError("the file belongs to another key")
        self.about, position = PrefixChunkInfo(**fields["about"]), len(MAGIC) + 8 + size
        self.parts: dict[str, int] = {}
        for name, part_size, checksum in fields["parts"]:
            self.parts[name], self._places[name] = part_size, (position, checksum)
            position += part_size
        if os.fstat(file.fileno()).st_size != position:
            raise ValueError("the file is cut off")

    def read(self, name: str) -> np.ndarray:
        """Read a section as uint8. Raises ValueError if it is damaged."""
        start, checksum = self._places[name]
        data = np.empty(self.parts[name], np.uint8)
        self._file.seek(start)
        position = 0
        while position < len(data) and (count := self._file.readinto(data[position:])):  # type: ignore[attr-defined]
            position += count
        if position < len(data) or zlib.crc32(data.data) != checksum:
            raise ValueError(f"{name}: damaged")
        return data

    def __enter__(self) -> "PrefixFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def get_folder() -> Path:
    return get_cache_folder() / "prefixes"


def open_prefix(key: str) -> PrefixFile | None:
    """Open the file of a key; None if it is missing or damaged. A damaged file is removed."""
    path = get_folder() / key
    try:
        file = open(path, "rb", buffering=0, opener=open_file)  # noqa: SIM115 - it stays open
    except OSError:
        return None
    try:
        return PrefixFile(key, file)
    except (ValueError, TypeError, KeyError, OSError):
        file.close()
        remove_prefix(key)
        return None


def remove_prefix(key: str) -> None:
    """Remove the file of a key; ignore errors."""
    with suppress(OSError):
        (get_folder() / key).unlink(missing_ok=True)


def write_prefix(key: str, about: PrefixChunkInfo, parts: Mapping[str, np.ndarray]) -> None:
    """Write the file of a key, readable by this user only. Raises LocalllmError, OSError.

    parts: contiguous arrays, each stored as a section, by name.
    """
    create_private_folder(get_folder())
    described = [(name, data.nbytes, zlib.crc32(data.data)) for name, data in parts.items()]
    header = json.dumps({"key": key, "about": asdict(about), "parts": described}).encode()
    with SafeFile(get_folder() / key) as file:
        file.write(MAGIC + struct.pack("<I", len(header)) + header + struct.pack("<I", zlib.crc32(header)))
        for data in parts.values():
            file.write(data)


def list_files() -> Iterator[tuple[str, os.stat_result]]:
    """Yield the key and the stat result of each file."""
    try:
        items = list(os.scandir(get_folder()))
    except OSError:
        return
    for item in items:
        if FILE_NAME.fullmatch(item.name):
            with suppress(OSError):
                yield item.name, item.stat(follow_symlinks=False)


def list_entries() -> list[PrefixEntry]:
    """Return all files whose headers can be read."""
    listed = []
    for key, state in list_files():
        if file := open_prefix(key):
            with file:
                listed.append(PrefixEntry(key, file.about, state.st_size, state.st_mtime))
    return listed


def remove_all() -> int:
    """Remove all files and return their total size in bytes. Raises LocalllmError."""
    freed = 0
    for key, state in list_files():
        try:
            (get_folder() / key).unlink(missing_ok=True)
        except OSError as error:
            raise LocalllmError(f"{get_folder() / key}: cannot be removed: {error.strerror}") from None
        freed += state.st_size
    remove_temporary(0)
    return freed


def get_size_limit() -> int:
    """Return the maximum size in bytes of all files: from LOCALLLM_PREFIX_GB, config.toml, or 4 GB."""
    variable = os.environ.get(SIZE_VARIABLE)
    if variable:
        with suppress(ValueError, OverflowError):
            return max(0, int(float(variable) * 1e9))
    gigabytes = load_settings().cache_gb
    return DEFAULT_LIMIT if gigabytes is None else int(gigabytes * 1e9)


def limit_by_disk(total: int) -> int:
    """Return the maximum size in bytes, reduced to a quarter of the available disk space if that is less.

    total: size in bytes of all files now.
    """
    import shutil  # rarely needed, and slow to import

    with suppress(OSError):
        return min(get_size_limit(), (shutil.disk_usage(get_folder()).free + total) // DISK_SHARE)
    return get_size_limit()


def prune() -> None:
    """Remove files until the limit is met, those of the least recently used prompts first, their last chunks first."""
    by_age = [(state.st_mtime_ns, key, state.st_size) for key, state in list_files()]
    total = sum(size for _, _, size in by_age)
    limit = limit_by_disk(total)
    for _, key, size in sorted(by_age):
        if total <= limit:
            break
        remove_prefix(key)
        total -= size
    remove_temporary(DAY)


def remove_temporary(age: float) -> None:
    """Remove the temporary files of killed programs that are at least `age` seconds old."""
    for path in get_folder().glob(".*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime <= time.time() - age:
                path.unlink()


def mark_used(keys: Iterable[str]) -> None:
    """Set the times of use of a prompt's chunks, given in order, so that later chunks expire first.

    Times are set explicitly, because the clock of file times advances only every 4 ms.
    """
    now = time.time_ns()
    for place, key in enumerate(keys):
        with suppress(OSError):
            os.utime(get_folder() / key, ns=(now - TIME_STEP * place,) * 2)
