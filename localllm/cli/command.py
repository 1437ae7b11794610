"""Typer's commands as this program wants them: shared groups of options, and a quick start without Pydantic."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from localllm.errors import UsageError

WORDS = "localllm.words"  # under which a context has the command's arguments


def option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option, for Annotated. A default is told by `help`, because None often stands for it."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """An argument, for Annotated."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


@cache
def command(function: Callable[..., None]) -> "Command":
    """A function with annotated parameters as a command. Parameters of a dataclass are groups: their fields, which may
    be groups too, are options of the command, and the function gets them together.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(spread(function))
    made = typer.main.get_command(app)
    assert isinstance(made, Command)
    return made


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


class WithoutPydantic:
    """Both commands and groups of commands: their parameters are converted here."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param._runtime_param = param._runtime_param or Conversion(param)
        return params


class Command(WithoutPydantic, TyperCommand):
    """A command whose options may go without their value, if its name is in brackets ([ADDRESS])."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] and the arguments' names, in which brackets say what may be left out."""
        return ["[OPTIONS]", *(param.metavar or "" for param in self.params if isinstance(param, TyperArgument))]

    def invoke(self, ctx: Any) -> Any:
        """Errors that begin with the name of a parameter say it as it was typed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise UsageError(as_typed(str(error), self.params, ctx.meta[WORDS])) from error

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        context.meta[WORDS] = list(args)
        optional = {
            name
            for param in self.params
            if isinstance(param, TyperOption) and (param.metavar or "").startswith("[")
            for name in param.opts
        }
        ends = [*(word.startswith("-") for word in args[1:]), True]
        return super().parse_args(
            context,
            [f"{word}=" if word in optional and end else word for word, end in zip(args, ends, strict=False)],
        )


def as_typed(message: str, params: list[Any], words: list[str]) -> str:
    """A message with the options in it as the user has typed them, where it has their names in Python: the word that it
    begins with, and others with a "_". An option that was not typed gets its longest name.
    """
    names = {param.name: param.opts for param in params if isinstance(param, TyperOption)}

    def typed(found: re.Match[str]) -> str:
        name = found[0]
        if name not in names or not (found.start() == 0 or "_" in name):
            return name
        given = [opt for opt in names[name] if any(is_option(word, opt) for word in words)]
        return given[0] if given else max(names[name], key=len)

    return re.sub(r"(?<![\w./-])\w+(?![\w./-])", typed, message)


def is_option(word: str, name: str) -> bool:
    """Whether a word of the command line is this option, perhaps with its value: -n5, --temp=0."""
    return word == name or word.startswith(f"{name}=" if name.startswith("--") else name)


class Conversion:
    """From a parameter's text to its type. Typer would ask Pydantic, whose import takes 40 ms."""

    def __init__(self, param: Any):
        descriptor = param.type_descriptor
        kind = descriptor.annotation
        self._kind = get_args(kind)[0] if get_origin(kind) is list else kind
        self._parser: Callable[[str], Any] | None = descriptor.parameter_info.parser

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, or a tuple if it may be given several times. Raises typer.BadParameter."""
        try:
            if param.multiple or param.nargs == -1:
                return tuple(self._converted(part) for part in value or ())
            return self._converted(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx, param) from None

    def _converted(self, value: Any) -> Any:
        """Raises ValueError. What is no text is a default."""
        if not isinstance(value, str):
            return value
        if self._parser:
            return self._parser(value)
        if get_origin(self._kind) is Literal and value not in get_args(self._kind):
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, get_args(self._kind)))}.")
        for kind, name in ((int, "integer"), (float, "float")):
            if self._kind is kind:
                try:
                    return kind(value)
                except ValueError:
                    raise ValueError(f"{value!r} is not a valid {name}.") from None
        return value
