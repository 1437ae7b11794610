"""Rewrite JSON schemas so that llguidance enforces what they mean; refuse those that cannot be rewritten."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from localllm.generation.constraints.closed_schemas import close_objects
from localllm.generation.constraints.json_pointers import Schema, resolve_pointer
from localllm.generation.constraints.written_schemas import rewrite_schema

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by names
_VALUES = ("enum", "const", "default", "examples", "example")  # keywords with values, which are no schemas
_BOUNDS = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
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


def exact(schema: Schema, is_open: bool = False) -> dict[str, object]:
    """Return a schema with which llguidance (1.9) allows only values that are valid by the given one.

    is_open: whether objects without additionalProperties may have properties that they do not list.
    Exclusive bounds: llguidance allows 0 for "more than 0, at most 0.5", because both bounds have the same integer
    part. Such a bound becomes an inclusive one at the next float, which excludes almost nothing. The same holds for all
    bounds of schemas that are merged (allOf, a $ref with other keywords), because the other bound may be in another
    schema. A boolean exclusiveMinimum is draft 4's: it says whether `minimum` is exclusive. A list of `items` means
    what it did up to draft 2019-09, also without $schema. Raises UsageError.
    """
    schema = rewrite_schema(schema)
    schema = schema if is_open else close_objects(schema)
    parts, draft = [*_schemas(schema)], str(schema.get("$schema", ""))
    is_old = any(number in draft for number in ("draft-04", "draft-06", "draft-07", "2019-09"))
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for part in parts)
    result = {word: _exact_part(word, value, merges) for word, value in schema.items()}
    result = _make_inclusive(result, merges)
    for part in _schemas(result):
        _spell_tuple(part, is_old)
    return result


def _spell_tuple(schema: dict[str, Any], is_old: bool) -> None:
    """Rename the keywords of tuples in place: llguidance reads prefixItems only in draft 2020-12, `items` before."""
    listed = schema["items"] if isinstance(schema.get("items"), list) else None
    if is_old and "prefixItems" in schema:
        additional = {"additionalItems": schema["items"]} if "items" in schema else {}
        schema |= {**additional, "items": schema.pop("prefixItems")}
    elif listed is not None and not is_old:
        schema["prefixItems"] = listed
        schema["items"] = schema.pop("additionalItems", True)


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield a schema, a dict or a list of them, and all schemas within it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    elif isinstance(schema, dict):
        yield schema
        for word, value in schema.items():
            if word in _BY_NAME and isinstance(value, Mapping):
                for part in value.values():
                    yield from _schemas(part)
            elif word not in _VALUES:
                yield from _schemas(value)


def _exact(schema: object, merges: bool) -> object:
    if isinstance(schema, list):
        return [_exact(item, merges) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return _make_inclusive({word: _exact_part(word, value, merges) for word, value in schema.items()}, merges)


def _exact_part(word: str, value: object, merges: bool) -> object:
    """Apply _exact to the schemas that are the value of a keyword."""
    if word in _BY_NAME and isinstance(value, Mapping):
        return {name: _exact(part, merges) for name, part in value.items()}
    return value if word in _VALUES else _exact(value, merges)


def _make_inclusive(schema: dict[str, Any], merges: bool) -> dict[str, Any]:
    """Make exclusive bounds inclusive, as `exact` describes."""
    for exclusive, inclusive, _ in _BOUNDS:
        is_excluded = schema.get(exclusive)
        if isinstance(is_excluded, bool):
            del schema[exclusive]
            if is_excluded and _is_number(schema.get(inclusive)):
                schema[exclusive] = schema.pop(inclusive)
    numbers = [schema[word] for bound in _BOUNDS for word in bound[:2] if _is_number(schema.get(word))]
    for exclusive, inclusive, up in _BOUNDS:
        bound = schema.get(exclusive, 0.5)
        if not _is_number(bound) or bound % 1 or inclusive in schema:
            continue
        if merges or any(0 < abs(number - bound) < 1 for number in numbers):
            del schema[exclusive]
            schema[inclusive] = bound + up * _LEAST * max(1, abs(bound))
    return schema


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_order(value: object, schema: object, root: Schema) -> object:
    """Return a value with the properties of its objects in the order of a schema, which is part of `root`."""
    parts = alternatives(schema, root)
    if isinstance(value, list):
        items = [part["items"] for part in parts if "items" in part]
        return [in_order(item, {"anyOf": items}, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    keys = dict[str, list[object]]()
    for part in parts:
        for name, inner in (part.get("properties") or {}).items():
            keys.setdefault(name, []).append(inner)
    names = [*(name for name in keys if name in value), *(name for name in value if name not in keys)]
    return {name: in_order(value[name], {"anyOf": keys.get(name, [])}, root) for name in names}


def alternatives(schema: object, root: Schema) -> list[Schema]:
    """List a schema and the schemas that $ref, allOf, anyOf and oneOf apply to the same value, each once."""
    schemas, waiting = dict[int, Schema](), [schema]
    while waiting:
        alternative = waiting.pop()
        if not isinstance(alternative, Mapping) or id(alternative) in schemas:
            continue
        schemas[id(alternative)] = alternative
        parts = [part for word in ("allOf", "oneOf", "anyOf") for part in reversed(alternative.get(word) or ())]
        waiting += [*parts, resolve_pointer(alternative.get("$ref"), root)]
    return [*schemas.values()]
