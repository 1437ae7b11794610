"""Convert Python types to JSON schemas, and answers to objects of these types, with pydantic."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localllm.errors import CutError, UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_DATA = (Mapping, str, bytes, bool, int, float, list, tuple, type(None))


def is_type(schema: object) -> bool:
    """Return whether a schema is a type rather than JSON: a class, list[int], Literal["a", "b"], a TypeAdapter."""
    return not isinstance(schema, _DATA)


def adapter_of(kind: Any) -> "TypeAdapter[object]":
    """Return pydantic's adapter of a type. Raises UsageError for a type that pydantic does not support."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    if isinstance(kind, TypeAdapter):
        return kind
    try:
        return TypeAdapter(kind)
    except (PydanticUserError, TypeError) as error:
        raise UsageError(f"the schema cannot be used: {str(error).splitlines()[0]}") from None


def schema_of(kind: object) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises UsageError."""
    from pydantic.errors import PydanticUserError

    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    try:
        return adapter_of(kind).json_schema()
    except PydanticUserError as error:
        raise UsageError(f"the schema cannot be used: {str(error).splitlines()[0]}") from None


def parse_answer(text: str, finish_reason: str, kind: object) -> Any:
    """Return an answer's JSON as an object of a type, or as plain values without one.

    Raises CutError for an answer that has not ended, and pydantic's ValidationError where the type validates more than
    its schema.
    """
    if finish_reason != "stop":
        raise CutError(f"the answer is not complete ({finish_reason or 'interrupted'}), so it cannot be parsed")
    return json.loads(text) if kind is None else adapter_of(kind).validate_json(text)
