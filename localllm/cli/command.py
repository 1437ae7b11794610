"""How a command is declared: a function with annotated parameters, some of them groups of options."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, dataclass_transform

import typer

from localllm.cli.conversion import whole_number
from localllm.cli.groups import groups, spread, titles_of
from localllm.cli.typer_command import Command

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def group(kind: type[T]) -> type[T]:
    """A class of options: a dataclass without what nobody needs, since each of its methods takes 0.1 ms to make."""
    return dataclass(kw_only=True, repr=False, eq=False)(kind)


def option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option, for Annotated. A default is told by `help`, because None often stands for it."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, **more)


def argument(metavar: str, help: str, also: tuple[str, ...] = (), **more: Any) -> Any:
    """An argument, for Annotated.  also: options by which it can be given, too."""
    made = typer.Argument(metavar=metavar, help=help, show_default=False, **more)
    made.also = also
    return made


@cache
def command(function: Callable[..., None]) -> Command:
    """A function with annotated parameters as a command. Parameters of a dataclass are groups: their fields, which may
    be groups too, are options of the command, and the function gets them together.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(spread(function))
    made: Any = typer.main.get_command(app)  # of the class Command
    titles = {name: title for each in groups(function) for name, title in titles_of(each)}
    for param in made.params:
        param.rich_help_panel = titles.get(param.name or "")
    return made


def number_or_default(default: str) -> Callable[[str], int | None]:
    """A parser of whole numbers, and of the one that stands for the default, None."""
    return lambda text: None if text == default else whole_number(text)
