"""Enforce uniqueItems while an array is generated: drop repeated items from the text.

A token mask cannot forbid repetitions: whether an item equals another one is known only at its end, when there may be
no other valid continuation.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal

from localllm.generation.constraints.schemas import Schema, list_alternatives


def has_unique_items(schema: object) -> bool:
    """Return whether a schema contains uniqueItems at any depth."""
    if isinstance(schema, list):
        return any(map(has_unique_items, schema))
    if not isinstance(schema, Mapping):
        return False
    return schema.get("uniqueItems") is True or any(map(has_unique_items, schema.values()))


def drop_unique_items(schema: Schema) -> dict[str, object]:
    """Return a schema without uniqueItems at any depth."""
    return {
        word: _drop_from_value(value) for word, value in schema.items() if word != "uniqueItems" or value is not True
    }


def _drop_from_value(value: object) -> object:
    """Return the value of a keyword without uniqueItems in the schemas that it contains."""
    if isinstance(value, list):
        return [_drop_from_value(part) for part in value]
    return drop_unique_items(value) if isinstance(value, Mapping) else value


@dataclass
class _OpenContainer:
    """An object or array that is not closed yet.

    Attributes:
        schemas: the schemas that apply to it.  key: key of the next value of an object.
        count: number of complete items of an array.
        seen: keys (see _make_key) of the items of an array with uniqueItems; else None.
        has_output: whether one of these items was released.
    """

    schemas: list[Schema]
    is_array: bool
    key: str | None = None
    count: int = 0
    seen: set[object] | None = None
    has_output: bool = False


@dataclass
class DistinctItems:
    """Removes repeated items from arrays with uniqueItems, in JSON that is being generated."""

    schema: Schema
    _levels: list[_OpenContainer] = field(default_factory=list)
    _output: list[str] = field(default_factory=lambda: [""])  # releasable text, then items that are not complete
    _is_inside: bool = False
    _is_escaped: bool = False
    _string: str = ""

    def copy(self) -> "DistinctItems":
        """Return an independent copy, which shares the schema."""
        schema, self.schema = self.schema, {}
        twin = deepcopy(self)
        self.schema = twin.schema = schema
        return twin

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be removed any more."""
        for character in text:
            self._push_character(character)
        released, self._output[0] = self._output[0], ""
        return released

    def _push_character(self, character: str) -> None:
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
                self._output.append("")
                return
        self._output[-1] += character

    def _open(self, bracket: str) -> None:
        schemas = [part for schema in self._get_schemas() for part in list_alternatives(schema, self.schema)]
        is_distinct = bracket == "[" and any(part.get("uniqueItems") is True for part in schemas)
        self._output[-1] += bracket
        self._levels.append(_OpenContainer(schemas, bracket == "[", seen=set() if is_distinct else None))
        self._output += [""] * is_distinct

    def _get_schemas(self) -> list[object]:
        """Return the schemas that apply to the next value."""
        if not self._levels:
            return [self.schema]
        level, schemas = self._levels[-1], list[object]()
        for schema in level.schemas:
            first, named = schema.get("prefixItems") or (), schema.get("properties") or {}
            if level.is_array:
                schemas.append(first[level.count] if level.count < len(first) else schema.get("items"))
            else:
                schemas.append(named[level.key] if level.key in named else schema.get("additionalProperties"))
        return schemas

    def _end_item(self, level: _OpenContainer) -> None:
        """Release or drop the item of an array that has just ended."""
        item = self._output.pop()
        is_new = bool(item.strip())
        if is_new:
            key = _make_key(json.loads(item, parse_int=Decimal, parse_float=Decimal))
            is_new = key not in (level.seen or ())
            level.seen = {*(level.seen or ()), key}
        if is_new:
            self._output[-1] += "," * level.has_output + item
            level.has_output = True


def _make_key(value: object) -> object:
    """Return a hashable key that is equal for values that are equal in JSON Schema."""
    if isinstance(value, dict):
        return "{", frozenset((name, _make_key(part)) for name, part in value.items())
    if isinstance(value, list):
        return "[", tuple(map(_make_key, value))
    return type(value), value
