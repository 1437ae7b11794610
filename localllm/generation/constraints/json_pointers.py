"""References within a JSON schema."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolve_pointer(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a reference within a schema; None if it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and step.isdecimal():
            place = place[int(step)] if int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def follow_references(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow references to their end; None if they form a cycle."""
    for _ in range(20):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = resolve_pointer(schema["$ref"], root)
    return None
