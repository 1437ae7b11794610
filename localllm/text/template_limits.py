"""Limits for untrusted templates: CPU time, and the size of the values they create.

sandbox.py calls these checks for every iteration of a loop, item of a filter, call and operator; sizes are checked
before a value is created. The operating system's limits are in template_probe.py.
"""

import re
import sys
import time
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from threading import local
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

SECONDS = 2.0  # CPU seconds of one rendering; released templates take milliseconds
LENGTH = 8_000_000  # maximum characters of a string
MADE = 256_000_000  # maximum bytes of all strings that one rendering creates
ITEMS = 200_000  # maximum items of a list, including nested lists
BITS = 10_000  # maximum bits of an integer
WIDTH = 1000  # maximum width of a format's field, or of an indentation
_METHODS = frozenset([
    *["get", "keys", "values", "items", "copy", "count", "index", "find", "rfind", "rindex"],
    *["split", "rsplit", "splitlines", "partition", "rpartition", "strip", "lstrip", "rstrip"],
    *["replace", "join", "format", "startswith", "endswith", "removeprefix", "removesuffix", "ljust", "rjust", "zfill"],
    *["lower", "upper", "title", "capitalize", "casefold", "swapcase"],
    *["isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal"],
    *["append", "extend", "insert", "pop", "update", "setdefault"],  # these fail, since nothing can be changed
])  # fmt: skip
# Filters that consume all items before they return.
GATHERING = ("join", "list", "sort", "unique", "groupby", "min", "max", "sum", "reverse")
_rendering = (
    local()
)  # .deadline: CPU time at which this thread's rendering must end; .made: bytes of values created so far


class LimitError(Exception):
    """The template runs too long or creates too large a value."""


def begin() -> None:
    """Reset this thread's limits, before compiling or rendering a template."""
    _rendering.deadline, _rendering.made = time.thread_time() + SECONDS, 0


def tick(nbytes: int = 0) -> None:
    """Count an iteration of a loop, or a new value of `nbytes` bytes. Raises LimitError."""
    _rendering.made += nbytes
    if time.thread_time() > _rendering.deadline:
        raise LimitError(f"it ran for more than {SECONDS:g} seconds")
    if _rendering.made > MADE:
        raise LimitError(f"it created more than {MADE} bytes of text")


def bits(value: object) -> int:
    """Return the bit length of an integer; 0 for other values."""
    return value.bit_length() if isinstance(value, int) else 0


def repetitions(value: object) -> float:
    """Return the factor by which an operand of * can multiply the length of the other one."""
    return abs(value) if isinstance(value, int | float) else len(value) if isinstance(value, str | list | tuple) else 1


def require_limited(value: object) -> object:
    """Return the value if it is not too large; count the items of an iterator later. Raises LimitError."""
    if isinstance(value, str):
        if len(value) > LENGTH:
            raise LimitError(f"a value exceeds {LENGTH} characters")
        tick(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict):
        tick(8 * len(value))
        return require_light(value)
    elif isinstance(value, KeysView | ValuesView | ItemsView):  # their str() has no limit
        return require_limited(list(value))
    elif isinstance(value, int) and value.bit_length() > BITS:
        raise LimitError(f"a number exceeds {BITS} bits")
    elif isinstance(value, Iterator):
        return count_items(value)
    return value


def count_items(items: Iterator[object]) -> Iterator[object]:
    """Yield the items; count each like an iteration of a loop."""
    for number, item in enumerate(items):
        if number > ITEMS:
            raise LimitError(f"a value has more than {ITEMS} items")
        tick(8)
        yield item


def to_sequence(items: Any) -> Sequence[object] | dict[object, object]:
    """Convert an iterable to a list, unless it has a length that can be checked."""
    return items if isinstance(items, str | list | tuple | dict) else list(count_items(iter(items)))


def require_light(value: object, written: bool = False) -> object:
    """Return a container if it has few enough items, including nested ones; shared items count each time.

    written: whether it will be converted to text, which also limits the total length of its strings.
    """
    parts, length, waiting = 0, 0, list[Any]([value])
    while waiting:
        container = waiting.pop()
        if isinstance(container, LoopContext):
            raise LimitError("the variable `loop` cannot be stored in a list")
        container = container._Namespace__attrs if isinstance(container, Namespace) else container
        parts += len(container)
        if parts > ITEMS:
            raise LimitError(f"a value has more than {ITEMS} items")
        inner = container.values() if isinstance(container, dict) else container
        if written:
            length += sum(len(text) for text in inner if isinstance(text, str))
            length += sum(len(key) for key in container if isinstance(key, str)) if isinstance(container, dict) else 0
            if length > LENGTH:
                raise LimitError(f"a value exceeds {LENGTH} characters")
        waiting += [item for item in inner if isinstance(item, list | tuple | dict | Namespace | LoopContext)]
    return value


def as_text(value: object) -> str:
    """Convert a value to str. Raises LimitError if it is too large."""
    if isinstance(value, str):
        return value
    return str(require_light(value, written=True) if isinstance(value, list | tuple | dict) else value)


def check_parts(values: tuple[object, ...]) -> None:
    """Check values that a format or a filter converts to text."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > BITS:
            raise LimitError(f"a number exceeds {BITS} bits")
        if isinstance(value, list | tuple | dict | LoopContext):
            require_light(value, written=True)


def check_method(owner: object, name: str, arguments: tuple[object, ...], named: dict[str, object]) -> None:
    """Check that a method call on a string, number or container is allowed, and its result not too long."""
    if name not in _METHODS:
        raise LimitError(f"{type(owner).__name__}.{name} is not supported in templates")
    if name in ("ljust", "rjust", "zfill") and any(isinstance(n, int) and n > WIDTH for n in arguments):
        raise LimitError(f"a width exceeds {WIDTH}")
    if isinstance(owner, str) and name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        growth = owner.count(old) * (len(new) - len(old)) if isinstance(old, str) and isinstance(new, str) else 0
        if len(owner) + growth > LENGTH:
            raise LimitError(f"a value exceeds {LENGTH} characters")
    if isinstance(owner, str) and name in ("split", "rsplit", "splitlines") and len(owner) > ITEMS:
        separators = [argument for argument in (*arguments, *named.values()) if isinstance(argument, str) and argument]
        if (owner.count(separators[0]) if separators else len(owner) // 2) > ITEMS:
            raise LimitError(f"a value has more than {ITEMS} items")
    if isinstance(owner, str) and name == "join" and arguments:
        check_join(owner, arguments[0])


def check_join(separator: str, items: object) -> None:
    """Check the length of `separator.join(items)`."""
    if isinstance(items, list | tuple | dict | str):
        texts = items.values() if isinstance(items, dict) else items
        length = sum(len(item) if isinstance(item, str) else 1 for item in texts) if not isinstance(items, str) else 1
        if length + len(separator) * len(items) + len(items) > LENGTH:
            raise LimitError(f"a value exceeds {LENGTH} characters")


def check_layout(layout: str) -> None:
    """Check that a format's widths, such as %9d or {:9}, are small and constant (%*d and {:{}} are not).

    Fields like {0.name} or {0[1]} are rejected: they would access values that no check has seen.
    """
    if re.search(r"[0-9]{4}|%[^a-zA-Z%]*\*|{[^{}]*{", layout):
        raise LimitError(f"a width exceeds {WIDTH - 1}")
    if re.search(r"{[^{}:!]*[.\[]", layout):
        raise LimitError("attributes and items in format fields are not supported in templates")


def check_filtered(name: str, text: str, arguments: tuple[object, ...], other_arguments: tuple[Any, ...]) -> None:
    """Check the length of a filter's result; other_arguments: all arguments except the text."""
    if name == "replace" and len(arguments) > 1:
        check_method(text, "replace", tuple(map(str, arguments)), {})
    widths = [len(each) if isinstance(each, str) else each or 0 for each in other_arguments]
    width = max(widths, default=4)
    if name == "indent" and (text.count("\n") + 1) * width > LENGTH:
        raise LimitError(f"a value exceeds {LENGTH} characters")
    if name in (*GATHERING, "batch", "items", "title", "urlencode") and name != "join" and len(text) > ITEMS:
        raise LimitError(f"a value has more than {ITEMS} items")


def check_filled(layout: str, values: tuple[object, ...]) -> None:
    """Check the length of a filled format; every field counts as the longest value."""
    check_parts(values)
    longest = max(map(written_length, values), default=0)
    if len(layout) + (layout.count("%") + layout.count("{")) * longest > LENGTH:
        raise LimitError(f"a value exceeds {LENGTH} characters")


def written_length(value: object) -> int:
    """Estimate the length of a value as text, after require_light has checked it."""
    if isinstance(value, dict):
        return written_length((*value, *value.values()))
    if isinstance(value, list | tuple):
        return sum(4 + written_length(item) for item in value)
    return len(value) if isinstance(value, str) else BITS // 3 if isinstance(value, int) else 20


def check_indented(value: object, indent: int) -> None:
    """Check the length of indented JSON, where each item has a line indented by its depth."""
    length, depth, layer = 0, 0, [value]
    while layer := [item for item in layer if isinstance(item, list | tuple | dict)]:
        depth += 1
        length += depth * indent * sum(len(parts) + 1 for parts in layer)
        if length > LENGTH:
            raise LimitError(f"a value exceeds {LENGTH} characters")
        layer = [item for parts in layer for item in (parts.values() if isinstance(parts, dict) else parts)]
