"""Objects of JSON schemas that have the properties that they name and no others, unless a schema says otherwise.

JSON Schema leaves an object open where `additionalProperties` is not there; small models then invent properties without
end, and llama.cpp takes such an object for closed. An object without `properties` is any object still.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from localllm.generation.json_pointers import resolved

Schema = Mapping[str, Any]
_SAYS = ("additionalProperties", "unevaluatedProperties")
_PARTS = ("anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def closed(schema: Any) -> Any:
    """A schema whose objects are closed, within its references, too."""
    return _Closing(schema).schema(schema) if isinstance(schema, Mapping) else schema


class _Closing:
    """The schemas within a root."""

    def __init__(self, root: Schema):
        self._root = root

    def schema(self, schema: Any, others: frozenset[str] = frozenset(), depth: int = 0) -> Any:
        """One, closed.  others: names of properties that are spoken of elsewhere, of the same object."""
        if isinstance(schema, list):
            return [self.schema(part, others, depth) for part in schema]
        if not isinstance(schema, Mapping):
            return schema
        parts = {word: schema[word] for word in ("allOf", *_PARTS) if isinstance(schema.get(word), list)}
        if "$ref" in schema and (others or self._is_joined(schema, parts)) and depth < 8:
            return self.schema(self._inlined(schema), others, depth + 1)
        changed = {word: self._within(word, value) for word, value in schema.items() if word not in parts}
        base = others | self._names(schema, ("allOf",))
        every = base | self._names(schema, ("allOf", *_PARTS))
        is_open = self._says(schema) if self._is_joined(schema, parts) else False
        for word, value in parts.items():
            about = every if word == "allOf" else base
            changed[word] = [self._inside(part) if is_open else self.schema(part, about, depth) for part in value]
        if any(isinstance(schema.get(word), Mapping) for word in ("properties", "patternProperties")) and not is_open:
            self._close(changed, every if parts else others)
        return changed

    def _close(self, schema: dict[str, Any], others: frozenset[str]) -> None:
        """Unless it says itself what else there may be."""
        if any(word in schema for word in _SAYS):
            return
        named = dict(schema.get("properties") or {})
        required = schema.get("required")
        for name in [*(required if isinstance(required, list) else ()), *sorted(others)]:
            named.setdefault(name, {})
        least = schema.get("minProperties")
        if not isinstance(least, int) or least <= len(named):
            schema |= {"properties": named, "additionalProperties": False}

    def _is_joined(self, schema: Schema, parts: Mapping[str, Any]) -> bool:
        """Whether several schemas speak of the same object."""
        return "allOf" in parts or sum(word in schema for word in ("properties", "$ref", *_PARTS)) > 1

    def _inside(self, schema: Any) -> Any:
        """One whose object is left as it is; those within it are closed."""
        if not isinstance(schema, Mapping):
            return schema
        same = ("allOf", *_PARTS)
        return {word: value if word in same else self._within(word, value) for word, value in schema.items()}

    def _within(self, word: str, value: Any) -> Any:
        """Schemas that a keyword has, of other values."""
        if word in _BY_NAME and isinstance(value, Mapping):
            return {name: self.schema(part) for name, part in value.items()}
        return self.schema(value) if word in _INNER else value

    def _inlined(self, schema: Schema) -> dict[str, Any]:
        """With what its reference leads to in it, as far as that is another part of the same."""
        rest = {word: value for word, value in schema.items() if word != "$ref"}
        there = resolved(schema["$ref"], self._root)
        if not isinstance(there, Mapping):
            return {**rest, "allOf": [*rest.get("allOf", []), {"$ref": schema["$ref"]}]} if rest else dict(schema)
        return {**rest, "allOf": [*rest.get("allOf", []), dict(there)]} if rest else dict(there)

    def _names(self, schema: Schema, words: tuple[str, ...]) -> frozenset[str]:
        """The properties of one and of its parts."""
        found = set[str]()
        for part in self._parts(schema, words):
            found |= set(part.get("properties") or ())
        return frozenset(found)

    def _says(self, schema: Schema) -> bool:
        parts = self._parts(schema, ("allOf", *_PARTS))
        return any(word in part for part in parts for word in (*_SAYS, "patternProperties"))

    def _parts(self, schema: Any, words: tuple[str, ...], depth: int = 0) -> Iterator[Schema]:
        """One and those that speak of the same object."""
        if not isinstance(schema, Mapping) or depth > 8:
            return
        yield schema
        yield from self._parts(resolved(schema.get("$ref"), self._root), words, depth + 1)
        for word in words:
            for part in schema.get(word) or ():
                yield from self._parts(part, words, depth + 1)
