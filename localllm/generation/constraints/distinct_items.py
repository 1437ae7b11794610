"""Arrays with uniqueItems, while their text is generated: an item that was there before is left out.

No mask could forbid it: whether an item equals another is known only when it ends, and then there may be no other
continuation.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from localllm.generation.constraints.schemas import alternatives

Schema = Mapping[str, Any]


def has_distinct(schema: Any) -> bool:
    """Return whether uniqueItems is anywhere in a schema."""
    if isinstance(schema, list):
        return any(map(has_distinct, schema))
    if not isinstance(schema, Mapping):
        return False
    return schema.get("uniqueItems") is True or any(map(has_distinct, schema.values()))


def without_distinct(schema: Any) -> Any:
    """Return the schema without uniqueItems."""
    if isinstance(schema, list):
        return [without_distinct(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        word: without_distinct(value) for word, value in schema.items() if word != "uniqueItems" or value is not True
    }


@dataclass
class _Level:
    """An object or an array that is open.

    Attributes:
        schemas: what is said of it.  key: of an object's value that comes.  count: of an array's items so far.
        seen: the items of an array that has each once, None of any other.
    """

    schemas: list[Schema]
    is_array: bool
    key: str | None = None
    count: int = 0
    seen: set[Any] | None = None
    has_said: bool = False


@dataclass
class DistinctItems:
    """Filters streamed JSON: removes repeated items from arrays with uniqueItems."""

    schema: Schema
    _levels: list[_Level] = field(default_factory=list)
    _said: list[str] = field(
        default_factory=lambda: [""]
    )  # what can go, and behind it the items that are being written
    _is_inside: bool = False
    _is_escaped: bool = False
    _string: str = ""

    def copy(self) -> "DistinctItems":
        """Return an independent copy."""
        schema, self.schema = self.schema, {}
        twin = deepcopy(self)
        self.schema = twin.schema = schema
        return twin

    def push(self, text: str) -> str:
        """Add text, and return the text that can be released now."""
        for character in text:
            self._take(character)
        said, self._said[0] = self._said[0], ""
        return said

    def _take(self, character: str) -> None:
        level = self._levels[-1] if self._levels else None
        is_distinct = level is not None and level.seen is not None
        if self._is_inside:
            self._string += character
            self._is_inside = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            if not self._is_inside and level and not level.is_array and level.key is None:
                level.key = json.loads(self._string)
        elif character == '"':
            self._is_inside, self._string = True, character
        elif character in "{[":
            self._open(character)
            return
        elif level and character in "}]":
            if is_distinct:
                self._end_item(level)
            self._levels.pop()
        elif level and character == ",":
            level.key, level.count = None, level.count + 1
            if is_distinct:
                self._end_item(level)
                self._said.append("")
                return
        self._said[-1] += character

    def _open(self, bracket: str) -> None:
        """Begin an object or an array."""
        schemas = [part for schema in self._next() for part in alternatives(schema, self.schema)]
        is_distinct = bracket == "[" and any(part.get("uniqueItems") is True for part in schemas)
        self._said[-1] += bracket
        self._levels.append(_Level(schemas, bracket == "[", seen=set() if is_distinct else None))
        self._said += [""] * is_distinct

    def _next(self) -> list[Any]:
        """Return the schema of the next value."""
        if not self._levels:
            return [self.schema]
        level, found = self._levels[-1], list[Any]()
        for schema in level.schemas:
            first, named = schema.get("prefixItems") or (), schema.get("properties") or {}
            if level.is_array:
                found.append(first[level.count] if level.count < len(first) else schema.get("items"))
            else:
                found.append(named[level.key] if level.key in named else schema.get("additionalProperties"))
        return found

    def _end_item(self, level: _Level) -> None:
        item = self._said.pop()
        is_new = bool(item.strip())
        if is_new:
            told = _identity(json.loads(item, parse_int=Decimal, parse_float=Decimal))
            is_new = told not in (level.seen or ())
            level.seen = {*(level.seen or ()), told}
        if is_new:
            self._said[-1] += "," * level.has_said + item
            level.has_said = True


def _identity(value: Any) -> Any:
    """Return a key that is the same for values that JSON Schema considers equal."""
    if isinstance(value, dict):
        return "{", frozenset((name, _identity(part)) for name, part in value.items())
    if isinstance(value, list):
        return "[", tuple(map(_identity, value))
    return type(value), value
