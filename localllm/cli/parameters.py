"""A command's parameters: what its function declares, one by one or in groups.

A group is a dataclass whose fields, which may be groups too, are options of the command. Typer sees its fields; the
function gets them together.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

PREFIX = "LOCALLLM_"
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def group(kind: type[T]) -> type[T]:
    """A class of options: a dataclass without what nobody needs, since each of its methods takes 0.1 ms to make."""
    return dataclass(kw_only=True, repr=False, eq=False)(kind)


@dataclass(frozen=True)
class Annotation:
    """What stands in an annotation.

    names: of an option; behind a slash, what switches it off.  metavar: what stands for its value in the help, in
    brackets if it may be left out.  parser: makes the value of a text, or raises ValueError.  values: what the shell
    offers.  is_argument: `names` are options by which it can be given too.  only_typed: nothing else says it, neither
    config.toml nor the environment.
    """

    names: tuple[str, ...]
    help: str
    metavar: str = ""
    parser: Callable[[str], Any] | None = None
    values: Sequence[str] = ()
    is_argument: bool = False
    only_typed: bool = False


def option(*names: str, help: str, metavar: str = "", **more: Any) -> Annotation:
    """An option, for Annotated. A default is told by `help`, because None often stands for it."""
    return Annotation(names, help, metavar, **more)


def argument(metavar: str, help: str, also: tuple[str, ...] = (), **more: Any) -> Annotation:
    """An argument, for Annotated.  also: options by which it can be given, too."""
    return Annotation(also, help, metavar, is_argument=True, **more)


class Parameter:
    """One option or argument.

    name: in Python.  on, off: an option's names, and those that switch a flag off.  kind: the type of its values, int
    for int | None and for list[int].  many: it may be given several times, its value is a list.  default: None if it
    has to be given (`required`), too.  title: of the help's section.
    """

    def __init__(self, name: str, annotation: Any, default: Any = inspect.Parameter.empty, title: str = ""):
        hint, self.declared = get_args(annotation)[:2]
        kind = next(each for each in get_args(hint) if each is not NoneType) if NoneType in get_args(hint) else hint
        self.many = get_origin(kind) is list
        self.kind = get_args(kind)[0] if self.many else kind
        self.name, self.title, self.help = name, title, self.declared.help
        self.metavar, self.is_argument = self.declared.metavar, self.declared.is_argument
        names = [each.partition("/") for each in self.declared.names]
        self.on, self.off = [each for each, _, _ in names], [each for _, _, each in names if each]
        self.required = default is inspect.Parameter.empty
        self.default = None if self.required else default
        self.is_flag = self.kind is bool

    @property
    def names(self) -> list[str]:
        """All options by which it is given."""
        return [*self.on, *self.off]

    @property
    def keys(self) -> list[str]:
        """Its names in config.toml: the long ones; MODEL is the only argument that has one."""
        if self.declared.only_typed:
            return []
        if self.is_argument:
            return ["model"] if self.name == "model" else []
        return [name[2:] for name in self.on if name.startswith("--") and name != "--help"]

    @property
    def variables(self) -> list[str]:
        """Its names in the environment."""
        return [PREFIX + key.upper().replace("-", "_") for key in self.keys]

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that it can have, if they are few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def converted(self, given: Any) -> Any:
        """The value of a text, of a list of them, or of a flag's truth. Raises ValueError."""
        return [*map(self._value, given)] if self.many else self._value(given)

    def _value(self, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if self.declared.parser:
            return self.declared.parser(given)
        if self.choices and given not in self.choices:
            raise ValueError(f"there is no {given!r}; there are {', '.join(self.choices)}")
        if self.is_flag:
            if given.lower() not in TRUTH:
                raise ValueError(f"should be true or false, not {given!r}")
            return TRUTH[given.lower()]
        return {int: whole_number, float: number}.get(self.kind, str)(given)


def whole_number(text: str) -> int:
    """Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"should be a whole number, not {text!r}") from None


def number(text: str) -> float:
    """Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"should be a number, not {text!r}") from None


def number_or_default(default: str) -> Callable[[str], int | None]:
    """A parser of whole numbers, and of the one that stands for the default, None."""
    return lambda text: None if text == default else whole_number(text)


def parameters(function: Callable[..., None]) -> list[Parameter]:
    """Those of a function, and of the groups among them."""
    given = inspect.signature(function).parameters.values()
    return [leaf for each in given for leaf in leaves(each.name, each.annotation, each.default, "")]


def leaves(name: str, kind: Any, default: Any, title: str) -> Iterator[Parameter]:
    """The parameters that one stands for, with the title of their group: the first sentence of its docstring."""
    if not is_dataclass(kind):
        yield Parameter(name, kind, default, title)
        return
    title = " ".join((kind.__doc__ or "").partition(".")[0].split())
    for each in fields(kind):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        yield from leaves(each.name, each.type, default, title)


def gathered(function: Callable[..., None], values: dict[str, Any]) -> dict[str, Any]:
    """The function's arguments, groups made of their fields."""

    def value(name: str, kind: Any) -> Any:
        if not is_dataclass(kind):
            return values[name]
        return kind(**{each.name: value(each.name, each.type) for each in fields(kind)})  # type: ignore[operator]

    return {each.name: value(each.name, each.annotation) for each in inspect.signature(function).parameters.values()}
