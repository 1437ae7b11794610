"""A file's metadata by key, decoded on first access, and notes on its irregularities."""

import mmap
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from localllm.files.gguf.strings import MappedStrings, save_strings

BEFORE_STRINGS = 16  # bytes before an array's first string: the value's type, the strings' type, and their count
MOST_NOTES = 6  # maximum of notes in the line that the user sees


class Oddities:
    """Notes on irregularities of a file that can be used nevertheless, as other programs do.

    Missing parts, without which its outputs mean something else, have lines of their own.

    Attributes:
        ignored: metadata keys without an effect, which a new file omits.
    """

    def __init__(self) -> None:
        self._notes = dict[str, None]()  # in the order of their discovery
        self._missing = dict[str, None]()
        self.ignored = set[str]()

    def note(self, problem: str, key: str = "") -> None:
        """Note a problem, once.

        key: the metadata key that is ignored because of it.
        """
        self._notes[problem] = None
        self.ignored |= {key} if key else set()

    def note_missing(self, problem: str) -> None:
        """Note, once, that something is missing that changes the meaning of the file's outputs."""
        self._missing[problem] = None

    def extend(self, other: "Oddities") -> None:
        """Add the notes on another split of the file."""
        self._notes |= other._notes
        self._missing |= other._missing
        self.ignored |= other.ignored

    def __len__(self) -> int:
        return len(self._notes) + len(self._missing)

    def lines(self) -> list[str]:
        """Return a line about all irregularities, if there are any, and one for each missing part."""
        if not (notes := [*self._notes]):
            return [*self._missing]
        shown_notes = notes[:MOST_NOTES] + ([f"and {len(notes) - MOST_NOTES} more"] if len(notes) > MOST_NOTES else [])
        return [f"the file has irregularities that do not change its meaning: {'; '.join(shown_notes)}", *self._missing]


class LazyValue(NamedTuple):
    """A metadata value that is decoded on first use."""

    value: Callable[[], object]
    length: int = 0  # of an array
    is_text: bool = False


class Metadata(UserDict[str, object]):
    """Metadata by key. Strings are decoded on access, which may raise ModelError for a long one."""

    def __init__(self, values: Mapping[str, object] | None = None, data: mmap.mmap | None = None):
        """Wrap values.

        data: the mapped file that they are in, or None. `places` has the bytes of each value in the file, `kept` the
        cached arrays of strings. Both are emptied when a value is set or deleted.
        """
        super().__init__(values)
        self._data, self.places, self.kept = data, dict[str, slice](), dict[str, MappedStrings]()

    def fingerprint(self, *keys: str) -> str | None:
        """Hash these values as stored in the file (SHA-256); None if some are not from a file."""
        if self._data is None or not all(key in self.places for key in keys):
            return None
        import hashlib  # seldom needed

        digest = hashlib.sha256()
        for key in keys:
            digest.update(key.encode() + b"\0")  # no key has a zero byte
            digest.update(memoryview(self._data)[self.places[key]])
        return digest.hexdigest()

    def keep(self, *keys: str) -> None:
        """Cache the offsets of these arrays of strings, so that the next start need not decode them."""
        if self._data is not None and all(key in self.places for key in keys):
            places = (slice(self.places[key].start + BEFORE_STRINGS, self.places[key].stop) for key in keys)
            arrays = [strings for key in keys if isinstance(strings := self[key], list)]
            save_strings(self._data, list(zip(places, arrays, strict=True)))

    def strings(self, key: str) -> int | None:
        """Return the length of an array of strings without decoding it; None if there is no such array."""
        value = self.data.get(key)
        if isinstance(value, LazyValue):
            return value.length if value.length or isinstance(self[key], list) else None
        return len(value) if isinstance(value, list) else None

    def is_text(self, key: str) -> bool:
        """Return whether the value is a string, without decoding it."""
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
