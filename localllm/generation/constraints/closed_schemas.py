"""Close the objects of JSON schemas: without `additionalProperties`, only listed properties are allowed.

JSON Schema allows any other property there, but small models then invent properties without end; llama.cpp closes such
objects, too. An object without `properties` stays open.
"""

from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.generation.constraints.json_pointers import Schema, resolve_pointer

_STATED = ("additionalProperties", "unevaluatedProperties")
_PARTS = ("anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def close_objects(schema: Schema) -> Schema:
    """Close the objects of a schema to properties that it does not list, also across references."""
    try:
        return _Closing(schema).object_schema(schema)
    except RecursionError:
        raise UsageError("the schema cannot be used: it is nested too deeply") from None


MOST_JOINED = 1000  # references
Path = tuple[str, ...]  # the references that were followed to reach a schema


class _Closing:
    """Closes the objects of all schemas within a root schema."""

    def __init__(self, root: Schema):
        self._root, self._count = root, 0

    def schema(self, schema: object, required: frozenset[str] = frozenset(), path: Path = ("#",)) -> object:
        """Close a schema, or each of a list.  required: names of the object's properties in other schemas."""
        if isinstance(schema, list):
            return [self.schema(part, required, path) for part in schema]
        return self.object_schema(schema, required, path) if isinstance(schema, Mapping) else schema

    def object_schema(self, schema: Schema, required: frozenset[str] = frozenset(), path: Path = ("#",)) -> Schema:
        """Close a schema that is an object: see `schema`."""
        parts = {word: schema[word] for word in ("allOf", *_PARTS) if isinstance(schema.get(word), list)}
        is_joined, base, every = self._is_joined(schema, parts), required, required
        if isinstance(reference := schema.get("$ref"), str) and (required or is_joined) and reference not in path:
            return self.object_schema(self._inline(schema), required, (*path, reference))
        if is_joined:
            base |= self._names(schema, ("allOf",))
            every = base | self._names(schema, ("allOf", *_PARTS))
        changed = {word: self._within(word, value, path) for word, value in schema.items() if word not in parts}
        is_open = is_joined and self._is_stated(schema)
        for word, value in parts.items():
            about = every if word == "allOf" else base
            changed[word] = [self._inside(part, path) if is_open else self.schema(part, about, path) for part in value]
        if any(isinstance(schema.get(word), Mapping) for word in ("properties", "patternProperties")) and not is_open:
            self._close(changed, every if parts else required)
        return changed

    def _close(self, schema: dict[str, Any], required: frozenset[str]) -> None:
        """Close an object's schema in place, unless it has additionalProperties itself."""
        if any(word in schema for word in _STATED):
            return
        named = dict(schema.get("properties") or {})
        for name in [*_as_list(schema.get("required")), *sorted(required)]:
            if isinstance(name, str):
                named.setdefault(name, {})
        least = schema.get("minProperties")
        if not isinstance(least, int) or least <= len(named):
            schema |= {"properties": named, "additionalProperties": False}

    def _is_joined(self, schema: Schema, parts: Schema) -> bool:
        """Return whether several schemas apply to the same object."""
        count = sum(word in schema for word in ("properties", "$ref", *_PARTS))
        return count + len(parts.get("allOf", ())) > 1

    def _inside(self, schema: object, path: Path) -> object:
        """Close the objects within a schema, but not the schema's own object."""
        if not isinstance(schema, Mapping):
            return schema
        in_place = ("allOf", *_PARTS)
        return {word: value if word in in_place else self._within(word, value, path) for word, value in schema.items()}

    def _within(self, word: str, value: object, path: Path) -> object:
        """Close the schemas in a keyword's value, which describe other values than the object itself."""
        if word in _BY_NAME and isinstance(value, Mapping):
            return {name: self.schema(part, path=path) for name, part in value.items()}
        return self.schema(value, path=path) if word in _INNER else value

    def _inline(self, schema: Schema) -> dict[str, object]:
        """Replace a schema's $ref by the schema that it points to, joined with the other keywords by allOf."""
        self._count += 1
        if self._count > MOST_JOINED:
            raise UsageError(
                f"the schema cannot be used: more than {MOST_JOINED} references have other keywords next to $ref"
            )
        siblings = {word: value for word, value in schema.items() if word != "$ref"}
        target = resolve_pointer(schema["$ref"], self._root)
        if not isinstance(target, Mapping):
            return (
                {**siblings, "allOf": [*_as_list(siblings.get("allOf")), {"$ref": schema["$ref"]}]}
                if siblings
                else dict(schema)
            )
        return {**siblings, "allOf": [*_as_list(siblings.get("allOf")), dict(target)]} if siblings else dict(target)

    def _names(self, schema: Schema, words: tuple[str, ...]) -> frozenset[str]:
        """Collect the property names of a schema and of its parts."""
        named = [part.get("properties") for part in self._parts(schema, words)]
        return frozenset(name for properties in named if isinstance(properties, Mapping) for name in properties)

    def _is_stated(self, schema: Schema) -> bool:
        """Return whether a schema, or one that applies to the same object, says which other properties it may have."""
        parts = self._parts(schema, ("allOf", *_PARTS))
        return any(word in part for part in parts for word in (*_STATED, "patternProperties"))

    def _parts(self, schema: object, words: tuple[str, ...]) -> list[Schema]:
        """List a schema, and those that $ref and the keywords in `words` apply to the same object."""
        parts, waiting = dict[int, Schema](), [schema]
        while waiting:
            subschema = waiting.pop()
            if isinstance(subschema, Mapping) and id(subschema) not in parts:
                parts[id(subschema)] = subschema
                waiting.append(resolve_pointer(subschema.get("$ref"), self._root))
                waiting += [part for word in words for part in _as_list(subschema.get(word))]
        return [*parts.values()]


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
