"""Prepare the schemas of tools' parameters for the grammar; parts that it cannot enforce are loosened."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache

from localllm.errors import UsageError
from localllm.generation.constraints.closed_schemas import close_objects
from localllm.generation.constraints.distinct_items import has_distinct, without_distinct
from localllm.generation.constraints.json_pointers import Schema
from localllm.generation.constraints.schemas import OPTIONS, exact
from localllm.generation.constraints.written_schemas import rewrite_schema


@lru_cache(maxsize=512)  # an agent sends its 10 to 60 tools with each request: 3 ms for each
def enforceable(parameters: str, strict: bool, is_open: bool) -> tuple[dict[str, object], dict[str, object] | None]:
    """Return a schema, given as JSON, with llguidance's options: exact if possible, else loosened.

    Also return the schema for DistinctItems, None if no items have to differ. The results must not be changed. is_open:
    let objects have properties that a schema does not name. Raises UsageError for a strict tool whose schema cannot be
    exact.
    """
    from localllm.generation.constraints.constraint import Constraint, require_usable

    schema = json.loads(parameters)
    if is_open:
        schema.setdefault("additionalProperties", True)
    try:
        Constraint.of_schema(schema, additional_properties=is_open)
        schema = exact(schema, is_open)
        distinct = schema if has_distinct(schema) else None
        return {**without_distinct(schema), "x-guidance": {**OPTIONS, "lenient": False}}, distinct
    except UsageError:
        if strict:
            raise

    def prepare(schema_given: Mapping[str, object]) -> dict[str, object]:
        plain = rewrite_schema(schema_given)
        ready = {**(plain if is_open else close_objects(plain)), "x-guidance": {**OPTIONS, "lenient": True}}
        require_usable(ready)
        return ready

    return loosen(schema, prepare), None


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
