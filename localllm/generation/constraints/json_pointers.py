"""JSON schemas, and references within them."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]  # a JSON schema, or a part of one


def resolve_pointer(reference: object, root: Schema) -> object:
    """Return the part of a schema to which a reference such as "#/$defs/name" points; None if there is none."""
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
    """Return the first schema without $ref at the end of a chain of references; None after 20 of them."""
    for _ in range(20):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = resolve_pointer(schema["$ref"], root)
    return None
