"""Loosen schemas of tools that a grammar cannot enforce: unsupported properties may be anything."""

from collections.abc import Callable, Mapping

from localllm.errors import UsageError
from localllm.generation.constraints.json_pointers import Schema

SHARED = ("$defs", "definitions")
PLAIN = ("type", "properties", "required", "additionalProperties", "description", *SHARED)


def loosen(schema: Schema, prepare: Callable[[Schema], dict[str, object]]) -> dict[str, object]:
    """Prepare the schema of an object; parts that cannot be prepared are loosened.

    prepare: converts a schema for the grammar; raises UsageError for one that cannot be used.
    """
    shared = {word: schema[word] for word in SHARED if word in schema}
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {}

    def is_usable(name: str) -> bool:
        try:
            prepare({**shared, "type": "object", "properties": {name: named[name]}})
        except UsageError:
            return False
        return True

    changed = {**schema, "properties": {name: part if is_usable(name) else {} for name, part in named.items()}}
    free = {"type": "object", "additionalProperties": True}
    for attempt in (changed, {word: value for word, value in changed.items() if word in PLAIN}):
        try:
            return prepare(attempt)
        except UsageError:
            continue
    return prepare(free)
