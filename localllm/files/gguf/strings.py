"""The strings of a vocabulary as they lie in the file, found by place or by text, without making them all.

There are 50 000 to 500 000, of which a prompt needs some hundreds: to make them and dictionaries of them takes 50 to
110 ms of a start. Where each begins, and a table by which a text is found, are kept in the user's cache folder, with a
hash of the whole header that they belong to: what was changed since is read as ever. They are kept when the vocabulary
has been checked; the file's name has the state of the checks' sources, as in known.py.
"""

import hashlib
import mmap
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload
from zlib import crc32

import numpy as np

from localllm.files.cache.checksummed_cache import read_kept, write_kept
from localllm.files.cache.validated_cache import CHECKS, forget_oldest, state_of
from localllm.quant.cache import cache_folder

MOST = 32  # kept vocabularies: 1 to 10 MB each
LEAST_STRINGS = 10_000  # of a vocabulary: for less, what is saved is not worth a file
MOST_ALIKE = 8  # strings with the same checksum; a stranger could make more, which take long to search
BEGINNING = 4096  # bytes of a file, which name what is kept of it
LENGTH = 8  # bytes, of the number in front of a string
LOOKUPS = 8192  # of texts: to make a dictionary takes as long


class Strings(Sequence[str]):
    """An array of strings in a mapped file.

    end: where it ends in the file.
    """

    def __init__(self, data: mmap.mmap, table: np.ndarray):
        """table: uint32 [3 x count + 1], where the strings begin, and where the last one ends; their checksums, in
        order; and their places, in the order of those.
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
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        return self._data[self._begins[place] + LENGTH : self._begins[place + 1]].decode(errors="replace")

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.find(text) is not None

    def find(self, text: str) -> int | None:
        """The first place of a text, None if it is not there."""
        wanted = crc32(text.encode(errors="replace"))
        at = bisect_left(self._sums, wanted)
        while at < len(self._sums) and self._sums[at] == wanted:
            if self[self._places[at]] == text:
                return self._places[at]
            at += 1
        return None


class StringPlaces(Mapping[str, int]):
    """Strings' places by their texts, as a dictionary; it becomes one when it is asked often."""

    def __init__(self, strings: Strings):
        self._strings, self._removed, self._lookups = strings, set[str](), 0

    def get(self, text: str, default: Any = None) -> Any:
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
        return self.get(text) is not None  # type: ignore[arg-type]

    def __delitem__(self, text: str) -> None:
        self._removed.add(text)

    def __iter__(self) -> Iterator[str]:
        return (text for text in dict.fromkeys(self._strings) if text not in self._removed)

    def __len__(self) -> int:
        return len(self._strings) - len(self._removed)

    def items(self) -> Any:
        first = dict(zip(reversed(self._strings[:]), range(len(self._strings) - 1, -1, -1), strict=True))
        return [(text, place) for text, place in first.items() if text not in self._removed]


def kept_strings(data: mmap.mmap) -> dict[int, Strings]:
    """What is kept of a mapped file's arrays of strings, by where the first of each begins; most often nothing."""
    content = read_kept(path_of(data)) or b""
    numbers = np.frombuffer(content, np.uint32, offset=32) if content else np.zeros(0, np.uint32)
    found = dict[int, Strings]()
    while len(numbers):
        size = 3 * int(numbers[0]) + 2
        strings, numbers = Strings(data, numbers[1:size]), numbers[size:]
        found[strings._begins[0]] = strings
    end = max((strings.end for strings in found.values()), default=0)
    return found if content[:32] == digest(data, end) else {}


def keep_strings(data: mmap.mmap, arrays: Sequence[tuple[slice, Sequence[str]]]) -> None:
    """Keep arrays of strings, if that is possible, for `kept_strings`; with each, where its strings are in the file."""
    if min(len(strings) for _, strings in arrays) < LEAST_STRINGS:
        return
    tables = [table for place, strings in arrays if (table := table_of(place, strings)) is not None]
    if len(tables) < len(arrays):
        return
    end = max(int(table[len(table) // 3]) for table in tables)
    content = b"".join(np.uint32(len(table) // 3).tobytes() + table.tobytes() for table in tables)
    path = path_of(data)
    with suppress(OSError):
        write_kept(path, digest(data, end) + content)
        forget_oldest(path.parent, MOST)


def table_of(place: slice, strings: Sequence[str]) -> np.ndarray | None:
    """As Strings takes it; None if one is empty or had other bytes than UTF-8 (then it is longer now), or too many are
    alike.
    """
    texts = [text.encode() for text in strings]
    begins = place.start + np.cumsum([0, *(LENGTH + len(text) for text in texts)])
    sums = np.fromiter(map(crc32, texts), np.uint32, len(texts))
    places = np.argsort(sums, kind="stable")
    ordered = sums[places]
    alike = (ordered[MOST_ALIKE:] == ordered[:-MOST_ALIKE]).any()
    if b"" in texts or begins[-1] != place.stop or place.stop >= 1 << 32 or alike:
        return None
    return np.concatenate((begins, ordered, places)).astype(np.uint32)


def path_of(data: mmap.mmap) -> Path:
    """Where what belongs to a file is kept. Models of a family can share it: then the last one has it."""
    name = hashlib.sha256(b"%d\0" % len(data) + data[:BEGINNING]).hexdigest()[:32]
    return cache_folder() / "vocabularies" / f"{state_of(*CHECKS)}-{name}"


def digest(data: mmap.mmap, end: int) -> bytes:
    with memoryview(data) as whole, whole[:end] as part:
        return hashlib.sha256(part).digest()
