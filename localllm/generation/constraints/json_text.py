"""Compact the JSON of answers, normalize its integers, and convert it to Python types."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localllm.errors import CutError, UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\]+')  # within a string


class JsonCompactor:
    """Removes white space outside of strings from JSON that is being generated.

    Models write white space as in their training data, and answer worse if a constraint forbids it; programs do not
    need it.
    """

    def __init__(self) -> None:
        self._is_inside = self._is_escaped = False

    def push(self, text: str) -> str:
        """Return a chunk of text without white space outside of strings."""
        parts, place = list[str](), 0
        while place < len(text):
            if not self._is_inside:
                quote = text.find('"', place)
                end = len(text) if quote < 0 else quote + 1
                parts.append(_SPACE.sub("", text[place:end]))
                self._is_inside, place = quote >= 0, end
                continue
            if self._is_escaped or text[place] in '"\\':
                self._is_inside = self._is_escaped or text[place] != '"'
                self._is_escaped = not self._is_escaped and text[place] == "\\"
                end = place + 1
            else:
                plain = _PLAIN.match(text, place)
                assert plain
                end = plain.end()
            parts.append(text[place:end])
            place = end
        return "".join(parts)


def normalize_whole_numbers(text: str) -> str:
    """Return JSON whose integers have neither point nor exponent: 5.0 becomes 5.

    Invalid JSON is returned unchanged.
    """
    try:
        return json.dumps(json.loads(text, parse_float=_parse_number), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _parse_number(text: str) -> int | float:
    """Return a number as int if it is whole, else as float."""
    number = float(text)
    return int(number) if number.is_integer() else number


_DATA = (Mapping, str, bytes, bool, int, float, list, tuple, type(None))


def is_type(schema: object) -> bool:
    """Return whether a schema is a type, such as a class, list[int], Literal or a TypeAdapter."""
    return not isinstance(schema, _DATA)


def get_adapter(kind: Any) -> "TypeAdapter[object]":
    """Return pydantic's adapter of a type. Raises UsageError for a type that pydantic does not accept."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    if isinstance(kind, TypeAdapter):
        return kind
    try:
        return TypeAdapter(kind)
    except (PydanticUserError, TypeError) as error:
        raise UsageError(f"the schema cannot be used: {str(error).splitlines()[0]}") from None


def make_json_schema(kind: object) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises UsageError for a type that has none."""
    from pydantic.errors import PydanticUserError

    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    try:
        return get_adapter(kind).json_schema()
    except PydanticUserError as error:
        raise UsageError(f"the schema cannot be used: {str(error).splitlines()[0]}") from None


def parse_answer(text: str, finish_reason: str, kind: object) -> Any:
    """Parse the JSON of an answer to a type, or to plain values if `kind` is None.

    Raises CutError for an answer that is not finished, and pydantic's ValidationError where the type is stricter than
    its schema.
    """
    if finish_reason != "stop":
        raise CutError(
            f"the answer is incomplete ({finish_reason or 'interrupted'}) and cannot be parsed: "
            "let it end, or raise max_tokens"
        )
    return json.loads(text) if kind is None else get_adapter(kind).validate_json(text)
