"""The fields of a request, each checked when it is read; those that nobody has read can be told."""

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import UsageError


class Body:
    """A JSON object that a client has sent. All methods raise UsageError, which begins with the field's name.

    A field that is null is as good as none.
    """

    def __init__(self, value: Mapping[str, Any], name: str = ""):
        """name: of the object within the request, "" for the request itself."""
        self._value, self._name, self._read = value, name, set[str]()

    @classmethod
    def of(cls, value: Any, name: str) -> "Body":
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} should be an object, not {kind(value)}")
        return cls(value, name)

    def named(self, field: str) -> str:
        return f"{self._name}.{field}" if self._name else field

    def get(self, field: str) -> Any:
        """Whatever it is."""
        self._read.add(field)
        return self._value.get(field)

    def _of(self, field: str, types: type | tuple[type, ...], what: str) -> Any:
        value = self.get(field)
        if value is None or (isinstance(value, types) and not (isinstance(value, bool) and types is not bool)):
            return value
        raise UsageError(f"{self.named(field)} should be {what}, not {kind(value)}")

    def text(self, field: str) -> str | None:
        return self._of(field, str, "a text")

    def needed_text(self, field: str) -> str:
        return require(self.text(field), self.named(field))

    def flag(self, field: str) -> bool:
        """False if it is not there."""
        return bool(self._of(field, bool, "true or false"))

    def choose(self, field: str) -> bool | None:
        """Return a flag, None if it is not there."""
        return None if self.get(field) is None else self.flag(field)

    def whole(self, field: str, least: int = 0, most: int | None = None) -> int | None:
        value = self._of(field, int, "a whole number")
        if value is not None and (value < least or (most is not None and value > most)):
            bounds = f"{least} or above" if most is None else f"from {least} to {most}"
            raise UsageError(f"{self.named(field)} should be {bounds}, not {value}")
        return value

    def items(self, field: str) -> Sequence[Any] | None:
        return self._of(field, (list, tuple), "a list")

    def needed_items(self, field: str) -> Sequence[Any]:
        return require(self.items(field), self.named(field))

    def object(self, field: str) -> "Body | None":
        value = self.mapping(field)
        return None if value is None else Body(value, self.named(field))

    def mapping(self, field: str) -> Mapping[str, Any] | None:
        return self._of(field, Mapping, "an object")

    def choice(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.text(field)
        if value is not None and value not in choices:
            raise UsageError(f"{self.named(field)} should be {' or '.join(choices)}, not {value[:60]!r}")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A text or a list of them."""
        value = self.get(field)
        given = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
            raise UsageError(f"{self.named(field)} should be a text or a list of texts")
        return tuple(given)

    def refuse(self, field: str, reason: str) -> None:
        """Raise UsageError if it says anything."""
        if self.get(field) not in (None, False, [], {}, "", 0):
            raise UsageError(f"{self.named(field)} is not supported: {reason}")

    @property
    def ignored(self) -> list[str]:
        """The fields that nobody has read."""
        return [field for field in self._value if field not in self._read]


def require(value: Any, name: str) -> Any:
    if value is None:
        raise UsageError(f"{name} is missing")
    return value


def kind(value: Any) -> str:
    """What a value is, without its content."""
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
