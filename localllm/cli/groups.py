"""Groups of options: dataclasses whose fields are options of a command.

Typer reads a function's signature. `flatten` gives it one in which each field of a group is a parameter of its own, and
makes the groups before the function is called.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args

import typer
from typer.models import ArgumentInfo

PREFIX = "LOCALLLM_"
NAMED = "_named"  # behind an argument's name: the option by which it can be given, too
TYPED_ONLY = object()  # in Annotated: neither config.toml nor the environment sets it
T = TypeVar("T")


class Also(tuple[str, ...]):
    """Options by which an argument can be given, too; stands in its Annotated."""

    def __new__(cls, *names: str) -> "Also":
        return super().__new__(cls, names)


@dataclass_transform(kw_only_default=True)
def group(kind: type[T]) -> type[T]:
    """Make a class a group: a dataclass without the methods that nobody needs, as each takes 0.1 ms to make."""
    return dataclass(kw_only=True, repr=False, eq=False)(kind)


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as Typer reads it: without groups, each option with its variable and its panel."""
    declared = inspect.signature(function).parameters.values()

    def command(**values: Any) -> None:
        function(**{each.name: collect(each.name, each.annotation, values) for each in declared})

    leaves = [leaf for each in declared for leaf in flat(each.name, each.annotation, each.default, None)]
    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature(leaves)  # type: ignore[attr-defined]
    return command


def flat(name: str, kind: Any, default: Any, panel: str | None) -> Iterator[inspect.Parameter]:
    """Yield the parameters that one stands for; the panel is the first sentence of their group's docstring."""
    if not is_dataclass(kind):
        yield from leaf(name, kind, default, panel)
        return
    panel = " ".join((kind.__doc__ or "").partition(".")[0].split())
    for each in fields(kind):
        yield from flat(
            each.name, each.type, inspect.Parameter.empty if each.default is MISSING else each.default, panel
        )


def leaf(name: str, kind: Any, default: Any, panel: str | None) -> Iterator[inspect.Parameter]:
    """Yield an option, or an argument and the option by which it can be given, too."""
    hint, declared, *marks = get_args(kind)
    info, typed_only = copy(declared), TYPED_ONLY in marks
    info.rich_help_panel = panel
    if isinstance(info, ArgumentInfo):
        info.envvar = [f"{PREFIX}MODEL"] if name == "model" and not typed_only else None
        for also in (mark for mark in marks if isinstance(mark, Also)):
            named = typer.Option(*also, metavar=(info.metavar or "").strip("[]."), help=info.help)
            named.autocompletion = info.autocompletion
            yield keyword(f"{name}{NAMED}", hint | None, named, None)
    else:
        names = [each.partition("/")[0] for each in (info.default, *(info.param_decls or ()))]
        info.envvar = [] if typed_only else [variable(each) for each in names if each.startswith("--")]
    yield keyword(name, hint, info, default)


def keyword(name: str, hint: Any, info: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, info])


def variable(name: str) -> str:
    """Return the environment variable that sets an option, as LOCALLLM_TOP_K of --top-k."""
    return PREFIX + name.removeprefix("--").upper().replace("-", "_")


def collect(name: str, kind: Any, values: dict[str, Any]) -> Any:
    """Return an argument of the function: a value, or a group made of the values of its fields."""
    if not is_dataclass(kind):
        return values[name]
    return kind(**{each.name: collect(each.name, each.type, values) for each in fields(kind)})  # type: ignore[operator]
