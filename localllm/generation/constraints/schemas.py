"""JSON schemas as llguidance gets them right: what it would take for something else is written anew, or refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from localllm.generation.constraints.closed_schemas import close_objects
from localllm.generation.constraints.json_pointers import resolve_pointer
from localllm.generation.constraints.written_schemas import rewrite_schema

Schema = dict[str, Any]

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by names
_VALUES = ("enum", "const", "default", "examples", "example")  # keywords with values, which are no schemas
_BOUNDS = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
# White space between the parts of JSON, as models were trained to write it: none, a space, or one or two line breaks
# with an indentation. Without a limit a model may go on with spaces for ever.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,64})?"
_LEAST = 1e-9  # a bound is moved by so much, relative to it


def exact(schema: Schema, is_open: bool = False) -> Schema:
    """Return a schema whose answers by llguidance (1.9) are all valid by the given one. Raises UsageError.

    is_open: let objects have other properties where additionalProperties does not say; else they are closed. Bounds:
    for "more than 0, at most 0.5" it allows 0, because both begin with the same whole number. Such a bound becomes an
    inclusive one at the nearest float, which excludes almost nothing; so do all where schemas are merged (allOf, a $ref
    with other keywords), because there the other bound may be elsewhere. In draft 4 exclusiveMinimum says whether the
    minimum is excluded. A list of items means what it did up to draft 2019-09, also where no $schema says which it is.
    """
    schema = rewrite_schema(schema)
    schema = schema if is_open else close_objects(schema)
    parts, draft = [*_schemas(schema)], str(schema.get("$schema", ""))
    is_old = any(number in draft for number in ("draft-04", "draft-06", "draft-07", "2019-09"))
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for part in parts)
    result: Schema = _exact(schema, merges)
    for part in _schemas(result):
        _spell_tuple(part, is_old)
    return result


def _spell_tuple(schema: Any, is_old: bool) -> None:
    """Spell a list of items as the schema's draft does: llguidance knows prefixItems from 2020-12 on only."""
    listed = schema["items"] if isinstance(schema.get("items"), list) else None
    if is_old and "prefixItems" in schema:
        rest = {"additionalItems": schema["items"]} if "items" in schema else {}
        schema |= {**rest, "items": schema.pop("prefixItems")}
    elif listed is not None and not is_old:
        schema["prefixItems"] = listed
        schema["items"] = schema.pop("additionalItems", True)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all within it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    elif isinstance(schema, Mapping):
        yield schema
        for word, value in schema.items():
            if word in _BY_NAME and isinstance(value, Mapping):
                for part in value.values():
                    yield from _schemas(part)
            elif word not in _VALUES:
                yield from _schemas(value)


def _exact(schema: Any, merges: bool) -> Any:
    if isinstance(schema, list):
        return [_exact(item, merges) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {}
    for word, value in schema.items():
        if word in _BY_NAME and isinstance(value, Mapping):
            changed[word] = {name: _exact(part, merges) for name, part in value.items()}
        else:
            changed[word] = value if word in _VALUES else _exact(value, merges)
    return _make_inclusive(changed, merges)


def _make_inclusive(schema: Schema, merges: bool) -> Schema:
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_order(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """Order the properties of a value's objects by a schema, which is part of `root`."""
    parts = alternatives(schema, root)
    if isinstance(value, list):
        items = [part["items"] for part in parts if "items" in part]
        return [in_order(item, {"anyOf": items}, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    known = dict[str, list[Any]]()
    for part in parts:
        for name, inner in (part.get("properties") or {}).items():
            known.setdefault(name, []).append(inner)
    names = [*(name for name in known if name in value), *(name for name in value if name not in known)]
    return {name: in_order(value[name], {"anyOf": known.get(name, [])}, root) for name in names}


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the schemas that apply to the same value: after a reference, in anyOf and the like; each once."""
    found, waiting = dict[int, Mapping[str, Any]](), [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in found:
            continue
        found[id(one)] = one
        parts = [part for word in ("allOf", "oneOf", "anyOf") for part in reversed(one.get(word) or ())]
        waiting += [*parts, resolve_pointer(one.get("$ref"), root)]
    return [*found.values()]
