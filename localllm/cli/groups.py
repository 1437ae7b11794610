"""Groups of options, which Typer does not know: a command's function takes a dataclass, Typer sees its fields."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def groups(function: Callable[..., None]) -> list[Any]:
    """The dataclasses among a function's parameters."""
    return [kind for each in inspect.signature(function).parameters.values() if is_dataclass(kind := each.annotation)]


def titles_of(group: Any) -> Iterator[tuple[str, str]]:
    """The names of a group's options, each with the title of its group: the first sentence of the docstring."""
    title = " ".join((group.__doc__ or "").partition(".")[0].split())
    for each in fields(group):
        yield from titles_of(each.type) if is_dataclass(each.type) else [(each.name, title)]


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for each field of its groups, as Typer understands it."""
    given = inspect.signature(function).parameters.values()

    def call(**values: Any) -> None:
        function(**{each.name: gathered(each.annotation, each.name, values) for each in given})

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [leaf for each in given for leaf in leaves(each.name, each.annotation, each.default)]
    )
    return call


def leaves(name: str, kind: Any, default: Any) -> list[inspect.Parameter]:
    """The parameters that a parameter stands for."""
    if not is_dataclass(kind):
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)]
    return [leaf for each in fields(kind) for leaf in leaves(each.name, each.type, each.default)]


def gathered(kind: Any, name: str, values: dict[str, Any]) -> Any:
    """The value of a parameter, a group made of its fields."""
    if not is_dataclass(kind):
        return values[name]
    return kind(**{each.name: gathered(each.type, each.name, values) for each in fields(kind)})  # type: ignore[operator]
