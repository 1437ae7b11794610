"""Files that keep what a model has read: in the user's cache folder, each under its key and behind checksums.

    magic      8 bytes
    length     of the header, 4 bytes, little-endian
    header     JSON: the key, what it is of, and the name, size and CRC-32 of each part
    checksum   CRC-32 of the header, 4 bytes
    parts      one behind the other

A file appears whole or not at all, and a damaged one is removed and was never there: what is lost costs time, nothing
else. So any number of programs may read, write and remove files at once.
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
from localllm.files.folders import make_private
from localllm.files.safe_file import SafeFile
from localllm.files.settings import settings
from localllm.frozen import frozen
from localllm.quant.cache import cache_folder
from localllm.system.files import open_file

MAGIC = b"LLPREFX1"
MOST_HEADER = 1 << 16  # bytes
FILE_NAME = re.compile("[0-9a-f]{32}")
DAY = 24 * 3600  # seconds
MOMENT = 1000  # nanoseconds
USUAL_LIMIT, DISK_SHARE = 4_000_000_000, 4  # bytes of all files; no more than a quarter of what the disk has for them
SIZE_VARIABLE = "LOCALLLM_PREFIX_GB"  # in the environment: the limit instead of these, in GB; 0: keep nothing


@frozen
class PrefixAbout:
    """What a file is of: a prompt's tokens up to `end`, the earlier of which the file with the key `before` has."""

    model: str
    end: int
    before: str


@frozen
class KeptPrefix:
    """A file, as lists show it."""

    key: str
    about: PrefixAbout
    size: int  # bytes
    used: float  # seconds since 1970


class Kept:
    """An open file. Use it in a `with` statement.

    Attributes:
        about: what it is of.  parts: the size of each, in bytes, by its name.
    """

    def __init__(self, key: str, file: BinaryIO):
        """Raises ValueError if it is not the whole file of that key."""
        self._key, self._file, self._places = key, file, dict[str, tuple[int, int]]()
        start, length = file.read(len(MAGIC)), file.read(4)
        if start != MAGIC or len(length) < 4 or (size := int.from_bytes(length, "little")) > MOST_HEADER:
            raise ValueError("not such a file")
        header, checksum = file.read(size), file.read(4)
        if len(checksum) < 4 or zlib.crc32(header) != int.from_bytes(checksum, "little"):
            raise ValueError("the header is damaged")
        told = json.loads(header)
        if told["key"] != key:
            raise ValueError("the file of another key")
        self.about, position = PrefixAbout(**told["about"]), len(MAGIC) + 8 + size
        self.parts: dict[str, int] = {}
        for name, part_size, checksum in told["parts"]:
            self.parts[name], self._places[name] = part_size, (position, checksum)
            position += part_size
        if os.fstat(file.fileno()).st_size != position:
            raise ValueError("the file is cut off")

    def read(self, name: str) -> np.ndarray:
        """A part, uint8. Raises ValueError if it is damaged."""
        start, checksum = self._places[name]
        data = np.empty(self.parts[name], np.uint8)
        self._file.seek(start)
        got = 0
        while got < len(data) and (count := self._file.readinto(data[got:])):  # type: ignore[attr-defined]
            got += count
        if got < len(data) or zlib.crc32(data.data) != checksum:
            raise ValueError(f"{name}: damaged")
        return data

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def folder() -> Path:
    return cache_folder() / "prefixes"


def open_kept(key: str) -> Kept | None:
    """The file of a key, None if there is none; a damaged one is removed."""
    path = folder() / key
    try:
        file = open(path, "rb", buffering=0, opener=open_file)  # noqa: SIM115 - it stays open
    except OSError:
        return None
    try:
        return Kept(key, file)
    except (ValueError, TypeError, KeyError, OSError):
        file.close()
        remove(key)
        return None


def remove(key: str) -> None:
    """As far as that is possible."""
    with suppress(OSError):
        (folder() / key).unlink(missing_ok=True)


def write_kept(key: str, about: PrefixAbout, parts: Mapping[str, np.ndarray]) -> None:
    """Keep parts, contiguous uint8, under a key, in a folder private to the user. Raises LocalllmError, OSError."""
    make_private(folder())
    described = [(name, data.nbytes, zlib.crc32(data.data)) for name, data in parts.items()]
    header = json.dumps({"key": key, "about": asdict(about), "parts": described}).encode()
    with SafeFile(folder() / key) as file:
        file.write(MAGIC + struct.pack("<I", len(header)) + header + struct.pack("<I", zlib.crc32(header)))
        for data in parts.values():
            file.write(data)


def files() -> Iterator[tuple[str, os.stat_result]]:
    """The key and the state of each file."""
    try:
        found = list(os.scandir(folder()))
    except OSError:
        return
    for item in found:
        if FILE_NAME.fullmatch(item.name):
            with suppress(OSError):
                yield item.name, item.stat(follow_symlinks=False)


def entries() -> list[KeptPrefix]:
    """All files that can be read."""
    listed = []
    for key, state in files():
        if kept := open_kept(key):
            with kept:
                listed.append(KeptPrefix(key, kept.about, state.st_size, state.st_mtime))
    return listed


def clear() -> int:
    """Remove all of them; how many bytes they had. Raises LocalllmError if some cannot be removed."""
    freed = 0
    for key, state in files():
        try:
            (folder() / key).unlink(missing_ok=True)
        except OSError as error:
            raise LocalllmError(f"{folder() / key}: cannot be removed: {error.strerror}") from None
        freed += state.st_size
    remove_temporary(0)
    return freed


def limit() -> int:
    """The most bytes that all files may have together."""
    given = os.environ.get(SIZE_VARIABLE)
    if given:
        with suppress(ValueError, OverflowError):
            return max(0, int(float(given) * 1e9))
    told = settings().cache_gb
    return USUAL_LIMIT if told is None else int(told * 1e9)


def allowed(total: int) -> int:
    """The same, if there are `total` bytes now, on a disk that others need, too."""
    import shutil  # seldom needed, and slow to import

    with suppress(OSError):
        return min(limit(), (shutil.disk_usage(folder()).free + total) // DISK_SHARE)
    return limit()


def prune() -> None:
    """Remove files until the rest is within the limit: the least recently used, of those the end of a prompt first."""
    found = [(state.st_mtime_ns, key, state.st_size) for key, state in files()]
    total = sum(size for _, _, size in found)
    most = allowed(total)
    for _, key, size in sorted(found):
        if total <= most:
            break
        remove(key)
        total -= size
    remove_temporary(DAY)


def remove_temporary(age: float) -> None:
    """What programs have left half written that were killed so many seconds ago, or earlier."""
    for path in folder().glob(".*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime <= time.time() - age:
                path.unlink()


def mark_used(keys: Iterable[str]) -> None:
    """These pieces of a prompt, in order, were used now: the later ones a moment before, so that they go first.

    The clock by which the system itself marks files stands still for 4 ms.
    """
    now = time.time_ns()
    for place, key in enumerate(keys):
        with suppress(OSError):
            os.utime(folder() / key, ns=(now - MOMENT * place,) * 2)
