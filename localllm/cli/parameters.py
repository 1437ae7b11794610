"""Typer's options and arguments, with value conversion, defaults from other sources, and names for errors.

Groups of options are dataclasses whose fields are options of a command. Typer reads a function's signature: `flatten`
returns a function whose signature has a parameter for each field of a group, and which calls the original with groups.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import typer
from typer.core import TyperArgument, TyperOption
from typer.models import ArgumentInfo, OptionInfo

from localllm.errors import UsageError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
TYPED = "localllm.typed"  # key of Context.meta: the typed words, as ParsedArgs
UNTYPED_ONLY = "localllm.silent"  # key of Context.meta: parameters that config.toml and the environment must not set


class SourcedValue(NamedTuple):
    """A value, converted to the option's type, and its source."""

    value: object
    source: str


class ConvertingParameter:
    """Base class of options and arguments, which converts their values.

    Typer would use Pydantic: its import takes 65 ms, and adapters for the options of `run` 15 ms, half as long as
    everything else before a model is opened. The annotations are few and simple, so this class converts them.
    """

    name: str
    opts: list[str]
    secondary_opts: list[str]
    nargs: int
    multiple: bool
    required: bool
    help: str | None
    metavar: str | None
    default: Any
    callback: Any
    envvar: Any
    type_descriptor: Any

    @property
    def is_argument(self) -> bool:
        return isinstance(self, TyperArgument)

    @property
    def takes_several(self) -> bool:
        return self.multiple or self.nargs == -1

    @property
    def kind(self) -> Any:
        """The type of a value: int for int | None and for list[int]."""
        annotation = self.type_descriptor.annotation
        return get_args(annotation)[0] if get_origin(annotation) is list else annotation

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; () for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def names(self) -> list[str]:
        """All option names; [] for an argument."""
        return [] if self.is_argument else [*self.opts, *self.secondary_opts]

    @property
    def variables(self) -> list[str]:
        """The environment variables that set it."""
        return [*(self.envvar or ())]

    @property
    def keys(self) -> list[str]:
        """Its keys in config.toml: long option names, and "model" for MODEL."""
        return [each.removeprefix(PREFIX).lower().replace("_", "-") for each in self.variables]

    def convert(self, value: Any) -> Any:
        """Convert a string, a list of strings, or a switch's bool to the annotation's type. Raises ValueError."""
        return [*map(self._convert_one, value)] if self.takes_several else self._convert_one(value)

    def _convert_one(self, value: object) -> object:
        if not isinstance(value, str):
            return value
        if parser := self.type_descriptor.parameter_info.parser:
            return parser(value)
        if self.choices and value not in self.choices:
            raise ValueError(f"must be {', '.join(self.choices[:-1])} or {self.choices[-1]}, not {value!r}")
        if self.is_switch:
            if value.lower() not in BOOLEANS:
                raise ValueError(f"must be true or false, not {value!r}")
            return BOOLEANS[value.lower()]
        return {int: parse_integer, float: parse_number}.get(self.kind, str)(value)

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Convert a value from the command line or the environment; run the callback. Raises UsageError."""
        if value is None and self.required and not ctx.resilient_parsing:
            name = self.metavar if self.is_argument else f"{self.opts[0]} {self.metavar}"
            raise UsageError(f"{name} is missing: {self.help}")
        source = getattr(ctx.get_parameter_source(self.name), "name", "")
        if value is not None and source in ("COMMANDLINE", "ENVIRONMENT"):  # config.toml is converted already
            try:
                value = self.convert(value)
            except ValueError as error:
                from localllm.cli.compat import NUMBER_HINTS

                typed = ctx.meta[TYPED].names.get(get_own_name(self), self.metavar)
                hint = NUMBER_HINTS.get(f"{ctx.info_name} {typed}", "")
                name = self.find_variable() if source == "ENVIRONMENT" else typed
                raise UsageError(f"{name}: {error}{hint and f'; {hint}'}") from None
        return self.callback(ctx, self, value) if self.callback else value

    def find_variable(self) -> str | None:
        """Return the first of its environment variables that is set, or None."""
        return next((each for each in self.variables if os.environ.get(each)), None)

    def value_from_envvar(self, ctx: Any) -> str | list[str] | None:
        """Return the environment's value, in a list for a repeatable option."""
        name = None if self.name in ctx.meta.get(UNTYPED_ONLY, ()) else self.find_variable()
        return name and ([os.environ[name]] if self.takes_several else os.environ[name])


class Option(ConvertingParameter, TyperOption):
    """An option, copied from Typer's, since Typer cannot use another class."""

    def __init__(self, option: TyperOption):
        vars(self).update(vars(option))
        if self.name == "help":
            self.opts = sorted(self.opts, key=len)  # Typer takes them from a set


class Argument(ConvertingParameter, TyperArgument):
    """An argument, copied from Typer's; also: the option that can replace it."""

    also: Option | None = None

    def __init__(self, argument: TyperArgument):
        vars(self).update(vars(argument))


Parameter = Option | Argument


def convert_parameters(params: Iterable[Any]) -> list[Parameter]:
    """Convert Typer's parameters to Options and Arguments, and link each argument with its option."""
    converted = [Argument(each) if isinstance(each, TyperArgument) else Option(each) for each in params]
    by_name = {each.name: each for each in converted}
    for each in converted:
        if isinstance(each, Argument):
            also = by_name.get(f"{each.name}{NAMED}")
            each.also = also if isinstance(also, Option) else None
    return converted


def get_own_name(param: ConvertingParameter) -> str:
    """Return the function parameter's name; for an option that replaces an argument, the argument's."""
    return param.name.removesuffix(NAMED)


def parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be an integer, not {text!r}") from None


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {text!r}") from None


def parse_size(text: str) -> int:
    """Parse a size in bytes, with an optional K, M or G. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    if not match:
        raise ValueError(f"must be a size in bytes, such as 500M or 8G, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def make_integer_parser(default: str) -> Callable[[str], int | None]:
    """Return an integer parser that returns None for the text `default`."""
    return lambda text: None if text == default else parse_integer(text)


PREFIX = "LOCALLLM_"
TITLE = "title"  # attribute of an option group: the title of its section in the help
NAMED = "_named"  # suffix of the name of the option that can replace an argument
REQUIRED = inspect.Parameter.empty
T = TypeVar("T")


def option(
    names: str, help: str, metavar: str | None = None, *, default: object = None, typed_only: bool = False, **more: Any
) -> Any:
    """Declare an option, as the default of a command's parameter or of a group's field, or in an Annotated.

    names: separated by spaces.  default: a switch is off by default.  typed_only: ignore config.toml and the
    environment.
    more: parser, autocompletion.
    """
    info: Any = typer.Option(*names.split(), metavar=metavar, help=help, **more)
    info.usual, info.typed_only = default, typed_only
    return info


def argument(
    metavar: str,
    help: str,
    autocompletion: Callable[..., Any] | None = None,
    *,
    also: Sequence[str] = (),
    typed_only: bool = False,
) -> Any:
    """Declare an argument, like an option; it is required unless it may be None.

    also: names of an option that can replace it.
    """
    info: Any = typer.Argument(metavar=metavar, help=help, autocompletion=autocompletion)
    info.also, info.typed_only = also, typed_only
    return info


def resolve_declaration(hint: Any, default: object) -> tuple[Any, object]:
    """Return the annotation and default of a parameter or field.

    A default that declares an option or argument moves into the annotation; it contains the actual default.
    """
    if not isinstance(default, OptionInfo | ArgumentInfo):
        return hint, default
    usual = vars(default).get("usual")
    if hint is bool and usual is None:
        usual = False
    if isinstance(default, ArgumentInfo) and type(None) not in get_args(hint):
        usual = REQUIRED
    return Annotated[hint, default], usual


@dataclass_transform(kw_only_default=True)
def option_group(title: str) -> Callable[[type[T]], type[T]]:
    """Make a class an option group, whose options are in the help's section `title`.

    The class becomes a dataclass without __eq__ and __repr__, which take 0.1 ms each to generate.
    """

    def decorate(kind: type[T]) -> type[T]:
        for name, hint in kind.__annotations__.items():
            if name in vars(kind):
                kind.__annotations__[name], default = resolve_declaration(hint, vars(kind)[name])
                setattr(kind, name, default)
        setattr(kind, TITLE, title)
        return dataclass(kw_only=True, repr=False, eq=False)(kind)

    return decorate


class GroupField(NamedTuple):
    """An option of a group: its name, annotation and default."""

    name: str
    type: Any
    default: object


class DeclaredFlags:
    """An option group without a dataclass; dataclasses for the sampling options would take 1 ms.

    Attributes:
        title: of its section in the help.  options: its fields.
    """

    title: ClassVar[str] = ""
    options: ClassVar[Sequence[GroupField]] = ()

    def __init__(self, **values: object):
        vars(self).update({each.name: each.default for each in self.options} | values)


def list_fields(kind: Any) -> Sequence[Any]:
    """Return the options of a group."""
    return kind.options if issubclass(kind, DeclaredFlags) else fields(kind)


def is_group(kind: object) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, DeclaredFlags))


def find_explicit_options(options: Any) -> dict[str, Any]:
    """Return the options of a group that differ from their defaults, by field."""
    values = ((each, getattr(options, each.name)) for each in list_fields(type(options)))
    return {each.name: value for each, value in values if value not in (each.default, None, (), [])}


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for Typer without groups; each option has its environment variable and help panel."""
    declared = inspect.signature(function).parameters.values()

    def call_with_groups(**values: object) -> None:
        function(**{each.name: build_value(each.name, each.annotation, values) for each in declared})

    leaves = [
        leaf
        for each in declared
        for leaf in iter_parameters(each.name, *resolve_declaration(each.annotation, each.default), None)
    ]
    call_with_groups.__name__, call_with_groups.__doc__, call_with_groups.__module__ = (
        function.__name__,
        function.__doc__,
        function.__module__,
    )
    call_with_groups.__annotations__ = {}
    call_with_groups.__signature__ = inspect.Signature(leaves)  # type: ignore[attr-defined]
    return call_with_groups


def iter_parameters(name: str, kind: object, default: object, panel: str | None) -> Iterator[inspect.Parameter]:
    """Yield the parameters of an option group, in the help panel of the group's title; of an option, only its own."""
    if not is_group(kind):
        yield from iter_leaf_parameters(name, kind, default, panel)
        return
    panel = getattr(kind, TITLE)
    for each in list_fields(kind):
        yield from iter_parameters(each.name, each.type, REQUIRED if each.default is MISSING else each.default, panel)


def iter_leaf_parameters(name: str, kind: object, default: object, panel: str | None) -> Iterator[inspect.Parameter]:
    """Yield the parameter of an option, or those of an argument and of the option that may replace it."""
    hint, declared = get_args(kind)
    info, typed_only = copy(declared), vars(declared).get("typed_only", False)
    info.rich_help_panel = panel
    if isinstance(info, ArgumentInfo):
        info.envvar = [f"{PREFIX}MODEL"] if name == "model" and not typed_only else None
        if also := vars(info).get("also"):
            named = typer.Option(*also, metavar=(info.metavar or "").strip("[]."), help=info.help)
            named.autocompletion = info.autocompletion
            yield make_keyword_parameter(f"{name}{NAMED}", hint | None, named, None)
    else:
        names = [each.partition("/")[0] for each in (info.default, *(info.param_decls or ()))]
        info.envvar = [] if typed_only else [get_variable_name(each) for each in names if each.startswith("--")]
    yield make_keyword_parameter(name, hint, info, default)


def make_keyword_parameter(name: str, hint: object, info: object, default: object) -> inspect.Parameter:
    """Create a keyword-only parameter of a signature."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, info])


def get_variable_name(name: str) -> str:
    """Return the environment variable that sets an option, such as LOCALLLM_TOP_K for --top-k."""
    return PREFIX + name.removeprefix("--").upper().replace("-", "_")


def build_group(kind: type[T], values: Mapping[str, object]) -> T:
    """Build an option group from the values of a command's parameters."""
    return cast(T, build_value("", kind, values))


def build_value(name: str, kind: object, values: Mapping[str, object]) -> object:
    """Return an argument of the function: a value, or a group with the values of its fields."""
    if not is_group(kind):
        return values[name]
    return kind(**{each.name: build_value(each.name, each.type, values) for each in list_fields(kind)})  # type: ignore[operator]
