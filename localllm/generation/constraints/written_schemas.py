"""Rewrite JSON schemas in the keywords that llguidance knows, without annotations and numbers beyond 64 bits."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from localllm.errors import UsageError
from localllm.generation.constraints.json_pointers import Schema, follow_references

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Formats that llguidance enforces; all others are annotations.
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOTES = ("default", "examples", "example")  # keywords with values that constrain nothing
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf", "not", "if",
            "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # direction of tighter bounds
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SAFE, _MOST = 2**53, 2**63 - 1024  # all integers up to _SAFE are exact floats; _MOST: largest float of a bound
_LARGEST_SET = 6  # values of a uniqueItems array, whose subsets become alternatives
_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")  # may name properties, too


def rewrite_schema(schema: Schema) -> Schema:
    """Rewrite a schema in the keywords that llguidance supports, with the same or a narrower meaning.

    Raises UsageError if that is not possible.
    """
    return _rewrite_object(schema, schema)


def _rewrite(schema: object, root: Schema) -> object:
    if isinstance(schema, list):
        return [_rewrite(part, root) for part in schema]
    return _rewrite_object(schema, root) if isinstance(schema, Mapping) else schema


def _rewrite_object(schema: Schema, root: Schema) -> Schema:
    """Rewrite a schema that is an object: see rewrite_schema."""
    changed = dict[str, object]()
    for word, value in schema.items():
        if word in _BY_NAME and isinstance(value, Mapping):
            changed[word] = {name: _rewrite(part, root) for name, part in value.items()}
        elif word in _SCHEMAS:
            changed[word] = _rewrite(value, root)
        elif word == "const" or (word == "enum" and value is not None):
            changed[word] = _exact(value, word)
        elif value is not None and word not in _NOTES:
            changed[word] = int(value) if word in _COUNTS and isinstance(value, float) and value.is_integer() else value
    _simplify(changed)
    _bound(changed)
    return _with_distinct_items(_with_named_properties(without_look_around(changed), root), root)


def _simplify(schema: dict[str, object]) -> None:
    """Convert types to lower case, and drop keywords without effect, in place."""
    for word in [*_BY_NAME, *_SCHEMAS]:
        if word in schema and schema[word] is None:
            del schema[word]
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        lower = [kind.lower() if isinstance(kind, str) and kind.lower() in TYPES else kind for kind in _as_list(kinds)]
        schema["type"] = lower if isinstance(kinds, list) else lower[0]
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("unevaluatedProperties") is False and not any(word in schema for word in _APPLICATORS):
        del schema["unevaluatedProperties"]  # which are then the additional ones
        schema["additionalProperties"] = schema.get("additionalProperties", False)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _bound(schema: dict[str, object]) -> None:
    """Make bounds exact as floats. Raises UsageError if nothing is left within 64 bits."""
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


def _exact(value: object, word: str) -> object:
    """Convert large numbers to floats. Raises UsageError for one that a float cannot represent exactly.

    llguidance (1.9) reads all numbers as floats, and fails at the smallest 64-bit integer.
    """
    if isinstance(value, Mapping):
        return {name: _exact(part, word) for name, part in value.items()}
    if isinstance(value, list):
        return [_exact(part, word) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _SAFE:
        return value
    near = float(value) if abs(value) < 10**308 else math.inf
    if math.isinf(near) or near == -(2.0**63) or Decimal(repr(near)) != value:
        raise UsageError(f"the schema cannot be used: {word} has a number that is not exact in 64 bits, {value}")
    return near


def _with_named_properties(schema: dict[str, object], root: Schema) -> dict[str, object]:
    """Replace propertyNames by properties or patternProperties, if it is a list or a pattern and there are none."""
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


def _with_distinct_items(schema: dict[str, object], root: Schema) -> dict[str, object]:
    """Replace uniqueItems of at most _LARGEST_SET possible values by alternatives, one for each subset.

    uniqueItems of larger sets is left in the schema: distinct_items.py drops repeated items from the answer. Raises
    UsageError if minItems forbids that.
    """
    if schema.get("uniqueItems") is not True:
        return schema
    without_distinct = {word: value for word, value in schema.items() if word != "uniqueItems"}
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", _LARGEST_SET)
    if not isinstance(minimum, int) or not isinstance(maximum, int) or maximum in (0, 1):
        return without_distinct
    values = _values(schema.get("items"), root)
    if values is None or len(values) > _LARGEST_SET or "prefixItems" in schema or "anyOf" in schema:
        if minimum in (0, 1):
            return schema
        raise UsageError("the schema cannot be used: uniqueItems is not supported with minItems above 1")
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


def _values(items: object, root: Schema) -> list[object] | None:
    """Return all values that a schema allows, each once; None if it does not list them."""
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


def without_look_around(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without look-around where possible, with the same meaning or a narrower one.

    Such patterns are common: pydantic (2.13) describes Decimal as a number or a string with one, and patterns of
    passwords look ahead for a digit and a letter.
    """
    parts = schema.get("anyOf")
    if isinstance(parts, list):
        usable = [part for part in parts if not (isinstance(part, Mapping) and looks_around(part.get("pattern")))]
        schema = {**schema, "anyOf": usable or parts}
    patterns = split_look_aheads(schema["pattern"]) if looks_around(schema.get("pattern")) else None
    if not patterns:
        return schema
    others = {word: value for word, value in schema.items() if word != "pattern"}
    return {**others, "allOf": [*(others.get("allOf") or ()), *({"pattern": pattern} for pattern in patterns)]}


def looks_around(pattern: object) -> bool:
    """Return whether a pattern has a look-ahead or look-behind."""
    if not isinstance(pattern, str) or "(?" not in pattern:
        return False
    return any(token == "(" and pattern.startswith(_LOOK_AROUND, place) for place, _, token in _walk(pattern))


def split_look_aheads(pattern: str) -> list[str] | None:
    """Split ^(?=A)(?=B)C into patterns that a text must all match: ^(?:A), ^(?:B), ^C. None for any other form."""
    if not pattern.startswith("^"):
        return None
    remaining, look_aheads = pattern[1:], list[str]()
    while remaining.startswith("(?="):
        end = _closing(remaining)
        if end is None:
            return None
        look_aheads.append(f"^(?:{remaining[3:end]})")
        remaining = remaining[end + 1 :]
    if any(looks_around(part) for part in [remaining, *look_aheads]) or _has_alternatives(remaining):
        return None
    return [*look_aheads, f"^{remaining}"]


def _closing(pattern: str) -> int | None:
    """Return where the parenthesis that a pattern begins with is closed."""
    return next((place for place, depth, token in _walk(pattern) if token == ")" and depth == 0), None)


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has alternatives outside of parentheses."""
    return any(token == "|" and depth == 0 for _, depth, token in _walk(pattern))


def _walk(pattern: str) -> list[tuple[int, int, str]]:
    """List each token of a pattern: its position, the number of open parentheses after it, its text."""
    depth, positions = 0, []
    for token in _TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        positions.append((token.start(), depth, token[0]))
    return positions
