"""Rewrite JSON schemas so that llguidance enforces their meaning, and refuse those that it cannot enforce.

Objects without `additionalProperties` are closed: JSON Schema allows any other property then, but small models invent
properties without end; llama.cpp closes such objects, too. An object without `properties` stays open.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any, TypeGuard
from urllib.parse import unquote

from localllm.errors import UsageError

Schema = Mapping[str, Any]  # a JSON schema or subschema


def resolve_pointer(reference: object, root: Schema) -> object:
    """Return the subschema to which a reference such as "#/$defs/name" points; None if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: object = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and step.isdecimal():
            place = place[int(step)] if int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def follow_references(schema: object, root: Schema) -> object:
    """Return the first schema without $ref at the end of a chain of references; None after 20 references."""
    for _ in range(20):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = resolve_pointer(schema["$ref"], root)
    return None


_STATED = ("additionalProperties", "unevaluatedProperties")
_PARTS = ("anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def close_objects(schema: Schema) -> Schema:
    """Return a schema whose objects have only the properties that it lists, also across references."""
    try:
        return ObjectCloser(schema).close_object(schema)
    except RecursionError:
        raise UsageError("the schema cannot be used: it is nested too deeply") from None


MAX_INLINED = 1000  # references
Path = tuple[str, ...]  # the references that were followed to reach a schema


class ObjectCloser:
    """Closes the objects of all schemas within a root schema."""

    def __init__(self, root: Schema):
        self._root, self._count = root, 0

    def close(self, schema: object, required: frozenset[str] = frozenset(), path: Path = ("#",)) -> object:
        """Return a schema, or a list of schemas, with closed objects; other values are returned unchanged.

        required: names of the object's properties in other schemas. path: the references that led here.
        """
        if isinstance(schema, list):
            return [self.close(part, required, path) for part in schema]
        return self.close_object(schema, required, path) if isinstance(schema, Mapping) else schema

    def close_object(self, schema: Schema, required: frozenset[str] = frozenset(), path: Path = ("#",)) -> Schema:
        """Return a schema that is an object with closed objects; see `close`."""
        parts = {word: schema[word] for word in ("allOf", *_PARTS) if isinstance(schema.get(word), list)}
        is_joined, base, every = self._is_joined(schema, parts), required, required
        if isinstance(reference := schema.get("$ref"), str) and (required or is_joined) and reference not in path:
            return self.close_object(self._inline_reference(schema), required, (*path, reference))
        if is_joined:
            base |= self._collect_property_names(schema, ("allOf",))
            every = base | self._collect_property_names(schema, ("allOf", *_PARTS))
        changed = {word: self._close_keyword(word, value, path) for word, value in schema.items() if word not in parts}
        is_open = is_joined and self._is_restricted(schema)
        for word, value in parts.items():
            about = every if word == "allOf" else base
            changed[word] = [
                self._close_nested(part, path) if is_open else self.close(part, about, path) for part in value
            ]
        if any(isinstance(schema.get(word), Mapping) for word in ("properties", "patternProperties")) and not is_open:
            self._close_in_place(changed, every if parts else required)
        return changed

    def _close_in_place(self, schema: dict[str, Any], required: frozenset[str]) -> None:
        """Close the object of a schema in place, unless it has additionalProperties."""
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

    def _close_nested(self, schema: object, path: Path) -> object:
        """Return a schema with the objects within it closed, but not its own object."""
        if not isinstance(schema, Mapping):
            return schema
        in_place = ("allOf", *_PARTS)
        return {
            word: value if word in in_place else self._close_keyword(word, value, path)
            for word, value in schema.items()
        }

    def _close_keyword(self, word: str, value: object, path: Path) -> object:
        """Return the value of a keyword with closed objects, if its schemas describe values within the object."""
        if word in _BY_NAME and isinstance(value, Mapping):
            return {name: self.close(part, path=path) for name, part in value.items()}
        return self.close(value, path=path) if word in _INNER else value

    def _inline_reference(self, schema: Schema) -> dict[str, object]:
        """Replace the $ref of a schema by the schema that it points to, joined with the other keywords by allOf.

        Raises UsageError after MAX_INLINED references.
        """
        self._count += 1
        if self._count > MAX_INLINED:
            raise UsageError(
                f"the schema cannot be used: more than {MAX_INLINED} references have other keywords next to $ref"
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

    def _collect_property_names(self, schema: Schema, words: tuple[str, ...]) -> frozenset[str]:
        """Return the names of the properties of a schema and of those that `words` apply to the same object."""
        named = [part.get("properties") for part in self._list_parts(schema, words)]
        return frozenset(name for properties in named if isinstance(properties, Mapping) for name in properties)

    def _is_restricted(self, schema: Schema) -> bool:
        """Return whether `schema`, or one applied to the same object, lists properties or patterns of their names."""
        parts = self._list_parts(schema, ("allOf", *_PARTS))
        return any(word in part for part in parts for word in (*_STATED, "patternProperties"))

    def _list_parts(self, schema: object, words: tuple[str, ...]) -> list[Schema]:
        """Return a schema, and those that $ref and the keywords in `words` apply to the same object."""
        parts, waiting = dict[int, Schema](), [schema]
        while waiting:
            subschema = waiting.pop()
            if isinstance(subschema, Mapping) and id(subschema) not in parts:
                parts[id(subschema)] = subschema
                waiting.append(resolve_pointer(subschema.get("$ref"), self._root))
                waiting += [part for word in words for part in _as_list(subschema.get(word))]
        return [*parts.values()]


def _as_list(value: object) -> list[object]:
    """Return a list unchanged; [] for any other value."""
    return value if isinstance(value, list) else []


TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Formats that llguidance enforces; all others are annotations.
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_NOTES = ("default", "examples", "example")  # keywords with values that constrain nothing
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf", "not", "if",
            "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # direction of tighter bounds
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SAFE, _MOST = 2**53, 2**63 - 1024  # all integers up to _SAFE are exact floats; _MOST: largest float of a bound
_LARGEST_SET = 6  # values of a uniqueItems array, whose subsets become alternatives
_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")  # may name properties, too


def rewrite_schema(schema: Schema) -> Schema:
    """Return a schema in the keywords that llguidance supports, with the same or a narrower meaning.

    Raises UsageError if that is impossible.
    """
    return _rewrite_object(schema, schema)


def _rewrite(schema: object, root: Schema) -> object:
    """Rewrite a schema or a list of schemas; other values are returned unchanged."""
    if isinstance(schema, list):
        return [_rewrite(part, root) for part in schema]
    return _rewrite_object(schema, root) if isinstance(schema, Mapping) else schema


def _rewrite_object(schema: Schema, root: Schema) -> Schema:
    """Rewrite a schema that is an object; see rewrite_schema."""
    changed = dict[str, object]()
    for word, value in schema.items():
        if word in _BY_NAME and isinstance(value, Mapping):
            changed[word] = {name: _rewrite(part, root) for name, part in value.items()}
        elif word in _SCHEMAS:
            changed[word] = _rewrite(value, root)
        elif word == "const" or (word == "enum" and value is not None):
            changed[word] = _require_exact_value(value, word)
        elif value is not None and word not in _NOTES:
            changed[word] = int(value) if word in _COUNTS and isinstance(value, float) and value.is_integer() else value
    _simplify(changed)
    _clamp_bounds(changed)
    return _replace_unique_items(_replace_property_names(remove_look_around(changed), root), root)


def _simplify(schema: dict[str, object]) -> None:
    """Convert the names of types to lower case and drop keywords without effect, in place."""
    for word in [*_BY_NAME, *_SCHEMAS]:
        if word in schema and schema[word] is None:
            del schema[word]
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        lower = [kind.lower() if isinstance(kind, str) and kind.lower() in TYPES else kind for kind in _to_list(kinds)]
        schema["type"] = lower if isinstance(kinds, list) else lower[0]
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("unevaluatedProperties") is False and not any(word in schema for word in _APPLICATORS):
        del schema["unevaluatedProperties"]  # which are then the additional ones
        schema["additionalProperties"] = schema.get("additionalProperties", False)


def _to_list(value: object) -> list[object]:
    """Return a list unchanged; any other value as the only item of a list."""
    return value if isinstance(value, list) else [value]


def _clamp_bounds(schema: dict[str, object]) -> None:
    """Make bounds exact as floats, in place. Raises UsageError if no value remains within 64 bits."""
    for word, inwards in _BOUNDS.items():
        bound = schema.get(word)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= _SAFE:
            continue
        if bound * inwards >= _MOST:
            raise UsageError(f"the schema cannot be used: {word} is beyond 64 bits")
        if bound * inwards <= -_MOST:
            schema[word] = -inwards * _MOST  # leaves out what is further away
        elif isinstance(bound, int) and (near := float(bound)) != bound:
            outside = (int(near) - bound) * inwards < 0
            schema[word] = int(math.nextafter(near, inwards * math.inf) if outside else near)


def _require_exact_value(value: object, word: str) -> object:
    """Return a value with large numbers as floats. Raises UsageError for a number that no float represents exactly.

    llguidance (1.9) reads all numbers as floats, and fails at the smallest 64-bit integer.
    """
    if isinstance(value, Mapping):
        return {name: _require_exact_value(part, word) for name, part in value.items()}
    if isinstance(value, list):
        return [_require_exact_value(part, word) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _SAFE:
        return value
    near = float(value) if abs(value) < 10**308 else math.inf
    if math.isinf(near) or near == -(2.0**63) or Decimal(repr(near)) != value:
        raise UsageError(f"the schema cannot be used: {word} has a number that is not exact in 64 bits, {value}")
    return near


def _replace_property_names(schema: dict[str, object], root: Schema) -> dict[str, object]:
    """Replace propertyNames by properties or patternProperties.

    It must be a list or a pattern, and the schema must not have properties.
    """
    names = follow_references(schema.get("propertyNames"), root)
    if not isinstance(names, Mapping) or any(word in schema for word in ("properties", "patternProperties", "$ref")):
        return schema
    without_names = {word: value for word, value in schema.items() if word != "propertyNames"}
    values, about = without_names.get("additionalProperties", {}), {"title", "description", "type"}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and names.keys() <= {"enum", "const", *about}:
        named = {name: values for name in listed if isinstance(name, str)}
        return {**without_names, "properties": named, "additionalProperties": False}
    if isinstance(names.get("pattern"), str) and names.keys() <= {"pattern", *about}:
        return {**without_names, "patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    return without_names if names.keys() <= about and names.get("type", "string") == "string" else schema


def _replace_unique_items(schema: dict[str, object], root: Schema) -> dict[str, object]:
    """Replace uniqueItems of at most _LARGEST_SET possible values by alternatives, one for each subset.

    uniqueItems of larger sets stays in the schema: distinct_items.py drops repeated items from the answer. Raises
    UsageError if minItems does not allow that.
    """
    if schema.get("uniqueItems") is not True:
        return schema
    without_distinct = {word: value for word, value in schema.items() if word != "uniqueItems"}
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", _LARGEST_SET)
    if not isinstance(minimum, int) or not isinstance(maximum, int) or maximum in (0, 1):
        return without_distinct
    values = _list_values(schema.get("items"), root)
    if values is None or len(values) > _LARGEST_SET or "prefixItems" in schema or "anyOf" in schema:
        if minimum in (0, 1):
            return schema
        raise UsageError(
            "the schema cannot be used: uniqueItems is not supported with minItems above 1: leave one of them out"
        )
    other_words = {
        word: value for word, value in without_distinct.items() if word not in ("items", "minItems", "maxItems", "type")
    }
    counts = range(minimum, min(maximum, len(values)) + 1)
    choices = [list(combination) for count in counts for combination in combinations(values, count)]
    if not choices:
        raise UsageError("the schema cannot be used: uniqueItems leaves fewer values than minItems asks for")
    arrays = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in combination],
            "items": False,
            "minItems": len(combination),
        }
        for combination in choices
    ]
    return {**other_words, "anyOf": arrays}


def _list_values(items: object, root: Schema) -> list[object] | None:
    """Return all values that a schema allows, each once; None if the schema does not list them."""
    items = follow_references(items, root)
    if not isinstance(items, Mapping):
        return None
    if "const" in items:
        return [items["const"]]
    if isinstance(items.get("enum"), list):
        keys = [(type(value).__name__, str(value)) for value in items["enum"]]
        return [value for place, value in enumerate(items["enum"]) if keys[place] not in keys[:place]]
    return [True, False] if items.get("type") == "boolean" else None


_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a class or a character


def remove_look_around(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without look-around where possible, with the same or a narrower meaning.

    Such patterns are common: pydantic (2.13) describes Decimal as a number or a string with a look-ahead, and patterns
    for passwords look ahead for a digit and a letter.
    """
    parts = schema.get("anyOf")
    if isinstance(parts, list):
        usable = [part for part in parts if not (isinstance(part, Mapping) and has_look_around(part.get("pattern")))]
        schema = {**schema, "anyOf": usable or parts}
    patterns = split_look_aheads(schema["pattern"]) if has_look_around(schema.get("pattern")) else None
    if not patterns:
        return schema
    others = {word: value for word, value in schema.items() if word != "pattern"}
    return {**others, "allOf": [*(others.get("allOf") or ()), *({"pattern": pattern} for pattern in patterns)]}


def has_look_around(pattern: object) -> bool:
    """Return whether a pattern is a regular expression with look-ahead or look-behind."""
    if not isinstance(pattern, str) or "(?" not in pattern:
        return False
    return any(token == "(" and pattern.startswith(_LOOK_AROUND, place) for place, _, token in _walk_pattern(pattern))


def split_look_aheads(pattern: str) -> list[str] | None:
    """Split ^(?=A)(?=B)C into patterns that must all match: ^(?:A), ^(?:B), ^C.

    Returns None for a pattern of any other form.
    """
    if not pattern.startswith("^"):
        return None
    remaining, look_aheads = pattern[1:], list[str]()
    while remaining.startswith("(?="):
        end = _find_closing(remaining)
        if end is None:
            return None
        look_aheads.append(f"^(?:{remaining[3:end]})")
        remaining = remaining[end + 1 :]
    has_alternatives = any(token == "|" and depth == 0 for _, depth, token in _walk_pattern(remaining))
    if has_alternatives or any(has_look_around(part) for part in [remaining, *look_aheads]):
        return None
    return [*look_aheads, f"^{remaining}"]


def _find_closing(pattern: str) -> int | None:
    """Return the index at which the first parenthesis of a pattern is closed; None if it is not."""
    return next((place for place, depth, token in _walk_pattern(pattern) if token == ")" and depth == 0), None)


def _walk_pattern(pattern: str) -> list[tuple[int, int, str]]:
    """Return each token of a pattern: its index, the number of open parentheses after it, and its text."""
    depth, positions = 0, []
    for token in _TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        positions.append((token.start(), depth, token[0]))
    return positions


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by names
_VALUES = ("enum", "const", "default", "examples", "example")  # keywords with values, which are no schemas
_BOUND_PAIRS = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
# White space in JSON as models were trained to write it: none, a space, or one or two line breaks with an indentation.
# Without a limit a model may write spaces for ever.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,64})?"
# Options of llguidance for all schemas: escapes of any character, in strings whose characters the schema leaves free.
OPTIONS: dict[str, object] = {
    "coerce_one_of": False,
    "whitespace_pattern": WHITE_SPACE,
    "json_allow_general_unicode_escapes": True,
}
_LEAST = 1e-9  # relative distance by which an exclusive bound is moved to make it inclusive


def make_exact(schema: Schema, is_open: bool = False) -> dict[str, object]:
    """Return a schema with which llguidance (1.9) allows only values that are valid by the original.

    is_open: whether objects without additionalProperties may have properties that they do not list.

    Exclusive bounds: llguidance allows 0 for "more than 0, at most 0.5", because both bounds have the same integer
    part. Such a bound becomes an inclusive one at the next float, which excludes almost nothing. The same holds for all
    bounds of schemas that are merged (allOf, a $ref with other keywords), because the other bound may be in another
    schema. A boolean exclusiveMinimum is from draft 4, where it tells whether `minimum` is exclusive. A list of `items`
    has the meaning that it had up to draft 2019-09, also without $schema. Raises UsageError for a schema that cannot be
    made exact.
    """
    schema = rewrite_schema(schema)
    schema = schema if is_open else close_objects(schema)
    parts, draft = [*_iterate_schemas(schema)], str(schema.get("$schema", ""))
    is_old = any(number in draft for number in ("draft-04", "draft-06", "draft-07", "2019-09"))
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for part in parts)
    result = {word: _make_keyword_exact(word, value, merges) for word, value in schema.items()}
    result = _make_inclusive(result, merges)
    for part in _iterate_schemas(result):
        _spell_tuple(part, is_old)
    return result


def _spell_tuple(schema: dict[str, Any], is_old: bool) -> None:
    """Rename the keywords of tuples in place.

    llguidance reads prefixItems only in draft 2020-12, and `items` in earlier drafts.
    """
    listed = schema["items"] if isinstance(schema.get("items"), list) else None
    if is_old and "prefixItems" in schema:
        additional = {"additionalItems": schema["items"]} if "items" in schema else {}
        schema |= {**additional, "items": schema.pop("prefixItems")}
    elif listed is not None and not is_old:
        schema["prefixItems"] = listed
        schema["items"] = schema.pop("additionalItems", True)


def _iterate_schemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield all schemas within a schema or a list of schemas, the outer ones first."""
    if isinstance(schema, list):
        for item in schema:
            yield from _iterate_schemas(item)
    elif isinstance(schema, dict):
        yield schema
        for word, value in schema.items():
            if word in _NAMED_SCHEMAS and isinstance(value, Mapping):
                for part in value.values():
                    yield from _iterate_schemas(part)
            elif word not in _VALUES:
                yield from _iterate_schemas(value)


def _make_schema_exact(schema: object, merges: bool) -> object:
    if isinstance(schema, list):
        return [_make_schema_exact(item, merges) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return _make_inclusive({word: _make_keyword_exact(word, value, merges) for word, value in schema.items()}, merges)


def _make_keyword_exact(word: str, value: object, merges: bool) -> object:
    """Apply _make_schema_exact to the schemas in the value of a keyword."""
    if word in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _make_schema_exact(part, merges) for name, part in value.items()}
    return value if word in _VALUES else _make_schema_exact(value, merges)


def _make_inclusive(schema: dict[str, Any], merges: bool) -> dict[str, Any]:
    """Replace exclusive bounds by inclusive ones; see make_exact."""
    for exclusive, inclusive, _ in _BOUND_PAIRS:
        is_excluded = schema.get(exclusive)
        if isinstance(is_excluded, bool):
            del schema[exclusive]
            if is_excluded and _is_number(schema.get(inclusive)):
                schema[exclusive] = schema.pop(inclusive)
    numbers = [schema[word] for bound in _BOUND_PAIRS for word in bound[:2] if _is_number(schema.get(word))]
    for exclusive, inclusive, up in _BOUND_PAIRS:
        bound = schema.get(exclusive, 0.5)
        if not _is_number(bound) or bound % 1 or inclusive in schema:
            continue
        if merges or any(0 < abs(number - bound) < 1 for number in numbers):
            del schema[exclusive]
            schema[inclusive] = bound + up * _LEAST * max(1, abs(bound))
    return schema


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def order_properties(value: object, schema: object, root: Schema) -> object:
    """Return a value with the properties of its objects in the order of a schema, a subschema of `root`."""
    parts = list_alternatives(schema, root)
    if isinstance(value, list):
        items = [part["items"] for part in parts if "items" in part]
        return [order_properties(item, {"anyOf": items}, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    keys = dict[str, list[object]]()
    for part in parts:
        for name, inner in (part.get("properties") or {}).items():
            keys.setdefault(name, []).append(inner)
    names = [*(name for name in keys if name in value), *(name for name in value if name not in keys)]
    return {name: order_properties(value[name], {"anyOf": keys.get(name, [])}, root) for name in names}


def list_alternatives(schema: object, root: Schema) -> list[Schema]:
    """Return a schema and the schemas that $ref, allOf, anyOf and oneOf apply to the same value, each once."""
    schemas, waiting = dict[int, Schema](), [schema]
    while waiting:
        alternative = waiting.pop()
        if not isinstance(alternative, Mapping) or id(alternative) in schemas:
            continue
        schemas[id(alternative)] = alternative
        parts = [part for word in ("allOf", "oneOf", "anyOf") for part in reversed(alternative.get(word) or ())]
        waiting += [*parts, resolve_pointer(alternative.get("$ref"), root)]
    return [*schemas.values()]
