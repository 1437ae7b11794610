"""Typer's commands as this program wants them: shared groups of options, and a quick start without Pydantic."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand

from localllm.cli.defaults import chosen_before
from localllm.cli.help_text import columns, command_help, finished
from localllm.cli.words import as_typed, read_words
from localllm.errors import UsageError

# What a context has under these names: the options that were typed, with their values; where others have theirs from.
TYPED, SOURCES = "localllm.typed", "localllm.sources"

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
def command(function: Callable[..., None]) -> "Command":
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


def number_or_default(default: str) -> Callable[[str], int | None]:
    """A parser of whole numbers, and of the one that stands for the default, None."""
    return lambda text: None if text == default else whole_number(text)


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


class Light:
    """What commands and the group of them have in common: their help is drawn and their texts are converted without
    Rich and Pydantic.
    """

    def get_help(self, ctx: Any) -> str:
        return finished(self.plain_help(ctx, columns()))

    def plain_help(self, ctx: Any, width: int) -> str:
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])  # type: ignore[attr-defined]
        return command_help(usage, self.help or "", self.get_params(ctx), width)  # type: ignore[attr-defined]

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param._runtime_param = param._runtime_param or Conversion(param)
        return params


class Command(Light, TyperCommand):
    """A command whose options may go without their value, if its name is in brackets ([ADDRESS])."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] and the arguments' names, in which brackets say what may be left out."""
        return ["[OPTIONS]", *(param.metavar or "" for param in self.params if isinstance(param, TyperArgument))]

    def invoke(self, ctx: Any) -> Any:
        """Errors say options as they were typed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise UsageError(as_typed(str(error), self.params, ctx.meta[TYPED], ctx.meta[SOURCES])) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name, params = self.name or "", self.get_params(ctx)
        words = read_words(args, params, name)
        ctx.meta[TYPED] = words.options
        model = next(iter(words.placed()), None) if any(param.name == "model" for param in params) else None
        chosen = {} if "help" in words.given else chosen_before(name, params, model, words.given)
        ctx.default_map = {name: each.value for name, each in chosen.items()}
        ctx.meta[SOURCES] = {name: each.source for name, each in chosen.items()}
        rest = super().parse_args(ctx, words.for_typer())
        if ctx.params.get("escape"):
            self._unescape(ctx.params)
        return rest

    def _unescape(self, values: dict[str, Any]) -> None:
        """The values of options that are texts, with their escape sequences read. Raises UsageError."""
        from localllm.cli.escapes import unescaped

        for param in self.params:
            value = values.get(param.name or "")
            if param.metavar == "TEXT" and value is not None:
                values[param.name or ""] = unescaped(value) if isinstance(value, str) else tuple(map(unescaped, value))


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
