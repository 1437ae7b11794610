"""Declarations of options: each once, for command line, Python, servers and docs."""

import math
import sys
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.values import plain

ABOVE_0 = math.nextafter(0, 1)


class Range(NamedTuple):
    """The valid values of a numeric option: a description for messages, and inclusive bounds."""

    text: str
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def number(self, name: str, value: object) -> float:
        """Return the value as a Python number. Raises UsageError with the option's name."""
        number = value_of(value)
        if number is None or not abs(number) <= sys.float_info.max:
            raise UsageError(f"{name} must be a number, not {value!r}")
        if not self.least <= number <= self.most or (self.whole and number != int(number)):
            raise UsageError(f"{name} must be {self.text}, not {value}")
        return int(number) if self.whole else float(number)


def value_of(number: object) -> float | None:
    """Convert a Python or NumPy number to int or float.

    Returns None for other values, also for arrays of one number.
    """
    number = number if hasattr(number, "__len__") else plain(number)
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


@frozen
class Option:
    """The declaration of an option.

    Attributes:
        flags: of the command line, the longest last of those with the same meaning.  help: without the default, which
            follows it.  shown: the default in the help if it differs.  key: in a file's metadata after
            "general.sampling.".  users: programs and APIs that also have it, with ":" and their name if that differs.
            step: the only sampler step that uses it.  is_usual: it comes first in the help.  is_clamped: a server
                clamps
            it to its range, as llama-server does.  is_repeatable: it may be given several times on the command line.
            source: who described it first.
    """

    default: Any = None
    range: Range | None = None
    flags: str = ""
    help: str = ""
    users: str = ""
    key: str = ""
    step: str = ""
    shown: str = ""
    metavar: str = "N"
    is_usual: bool = False
    is_clamped: bool = False
    is_repeatable: bool = False
    source: str = ""

    @property
    def kind(self) -> type:
        """The type of its value, or of one value if there are several."""
        if self.range is not None:
            return int if self.range.whole else float
        return bool if isinstance(self.default, bool) else str

    @property
    def names(self) -> list[str]:
        """The names of its flags with "_" instead of "-": top_k for --top-k."""
        return [flag.lstrip("-").replace("-", "_") for flag in self.flags.split()]

    @property
    def long_name(self) -> str:
        """Its key in config.toml: top-k for --top-k."""
        return next(flag for flag in self.flags.split() if flag.startswith("--")).removeprefix("--")

    @property
    def default_text(self) -> str:
        """The default as the help shows it, "" for none."""
        return self.shown or (str(self.default) if self.range else "")

    @property
    def full_help(self) -> str:
        notes = "  [repeatable]" * self.is_repeatable + f"  [default: {self.default_text}]" * bool(self.default_text)
        return self.help + notes

    def clamped(self, value: Any) -> Any:
        """Clamp a number to the range; return other values unchanged."""
        if self.range is None or not isinstance(value, int | float):
            return value
        return min(max(value, self.range.least), self.range.most)


def option(default: object, *declared: Any, **further: Any) -> Any:
    """Declare a field whose value is None unless set; the arguments are those of Option."""
    return field(default=None, metadata={"option": Option(default, *declared, **further)})


def setting(default: object, *declared: Any, **further: Any) -> Any:
    """Declare a field whose value is its default unless set; the arguments are those of Option."""
    return field(default=default, metadata={"option": Option(default, *declared, **further)})


def declared_in(kind: type) -> dict[str, Option]:
    return {each.name: each.metadata["option"] for each in fields(kind) if "option" in each.metadata}


def names_for(user: str, options: Mapping[str, Option]) -> dict[str, str]:
    """Return the names of the options that a program or API also has, by its own names."""
    pairs = ((name, each.partition(":")) for name, option in options.items() for each in option.users.split())
    return {theirs or name: name for name, (other, _, theirs) in pairs if other == user}
