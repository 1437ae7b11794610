"""Read the header of a GGUF file: metadata and table of tensors, both validated.

The file is not trusted: every count, length and offset is compared with the file's size before anything is allocated or
read. Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, which
differ only by big-endian files).
"""

import math
import mmap
import struct
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf.metadata import (
    BEFORE_STRINGS,
    CHUNK,
    Irregularities,
    LazyValue,
    MappedStrings,
    Metadata,
    load_strings,
    read_short_strings,
)
from localllm.quant.formats import FORMATS, Format

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16  # a page, at most
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {  # value type in the file -> its format for struct and NumPy
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
UINT32, UINT64 = SCALARS[4], SCALARS[10]

# Limits: far above every real model, low enough that a hostile file cannot fill the memory with Python objects.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ITEMS = 1 << 22  # strings in arrays and arrays in arrays, all together; the largest vocabularies need a million
MAX_ARRAYS = 1 << 16  # in arrays; no real model has any
MAX_DEPTH = 4  # of arrays in arrays
MAX_TEXT_BYTES = 1 << 22  # of a string that is decoded; the largest chat templates have 100 KB
MAX_ITEM_BYTES = 1 << 16  # of a string in an array; the longest tokens have some hundred
MAX_KEY_BYTES = 65535  # these three are the specification's
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4
# Keys that running a model needs: decoded while the header is read, all others on first access.
NEEDED = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


class TensorEntry(NamedTuple):
    """A row of the table of tensors, whose bytes lie within the file."""

    name: str
    format: Format
    shape: tuple[int, ...]  # NumPy's order: the length of a row comes last
    start: int  # byte in the file
    size: int  # in bytes


class FileHeader(NamedTuple):
    """The beginning of a file, before its weights: metadata and the table of tensors."""

    metadata: Metadata
    entries: list[TensorEntry]
    packed: dict[str, slice]  # the bytes of each metadata value in the file, from the number of its type on
    oddities: Irregularities


SPACES = dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000))  # that paths may have


def printable(text: str, limit: int = 100) -> str:
    """Escape a string for a message: one line without control characters, cut after `limit` characters."""
    text = text if len(text) <= limit else text[:limit] + "…"
    return text if text and text.translate(SPACES).isprintable() else repr(text)


def read_header(data: mmap.mmap, path: str, needed: Collection[str] = NEEDED) -> FileHeader:
    """Read the metadata and the table of tensors of a mapped file. Raises ModelError.

    path: for messages. needed: keys whose arrays of strings are decoded now, unless they are cached; the others on
    first access. A metadata value is an int, float, bool or str; an array of numbers is a read-only NumPy view (perhaps
    unaligned), an array of strings list[str], an array of arrays a list of those. Time and memory grow with the counts
    of keys, tensors and strings, not with the length of strings.
    """
    return HeaderReader(data, path, needed, load_strings(data) if needed else {}).read()


class HeaderReader:
    """A reader that moves forward through a mapped header.

    Attributes:
        field: the name of what it is reading, for messages.
    """

    def __init__(
        self,
        data: mmap.mmap,
        path: str,
        needed: Collection[str] = (),
        cached_strings: Mapping[int, MappedStrings] = MappingProxyType({}),
    ):
        """Begin at the start of the file.

        cached_strings: arrays of strings that need no decoding, by the offset of their first string.
        """
        self.needed, self.kept = needed, cached_strings
        self.data = data
        self.size = len(data)
        self.path = path
        self.position = 0
        self.field = "header"
        self.items = self.arrays = 0
        self.oddities = Irregularities()

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{printable(self.path, 4096)}: {self.field}: {problem}")

    def read(self) -> FileHeader:
        tensors, keys = self.read_counts()
        metadata = Metadata(data=self.data)
        values, packed = metadata.data, metadata.places
        alignment = DEFAULT_ALIGNMENT
        for number in range(keys):
            key = self.read_name(f"metadata key {number}", MAX_KEY_BYTES, may_have_spaces=True)
            if key in values:
                self.fail("the file has this metadata key twice")
            start, kind = self.position, self.read_number(UINT32)
            values[key] = self.read_value(kind, depth=1, key=key)
            packed[key] = slice(start, self.position)
            if key in self.needed and (cached := self.kept.get(start + BEFORE_STRINGS)):
                metadata.kept[key] = cached
            if key == ALIGNMENT:
                alignment = self.read_alignment(kind, values[key])
        entries = [self.read_entry(number) for number in range(tensors)]
        return FileHeader(metadata, self.resolve_offsets(entries, alignment), packed, self.oddities)

    # ---- pieces of the file

    def take(self, count: int) -> int:
        """Skip `count` bytes and return their offset. Raises ModelError beyond the end of the file."""
        start = self.position
        if count > self.size - start:
            self.fail_truncated(start + count)
        self.position = start + count
        return start

    def fail_truncated(self, nbytes: int) -> NoReturn:
        self.fail(f"the file ends at byte {self.size} but this needs {nbytes} bytes: download incomplete?")

    def read_number(self, kind: struct.Struct) -> int:
        """Read an integer of this type."""
        return int(kind.unpack_from(self.data, self.take(kind.size))[0])

    def read_counts(self) -> tuple[int, int]:
        """Read the first 24 bytes and return the counts of tensors and metadata keys. Raises ModelError."""
        if self.data[self.take(4) : 4] != MAGIC:
            self.fail("not a GGUF file: expected the bytes GGUF at its start")
        version = self.read_number(UINT32)
        if version & 0xFFFF == 0 and version:
            self.fail("a big-endian GGUF file; only little-endian ones are supported")
        if version not in (2, 3):
            self.fail(f"the GGUF version must be 2 or 3 (found {version})")
        tensors, keys = self.read_number(UINT64), self.read_number(UINT64)
        # A tensor takes at least 32 bytes of the table, a key at least 13.
        for field, count, limit, least in (("tensor", tensors, MAX_TENSORS, 32), ("metadata key", keys, MAX_KEYS, 13)):
            self.field = f"{field} count"
            if count > limit:
                self.fail(f"{count} is too large; expected at most {limit}")
            if count * least > self.size - self.position:
                self.fail_truncated(self.position + count * least)
        return tensors, keys

    def read_name(self, field: str, limit: int, may_have_spaces: bool = False) -> str:
        """Read the name of a key or a tensor, and mention it in later errors. Raises ModelError."""
        self.field = field
        length = self.read_number(UINT64)
        if not 1 <= length <= limit:
            self.fail(f"the name must have 1 to {limit} bytes (found {length})")
        start = self.take(length)
        name = self.data[start : self.position].decode(errors="replace")
        if not (name.isascii() and name.isprintable()) or (" " in name and not may_have_spaces):
            shown_name = self.data[start : min(self.position, start + 100)]
            self.fail(f"the name {shown_name!r} must consist of ASCII letters, digits and signs")
        if " " in name:
            self.oddities.note(f"the metadata key {printable(name, 40)!r} has a space")
        self.field = name if length <= 100 else printable(name)
        return name

    # ---- metadata values

    def read_value(self, kind: int, depth: int, key: str = "") -> object:
        if kind in SCALARS:
            if kind == BOOL and self.data[self.position : self.position + 1] > b"\1":
                self.fail(f"a bool must be 0 or 1 (found {self.data[self.position]})")
            return SCALARS[kind].unpack_from(self.data, self.take(SCALARS[kind].size))[0]
        if kind == STRING:
            start = self.take(self.read_number(UINT64))
            return LazyValue(self.make_decoder(start, self.position), is_text=True)
        if kind == ARRAY:
            return self.read_array(depth, key)
        self.fail(f"the value type must be from 0 to 12 (found {kind})")

    def make_decoder(self, start: int, end: int) -> Callable[[], str]:
        """Return a function that decodes the string in bytes `start` to `end`; its errors name the current field."""
        data, path, field = self.data, self.path, self.field

        def decode() -> str:
            if end - start > MAX_TEXT_BYTES:
                problem = f"the string must have at most {MAX_TEXT_BYTES} bytes (found {end - start})"
                raise ModelError(f"{printable(path, 4096)}: {field}: {problem}")
            return decode_utf8(data[start:end])

        return decode

    def read_array(self, depth: int, key: str = "") -> object:
        kind, count = self.read_number(UINT32), self.read_number(UINT64)
        if kind in SCALARS:
            return self.read_numbers(kind, count)
        if kind not in (STRING, ARRAY):
            self.fail(f"the element type must be from 0 to 12 (found {kind})")
        least = 8 if kind == STRING else 12  # bytes of an empty string or array
        if count * least > self.size - self.position:
            self.fail_truncated(self.position + count * least)
        if kind == STRING:
            self.items += count
            if self.items > MAX_ITEMS:
                self.fail(f"the metadata's arrays must have at most {MAX_ITEMS} strings")
            if key in self.needed:
                cached = self.kept.get(self.position)
                return self.read_strings(count) if cached is None else self.skip_strings(cached)
            return LazyValue(self.skip_to_decode(count), count)
        self.arrays += count
        if self.arrays > MAX_ARRAYS:
            self.fail(f"the metadata's arrays must have at most {MAX_ARRAYS} arrays")
        if depth == MAX_DEPTH:
            self.fail(f"arrays must be nested at most {MAX_DEPTH} deep")
        nested = [self.read_array(depth + 1) for _ in range(count)]
        return LazyValue(lambda: [value.value() if isinstance(value, LazyValue) else value for value in nested])

    def read_numbers(self, kind: int, count: int) -> np.ndarray:
        """Return an array of numbers as a read-only view, [count]. Raises ModelError."""
        start = self.take(count * SCALARS[kind].size)
        if kind != BOOL:
            return np.frombuffer(self.data, SCALARS[kind].format, count, start)
        codes = np.frombuffer(self.data, np.uint8, count, start)
        if count and codes.max() > 1:
            self.fail(f"a bool must be 0 or 1 (found {codes.max()})")
        return codes.view(np.bool_)

    def read_strings(self, count: int) -> list[str]:
        """Read an array of strings. Raises ModelError.

        A start may read 128,000 tokens and 280,000 merges, so short strings take a fast path.
        """
        data, position, length_at, limit = self.data, self.position, UINT64.unpack_from, MAX_ITEM_BYTES
        strings: list[str] = []
        while missing := count - len(strings):
            chunk = np.frombuffer(data, np.uint8, min(CHUNK, self.size - position), position)
            decoded_strings, size = read_short_strings(chunk, missing)
            if not decoded_strings:
                break
            strings += decoded_strings
            position += size
        for _ in range(missing):
            start = position + 8
            try:
                length = length_at(data, position)[0]
            except struct.error:
                self.fail_truncated(start)
            position = start + length
            if length > limit:
                self.fail_too_long(len(strings), length, position)
            try:
                strings.append(data[start:position].decode())
            except UnicodeDecodeError:
                strings.append(decode_utf8(data[start:position]))
        if position > self.size:
            self.fail_truncated(position)
        self.position = position
        return strings

    def skip_strings(self, cached: MappedStrings) -> LazyValue:
        """Skip an array of strings that is cached, and return it as a value to be decoded on demand."""
        self.position = cached.end
        return LazyValue(lambda: cached[:], len(cached))

    def skip_to_decode(self, count: int) -> Callable[[], list[str]]:
        """Skip an array of strings, and return a function that decodes it."""
        data, start, length_at = self.data, self.position, UINT64.unpack_from
        position = start
        for number in range(count):
            try:
                length = length_at(data, position)[0]
            except struct.error:
                self.fail_truncated(position + 8)
            position += 8 + length
            if length > MAX_ITEM_BYTES:
                self.fail_too_long(number, length, position)
        if position > self.size:
            self.fail_truncated(position)
        self.position = position

        def decode() -> list[str]:
            reader = HeaderReader(data, self.path)
            reader.position = start
            return reader.read_strings(count)

        return decode

    def fail_too_long(self, number: int, length: int, end: int) -> NoReturn:
        if end > self.size:
            self.fail_truncated(end)
        self.fail(f"string {number} of the array must have at most {MAX_ITEM_BYTES} bytes (found {length})")

    def read_alignment(self, kind: int, value: object) -> int:
        if kind != 4 or not isinstance(value, int):
            self.fail(f"the value must be of type 4, uint32 (found type {kind})")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(f"the alignment must be a power of two from 8 to {MAX_ALIGNMENT} (found {value})")
        return value

    # ---- the table of tensors

    def read_entry(self, number: int) -> TensorEntry:
        """Read a row of the table of tensors, whose `start` is relative to the first weight. Raises ModelError."""
        name = self.read_name(f"name of tensor {number}", MAX_NAME_BYTES)
        self.field = f"tensor {printable(name)}"
        dimensions = self.read_number(UINT32)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(f"expected 1 to {MAX_DIMENSIONS} dimensions, found {dimensions}")
        shape = tuple(self.read_number(UINT64) for _ in range(dimensions))[::-1]
        if 0 in shape:
            self.fail(f"shape {list(shape)}: every dimension must be at least 1")
        kind = self.read_number(UINT32)
        if kind not in FORMATS:
            self.fail(f"format {kind} is unknown; update localllm or quantize the model to another format")
        format = FORMATS[kind]
        if shape[-1] % format.block:
            self.fail(
                f"the row length {shape[-1]} must be a multiple of {format.block}, the block size of {format.name}"
            )
        size = math.prod(shape[:-1]) * format.row_bytes(shape[-1])
        return TensorEntry(name, format, shape, self.read_number(UINT64), size)

    def resolve_offsets(self, entries: list[TensorEntry], alignment: int) -> list[TensorEntry]:
        """Return the entries with `start` relative to the file.

        Raises ModelError if a tensor ends beyond the file, overlaps another one or leaves a gap.
        """
        weights = -(-self.position // alignment) * alignment
        names: set[str] = set()
        for entry in entries:
            self.field = f"tensor {printable(entry.name)}"
            if entry.name in names:
                self.fail("the file has this tensor twice")
            names.add(entry.name)
            if entry.start % alignment:
                self.fail(f"the offset {entry.start} must be a multiple of the alignment {alignment}")
            end = weights + entry.start + entry.size
            if end > self.size:
                self.fail(f"the file ends at byte {self.size} but needs {end} bytes for it: download incomplete?")
        end, previous = 0, ""
        for entry in sorted(entries, key=lambda entry: entry.start):
            if entry.start != -(-end // alignment) * alignment:
                self.field = f"tensor {printable(entry.name)}"
                if entry.start < end:
                    self.fail(f"offset {entry.start} is within tensor {printable(previous)}, which ends at {end}")
                self.fail(f"offset {entry.start} leaves a gap; the data before it ends at {end}")
            end, previous = entry.start + entry.size, entry.name
        if self.size > (end := weights + -(-end // alignment) * alignment):
            self.field = "tensor count"
            if self.has_next_entry():  # the table goes on, so all weights would be read from the wrong bytes
                self.fail(f"the data of {len(entries)} tensors ends at byte {end}, but the file at byte {self.size}")
            self.oddities.note(f"{self.size - end} bytes after the last tensor")
        return [entry._replace(start=weights + entry.start) for entry in entries]

    def has_next_entry(self) -> bool:
        """Return whether the next bytes are another row of the table, which padding and weights are not."""
        reader = HeaderReader(self.data, self.path)
        reader.position = self.position
        try:
            reader.read_entry(0)
        except ModelError:
            return False
        return True


def decode_utf8(text: bytes) -> str:
    r"""Decode UTF-8 with \\xNN for an invalid byte.

    So a token with invalid bytes does not make a model unreadable, stays distinct from others, and can be printed.
    """
    return text.decode(errors="backslashreplace")
