"""From what was typed to values. Typer would ask Pydantic, whose import takes 40 ms."""

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import typer


def whole_number(text: str) -> int:
    """Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid integer.") from None


def truth(text: str) -> bool:
    """Raises ValueError."""
    meaning = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in meaning:
        raise ValueError(f"{text!r} is neither true nor false.")
    return meaning[text.lower()]


class Conversion:
    """What makes values of a parameter's type, in the place of Typer's own."""

    def __init__(self, param: Any):
        descriptor = param.type_descriptor
        kind = descriptor.annotation
        self._kind = get_args(kind)[0] if get_origin(kind) is list else kind
        self._parser: Callable[[str], Any] | None = descriptor.parameter_info.parser

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, or a tuple if it may be given several times. Raises typer.BadParameter."""
        try:
            return self.convert(value, param)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx, param) from None

    def convert(self, value: Any, param: Any) -> Any:
        """The same. Raises ValueError."""
        if getattr(param, "multiple", False) or param.nargs == -1:
            return tuple(self._converted(part) for part in value or ())
        return self._converted(value)

    def _converted(self, value: Any) -> Any:
        """Raises ValueError. What is no text is a default."""
        if not isinstance(value, str):
            return value
        if self._parser:
            return self._parser(value)
        if get_origin(self._kind) is Literal and value not in get_args(self._kind):
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, get_args(self._kind)))}.")
        if self._kind is bool:
            return truth(value)
        if self._kind is int:
            return whole_number(value)
        if self._kind is float:
            try:
                return float(value)
            except ValueError:
                raise ValueError(f"{value!r} is not a valid float.") from None
        return value
