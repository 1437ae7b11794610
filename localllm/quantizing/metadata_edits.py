"""Parse and apply a user's changes of GGUF metadata: KEY=VALUE, KEY=TYPE:VALUE, and keys to remove."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import numpy as np

from localllm.errors import ModelError, UsageError
from localllm.files.gguf.header import ALIGNMENT, ARRAY, MAX_ALIGNMENT, MAX_KEY_BYTES, SCALARS, STRING, printable
from localllm.files.gguf.metadata_reader import format_value, is_integer
from localllm.files.gguf.writer import PackedValue, pack_value
from localllm.files.text_file import read_exact_text
from localllm.frozen import frozen
from localllm.quantizing.splitting import SPLIT_KEYS

TEMPLATE, ARCHITECTURE = "tokenizer.chat_template", "general.architecture"
DTYPES = {
    "u8": "u1", "i8": "i1", "u16": "u2", "i16": "i2", "u32": "u4", "i32": "i4", "u64": "u8", "i64": "i8", "f32": "f4",
    "f64": "f8", "bool": "?", "int": "i4", "float": "f4",
}  # fmt: skip
TYPED_VALUE = re.compile(rf"({'|'.join([*DTYPES, 'str'])})(\[\])?:(.*)", re.DOTALL)
Number = TypeVar("Number", int, float)
BOOLS = {"true": True, "false": False}


@frozen
class MetadataEdits:
    """Changes of metadata, and warnings about them."""

    values: Mapping[str, PackedValue]
    removed: Sequence[str] = ()
    warnings: Sequence[str] = ()  # errors with --strict

    def apply(self, packed: Mapping[str, object]) -> dict[str, object]:
        """Return the changed metadata: old keys in their order, then new ones."""
        return {key: self.values.get(key, value) for key, value in packed.items() if key not in self.removed} | {
            key: value for key, value in self.values.items() if key not in packed
        }

    def format_lines(self, packed: Mapping[str, bytes | np.ndarray]) -> list[str]:
        """Describe each change in one line with the old and the new value."""
        old_values = {key: format_packed(packed[key]) for key in (*self.values, *self.removed) if key in packed}
        return [
            f"{key}: {old_values.get(key, '(none)')} -> {format_packed(value)}" for key, value in self.values.items()
        ] + [f"{key}: {old_values[key]} -> (removed)" for key in self.removed]


NO_EDITS = MetadataEdits({})


def resolve_edits(
    settings: Sequence[str], removals: Sequence[str], template: str | None, packed: Mapping[str, object]
) -> MetadataEdits:
    """Parse the user's changes of this metadata. Raises UsageError, LocalllmError.

    settings: of --set-metadata. removals: of --remove-metadata, keys or patterns with *. template: path of a chat
    template.
    """
    values = {key: value for key, value in (parse_setting(text, packed) for text in settings)}
    warnings, removed = [], []
    for pattern in removals:
        keys = [key for key in packed if fnmatchcase(key, pattern)]
        if not keys:
            warnings.append(f"--remove-metadata {printable(pattern)} matches no key")
        removed += keys
    for key in removed:
        if key in (ARCHITECTURE, *SPLIT_KEYS):
            raise UsageError(f"--remove-metadata {key}: this key cannot be removed, because every model needs it")
        if key in values:
            raise UsageError(f"{printable(key)}: give either --set-metadata or --remove-metadata")
    if template is not None:
        text = read_exact_text(template)
        warnings += check_template(text, template)
        values[TEMPLATE] = pack_value(text)
    return MetadataEdits(values, removed, warnings)


def check_template(text: str, path: str) -> list[str]:
    """Return a warning if a chat template cannot be parsed."""
    from localllm.text.templates import ChatTemplate  # importing Jinja takes 40 ms

    try:
        ChatTemplate(text)
    except ModelError as error:
        return [f"{printable(path, 4096)}: {error}: it is written as it is"]
    return []


def parse_setting(text: str, packed: Mapping[str, object]) -> tuple[str, PackedValue]:
    """Parse KEY=VALUE or KEY=TYPE:VALUE. Raises UsageError.

    Without TYPE, an existing key keeps its type; a new key gets the type of its JSON value, otherwise string.
    """
    key, separator, text_value = text.partition("=")
    if not separator:
        raise UsageError(f"--set-metadata {printable(text)}: expected KEY=VALUE or KEY=TYPE:VALUE")
    typed = TYPED_VALUE.fullmatch(text_value)
    try:
        if typed:
            value = parse_typed(typed[1], bool(typed[2]), typed[3])
        else:
            value = parse_like(pack_value(packed[key]), text_value) if key in packed else parse_new_value(text_value)
        packed_value = pack_value(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"--set-metadata {printable(key)}: {printable(str(error))}") from None
    require_settable(key, value, "--set-metadata")
    return key, packed_value


def parse_like(packed: bytes, text: str) -> object:
    """Parse a value of the same type as a packed one. Raises ValueError."""
    kind = int.from_bytes(packed[:4], "little")
    is_array = kind == ARRAY
    kind = int.from_bytes(packed[4:8], "little") if is_array else kind
    return parse_typed(get_type_name(kind), is_array, text)


def get_type_name(kind: int) -> str:
    """Return the name of a GGUF value type, such as u32. Raises ValueError for arrays."""
    if kind == STRING:
        return "str"
    if kind not in SCALARS:
        raise ValueError("arrays of arrays cannot be set")
    dtype = np.dtype(SCALARS[kind].format)
    return next(name for name, code in DTYPES.items() if np.dtype(code) == dtype)


def parse_typed(name: str, is_array: bool, text: str) -> object:
    """Parse a value of this type; an array as JSON, or separated by commas. Raises ValueError."""
    if not is_array:
        return text if name == "str" else parse_scalar(name, text.strip())
    items = split_array(text)
    if name == "str":
        return [item if isinstance(item, str) else json.dumps(item) for item in items]
    return np.array([parse_scalar(name, str(item).strip()) for item in items], DTYPES[name])


def split_array(text: str) -> list[str | float]:
    """Split a JSON array, or values separated by commas. Raises ValueError."""
    if text.lstrip().startswith("["):
        items = json.loads(text)
        if any(isinstance(item, list | dict) or item is None for item in items):
            raise ValueError("expected an array of strings or of numbers")
        return list(items)
    return [item.strip() for item in text.split(",")] if text.strip() else []


def parse_scalar(name: str, text: str) -> object:
    """Parse a number or bool within the range of its type. Raises ValueError."""
    if name == "bool":
        if text.lower() not in BOOLS:
            raise ValueError(f"the value must be true or false (found {text})")
        return np.bool_(BOOLS[text.lower()])
    if name in ("float", "f32", "f64"):
        number = convert_number(float, text, "a number")
        if not math.isfinite(number):
            raise ValueError(f"the value must be a number (found {number})")
        return number if name == "float" else np.dtype(DTYPES[name]).type(number)
    parsed = convert_number(int, text, "a whole number")
    if name == "int":
        return parsed
    dtype = np.dtype(DTYPES[name])
    if not np.iinfo(dtype).min <= parsed <= np.iinfo(dtype).max:
        raise ValueError(f"the value {parsed} must be in the range of {name}")
    return dtype.type(parsed)


def convert_number(kind: Callable[[str], Number], text: str, expected: str) -> Number:
    """Convert a string by `kind`. Raises ValueError that names the expected form."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"the value must be {expected} (found {text})") from None


def parse_new_value(text: str) -> object:
    """Parse the value of a new key: a JSON number, bool or array, otherwise the string itself. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, list):
        items = split_array(text)
        kinds = {type(item) for item in items}
        if kinds == {int, float}:
            return [float(item) for item in items]
        if len(kinds) > 1:
            raise ValueError("the elements of an array must be all strings or all numbers")
        return items
    return value if isinstance(value, bool | int | float) else text


def require_settable(key: str, value: object, option: str) -> None:
    """Raise UsageError for metadata that would make the file unreadable."""
    if not key or not (key.isprintable() and key.isascii()) or len(key) > MAX_KEY_BYTES:
        raise UsageError(f"{option} {printable(key)}: the key must have 1 to {MAX_KEY_BYTES} ASCII characters")
    if key in SPLIT_KEYS:
        raise UsageError(f"{option} {key}: this key cannot be set, because it follows from how the output is split")
    if key == ARCHITECTURE and not (isinstance(value, str) and value):
        raise UsageError(f"{option} {key}: the value must be the name of an architecture")
    if key == ALIGNMENT and (not is_integer(value) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1)):
        raise UsageError(
            f"{option} {key}: the value must be a power of two from 8 to {MAX_ALIGNMENT} (found {format_value(value)})"
        )
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        raise UsageError(f"{option} {key}: the value must be a finite number (found {value})")


def unpack_edits(edits: MetadataEdits) -> dict[str, object]:
    """Return the new values in the form that GGUFFile.metadata has."""
    return {key: unpack_value(value) for key, value in edits.values.items()}


def format_packed(packed: bytes | np.ndarray) -> str:
    value = unpack_value(bytes(packed))
    return "an array of arrays" if value is None else format_value(value)


def unpack_value(packed: bytes) -> object:
    """Decode a packed value; None for an array of arrays."""
    kind = int.from_bytes(packed[:4], "little")
    if kind == STRING:
        return packed[12:].decode(errors="backslashreplace")
    if kind in SCALARS:
        return SCALARS[kind].unpack(packed[4:])[0]
    kind, count = int.from_bytes(packed[4:8], "little"), int.from_bytes(packed[8:16], "little")
    if kind in SCALARS:
        return np.frombuffer(packed, SCALARS[kind].format, count, 16)
    if kind != STRING:
        return None
    texts, place = [], 16
    for _ in range(count):
        length = int.from_bytes(packed[place : place + 8], "little")
        texts.append(packed[place + 8 : place + 8 + length].decode())
        place += 8 + length
    return texts
