"""Hold the metadata of a file, decoded on first access, and notes on its irregularities.

A vocabulary has 50,000 to 500,000 strings, of which a prompt needs some hundreds. Decoding all and building
dictionaries takes 50 to 110 ms, so strings are found by index or by value without that. The offset of each string, and
a table for searching, are in a file in the user's cache folder. It has a hash of the whole header, so that a changed
model is read again, is written once the vocabulary has passed its checks, and has a hash of the checks' sources in its
name (see checksummed_cache.py).
"""

import hashlib
import mmap
from bisect import bisect_left
from collections import UserDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, overload
from zlib import crc32

import numpy as np

from localllm.files.cache.checksummed_cache import (
    CHECKS,
    hash_sources,
    read_checksummed,
    remove_oldest,
    write_checksummed,
)
from localllm.system.files import get_cache_folder

MAX_FILES = 32  # maximum of cached vocabularies, 1 to 10 MB each
MIN_STRINGS = 10_000  # smaller vocabularies decode so fast that a cache file is not worth it
MAX_EQUAL_CHECKSUMS = (
    8  # maximum of strings with one checksum; a hostile file could have more, which would slow searches
)
BEGINNING = 4096  # bytes of a model file whose hash names the cache file
LENGTH = 8  # bytes of the length before a string
LOOKUPS = 8192  # of texts; they take as long as building a dictionary
GAP = 8  # bytes of a length; seven of them are zero if it is less than 256
CHUNK = 1 << 18  # bytes read together; they fit the processor's cache
T = TypeVar("T")


class MappedStrings(Sequence[str]):
    """An array of strings in a mapped file, decoded on access.

    Attributes:
        end: the offset after the array in the file.
    """

    def __init__(self, data: mmap.mmap, table: np.ndarray):
        """Wrap a mapped file and a table, uint32 [3 x count + 1].

        The table has the offsets of the strings and of their end; their checksums, sorted; and their indices in the
        order of the checksums.
        """
        self._data, count = data, len(table) // 3
        self._begins, self._sums, self._places = (part.data for part in np.split(table, [count + 1, 2 * count + 1]))
        self.end = self._begins[count]

    def __len__(self) -> int:
        return len(self._sums)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        return self._data[self._begins[place] + LENGTH : self._begins[place + 1]].decode(errors="replace")

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.find(text) is not None

    def find(self, text: str) -> int | None:
        """Return the first index of a string, None if it is not in the array."""
        checksum = crc32(text.encode(errors="replace"))
        at = bisect_left(self._sums, checksum)
        while at < len(self._sums) and self._sums[at] == checksum:
            if self[self._places[at]] == text:
                return self._places[at]
            at += 1
        return None


class StringIndex(Mapping[str, int]):
    """A mapping from strings to indices that builds a dictionary once there have been many lookups."""

    def __init__(self, strings: MappedStrings):
        self._strings, self._removed, self._lookups = strings, set[str](), 0

    @overload
    def get(self, text: str, /) -> int | None: ...
    @overload
    def get(self, text: str, default: int | T, /) -> int | T: ...
    def get(self, text: str, default: object = None, /) -> object:
        self._lookups += 1
        if self._lookups > LOOKUPS:
            self.get = dict(self.items()).get  # type: ignore[method-assign, assignment]
        place = None if text in self._removed else self._strings.find(text)
        return default if place is None else place

    def __getitem__(self, text: str) -> int:
        if (place := self.get(text)) is None:
            raise KeyError(text)
        return place

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.get(text) is not None

    def __delitem__(self, text: str) -> None:
        self._removed.add(text)

    def __iter__(self) -> Iterator[str]:
        return (text for text in dict.fromkeys(self._strings) if text not in self._removed)

    def __len__(self) -> int:
        return len(self._strings) - len(self._removed)

    def items(self) -> ItemsView[str, int]:
        first = dict(zip(reversed(self._strings[:]), range(len(self._strings) - 1, -1, -1), strict=True))
        for text in self._removed:
            first.pop(text, None)
        return first.items()


def load_strings(data: mmap.mmap) -> dict[int, MappedStrings]:
    """Load the cached arrays of strings of a mapped file, by the offset of the first string of each."""
    content = read_checksummed(get_cache_path(data)) or b""
    numbers = np.frombuffer(content, np.uint32, offset=32) if content else np.zeros(0, np.uint32)
    arrays = dict[int, MappedStrings]()
    while len(numbers):
        size = 3 * int(numbers[0]) + 2
        strings, numbers = MappedStrings(data, numbers[1:size]), numbers[size:]
        arrays[strings._begins[0]] = strings
    end = max((strings.end for strings in arrays.values()), default=0)
    return arrays if content[:32] == hash_header(data, end) else {}


def save_strings(data: mmap.mmap, arrays: Sequence[tuple[slice, Sequence[str]]]) -> None:
    """Cache arrays of strings for `load_strings`, if the cache folder can be written.

    arrays: the strings of each, with the slice of their bytes in the file.
    """
    if min(len(strings) for _, strings in arrays) < MIN_STRINGS:
        return
    tables = [table for place, strings in arrays if (table := build_table(place, strings)) is not None]
    if len(tables) < len(arrays):
        return
    end = max(int(table[len(table) // 3]) for table in tables)
    content = b"".join(np.uint32(len(table) // 3).tobytes() + table.tobytes() for table in tables)
    path = get_cache_path(data)
    with suppress(OSError):
        write_checksummed(path, hash_header(data, end) + content)
        remove_oldest(path.parent, MAX_FILES)


def build_table(place: slice, strings: Sequence[str]) -> np.ndarray | None:
    """Build the table of MappedStrings, uint32 [3 x count + 1].

    place: bytes of the strings in the file. Returns None if a string is empty or has invalid UTF-8, or if more than
    MAX_EQUAL_CHECKSUMS have the same checksum.
    """
    texts = [text.encode() for text in strings]
    begins = place.start + np.cumsum([0, *(LENGTH + len(text) for text in texts)])
    sums = np.fromiter(map(crc32, texts), np.uint32, len(texts))
    places = np.argsort(sums, kind="stable")
    ordered = sums[places]
    alike = (ordered[MAX_EQUAL_CHECKSUMS:] == ordered[:-MAX_EQUAL_CHECKSUMS]).any()
    if b"" in texts or begins[-1] != place.stop or place.stop >= 1 << 32 or alike:
        return None
    return np.concatenate((begins, ordered, places)).astype(np.uint32)


def get_cache_path(data: mmap.mmap) -> Path:
    """Return the path of a model's cache file.

    Models of the same size and beginning share a path; the file is of the one that was opened last.
    """
    name = hashlib.sha256(b"%d\0" % len(data) + data[:BEGINNING]).hexdigest()[:32]
    return get_cache_folder() / "vocabularies" / f"{hash_sources(*CHECKS)}-{name}"


def hash_header(data: mmap.mmap, end: int) -> bytes:
    with memoryview(data) as view, view[:end] as part:
        return hashlib.sha256(part).digest()


def read_short_strings(chunk: np.ndarray, limit: int) -> tuple[list[str], int]:
    """Read up to `limit` whole strings from the start of a chunk, uint8 [bytes], with the number of bytes they take.

    The length of each precedes it in 8 bytes, little-endian. Returns ([], 0) unless every string has 1 to 255 bytes of
    UTF-8 without a zero byte, as those of vocabularies have. Reading strings one by one takes five times as long.
    """
    filled = np.flatnonzero(chunk)
    lengths_at = filled[:-1][np.diff(filled) == GAP][:limit]  # nonzero bytes before exactly seven zeros
    ends = lengths_at + GAP + chunk[lengths_at]
    complete = int(np.searchsorted(ends, len(chunk), side="right"))
    if not complete or lengths_at[0] or (ends[: complete - 1] != lengths_at[1:complete]).any():
        return [], 0
    size = int(ends[complete - 1])
    part = chunk[:size].copy()
    part[lengths_at[:complete]] = 0
    if np.count_nonzero(part) != size - GAP * complete:
        return [], 0
    try:
        return part.tobytes().decode().split("\0" * GAP)[1:], size
    except UnicodeDecodeError:
        return [], 0


BEFORE_STRINGS = 16  # bytes before an array's first string: the value's type, the strings' type, and their count
MAX_NOTES = 6  # maximum of notes in the line that the user sees


class Irregularities:
    """Notes on irregularities of a file that can be used nevertheless, as by other programs.

    Missing information that changes the outputs has lines of its own.

    Attributes:
        ignored: metadata keys without an effect, which a new file omits.
    """

    def __init__(self) -> None:
        self._notes = dict[str, None]()  # in the order of their discovery
        self._missing = dict[str, None]()
        self.ignored = set[str]()

    def note(self, problem: str, key: str = "") -> None:
        """Add a note unless it exists.

        key: the metadata key that is ignored because of it.
        """
        self._notes[problem] = None
        self.ignored |= {key} if key else set()

    def note_missing(self, problem: str) -> None:
        """Add a note, unless it exists, on missing information that changes the model's outputs."""
        self._missing[problem] = None

    def extend(self, other: "Irregularities") -> None:
        """Add the notes on another split of the model."""
        self._notes |= other._notes
        self._missing |= other._missing
        self.ignored |= other.ignored

    def __len__(self) -> int:
        return len(self._notes) + len(self._missing)

    def format_lines(self) -> list[str]:
        """Return one line about all irregularities, if any, and a line for each piece of missing information."""
        if not (notes := [*self._notes]):
            return [*self._missing]
        shown_notes = notes[:MAX_NOTES] + ([f"and {len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else [])
        return [f"the file has irregularities that do not change its meaning: {'; '.join(shown_notes)}", *self._missing]


class LazyValue(NamedTuple):
    """A metadata value that is decoded on first access."""

    value: Callable[[], object]
    length: int = 0  # of an array
    is_text: bool = False


class Metadata(UserDict[str, object]):
    """Metadata by key, whose strings are decoded on access; a string that is too long raises ModelError then."""

    def __init__(self, values: Mapping[str, object] | None = None, data: mmap.mmap | None = None):
        """Wrap values.

        data: the mapped file that they are in, or None. `places` has the bytes of each value in the file, `kept` the
        cached arrays of strings; setting or deleting a value empties both.
        """
        super().__init__(values)
        self._data, self.places, self.kept = data, dict[str, slice](), dict[str, MappedStrings]()

    def compute_fingerprint(self, *keys: str) -> str | None:
        """Hash values as they are stored in the file (SHA-256); None if one of them is not from a file."""
        if self._data is None or not all(key in self.places for key in keys):
            return None
        import hashlib  # seldom needed

        digest = hashlib.sha256()
        for key in keys:
            digest.update(key.encode() + b"\0")  # no key has a zero byte
            digest.update(memoryview(self._data)[self.places[key]])
        return digest.hexdigest()

    def keep(self, *keys: str) -> None:
        """Cache the offsets of arrays of strings, so that the next start need not decode them."""
        if self._data is not None and all(key in self.places for key in keys):
            places = (slice(self.places[key].start + BEFORE_STRINGS, self.places[key].stop) for key in keys)
            arrays = [strings for key in keys if isinstance(strings := self[key], list)]
            save_strings(self._data, list(zip(places, arrays, strict=True)))

    def count_strings(self, key: str) -> int | None:
        """Return the length of an array of strings without decoding it; None if the value is something else."""
        value = self.data.get(key)
        if isinstance(value, LazyValue):
            return value.length if value.length or isinstance(self[key], list) else None
        return len(value) if isinstance(value, list) else None

    def is_text(self, key: str) -> bool:
        """Return whether a value is a string, without decoding it."""
        value = self.data.get(key)
        return value.is_text if isinstance(value, LazyValue) else isinstance(value, str)

    def __setitem__(self, key: str, value: object) -> None:
        self.places, self.kept = {}, {}
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.places, self.kept = {}, {}
        super().__delitem__(key)

    def __getitem__(self, key: str) -> object:
        value = self.data[key]
        if isinstance(value, LazyValue):
            value = self.data[key] = value.value()
        return value
