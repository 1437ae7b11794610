"""A file's metadata by key, whose values are decoded when they are asked for."""

import mmap
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

from localllm.files.gguf.strings import MappedStrings, save_strings

BEFORE_STRINGS = 16  # bytes of an array: the numbers of its type and of theirs, and how many they are


class LazyValue(NamedTuple):
    """A metadata value that is decoded on first use; of an array, its length."""

    value: Callable[[], Any]
    length: int = 0
    is_text: bool = False


class Metadata(UserDict[str, Any]):
    """Metadata by key. Strings are decoded on access, which may raise ModelError for a long one."""

    def __init__(self, values: Any = None, data: mmap.mmap | None = None):
        """Wrap values; data: the file that they are in, or None."""
        super().__init__(values)
        self._data, self.places, self.kept = data, dict[str, slice](), dict[str, MappedStrings]()

    def fingerprint(self, *keys: str) -> str | None:
        """Hash these values as stored in the file; None if some are not from a file."""
        if self._data is None or not all(key in self.places for key in keys):
            return None
        import hashlib  # seldom needed

        digest = hashlib.sha256()
        for key in keys:
            digest.update(key.encode() + b"\0")  # no key has a zero byte
            digest.update(memoryview(self._data)[self.places[key]])
        return digest.hexdigest()

    def keep(self, *keys: str) -> None:
        """Cache the positions of these arrays of strings, so that the next start need not decode them."""
        if self._data is not None and all(key in self.places for key in keys):
            places = (slice(self.places[key].start + BEFORE_STRINGS, self.places[key].stop) for key in keys)
            save_strings(self._data, [(place, self[key]) for place, key in zip(places, keys, strict=True)])

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

    def __setitem__(self, key: str, value: Any) -> None:
        self.places, self.kept = {}, {}
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.places, self.kept = {}, {}
        super().__delitem__(key)

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, LazyValue):
            value = self.data[key] = value.value()
        return value
