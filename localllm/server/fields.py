"""Check the fields of a JSON request, and list the fields that were never read."""

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from localllm.errors import UsageError

T = TypeVar("T")


class RequestBody:
    """A JSON object from a client; null fields count as absent.

    Methods raise UsageError, with a message that begins with the field's name.
    """

    def __init__(self, value: Mapping[str, object], name: str = ""):
        """Wrap an object.

        name: of the object within the request; "" for the request itself.
        """
        self._value, self._name, self._read_names, self._ignored = value, name, set[str](), dict[str, None]()

    @classmethod
    def parse(cls, value: object, name: str) -> "RequestBody":
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must be an object, not {describe_type(value)}")
        return cls(value, name)

    def qualify(self, field: str) -> str:
        return f"{self._name}.{field}" if self._name else field

    def __contains__(self, field: str) -> bool:
        return field in self._value

    def get(self, field: str) -> object:
        self._read_names.add(field)
        return self._value.get(field)

    def _get_typed(self, field: str, kind: type[T], expected: str, *other_kinds: type) -> T | None:
        value = self.get(field)
        if value is None or (
            isinstance(value, (kind, *other_kinds)) and not (isinstance(value, bool) and kind is not bool)
        ):
            return cast(T | None, value)
        raise UsageError(f"{self.qualify(field)} must be {expected}, not {describe_type(value)}")

    def get_string(self, field: str) -> str | None:
        return self._get_typed(field, str, "a string")

    def require_string(self, field: str) -> str:
        return require_present(self.get_string(field), self.qualify(field))

    def get_bool(self, field: str) -> bool:
        return bool(self._get_typed(field, bool, "a boolean"))

    def get_optional_bool(self, field: str) -> bool | None:
        return None if self.get(field) is None else self.get_bool(field)

    def get_int(self, field: str, minimum: int = 0, maximum: int | None = None) -> int | None:
        """Return an integer; accept a float without a fraction such as 64.0."""
        value: float | None = self._get_typed(field, float, "an integer", int)
        if isinstance(value, float):
            if not value.is_integer():
                raise UsageError(f"{self.qualify(field)} must be an integer, not a number")
            value = int(value)
        if value is not None and (value < minimum or (maximum is not None and value > maximum)):
            bounds = f"{minimum} or greater" if maximum is None else f"from {minimum} to {maximum}"
            raise UsageError(f"{self.qualify(field)} must be {bounds}, not {value}")
        return None if value is None else int(value)

    def get_number(self, field: str) -> float | None:
        return self._get_typed(field, float, "a number", int)

    def get_limit(self, field: str) -> int | None:
        """Return a token limit; None if absent or, as in llama-server, negative."""
        value = self.get_int(field, -sys.maxsize)
        return None if value is None or value < 0 else value

    def get_list(self, field: str) -> Sequence[object] | None:
        return self._get_typed(field, list, "an array", tuple)

    def require_list(self, field: str) -> Sequence[object]:
        return require_present(self.get_list(field), self.qualify(field))

    def get_object(self, field: str) -> "RequestBody | None":
        value = self.get_mapping(field)
        return None if value is None else RequestBody(value, self.qualify(field))

    def get_mapping(self, field: str) -> Mapping[str, object] | None:
        return self._get_typed(field, Mapping, "an object")  # type: ignore[type-abstract]

    def get_choice(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.get_string(field)
        if value is not None and value not in choices:
            raise UsageError(f"{self.qualify(field)} must be {' or '.join(choices)}, not {value[:60]!r}")
        return value

    def get_strings(self, field: str) -> tuple[str, ...]:
        value = self.get(field)
        values = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(values, list | tuple) or not all(isinstance(item, str | None) for item in values):
            raise UsageError(f"{self.qualify(field)} must be a string or an array of strings")
        return tuple(filter(None, values))

    def reject(self, field: str, reason: str) -> None:
        """Raise UsageError unless the field is absent, empty, false or 0."""
        if self.get(field) not in (None, False, [], {}, "", 0):
            raise UsageError(f"{self.qualify(field)} is not supported: {reason}")

    def ignore(self, part: str) -> None:
        self._ignored[part] = None

    @property
    def ignored(self) -> list[str]:
        """The ignored fields of the request: those never read, and those passed to `ignore`."""
        return [*(field for field in self._value if field not in self._read_names), *self._ignored]


def require_present(value: T | None, name: str) -> T:
    if value is None:
        raise UsageError(f"{name} is missing")
    return value


def describe_type(value: object) -> str:
    """Return a value's JSON type with its article, such as "a string"."""
    names = {
        str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), "null")
