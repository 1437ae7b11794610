"""A command that Typer parses and documents, after llama.cpp's spellings have been replaced."""

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import typer
from typer.core import TyperCommand

from localllm.cli.argv import ParsedArgs, parse_words, replace_option_names
from localllm.cli.compat import format_ignored_warning
from localllm.cli.defaults import iter_unknown_settings, list_conflicts, read_config_defaults
from localllm.cli.help_text import colour_help, format_help, help_width
from localllm.cli.parameters import (
    NAMED,
    PREFIX,
    TYPED,
    UNTYPED_ONLY,
    Argument,
    Option,
    Parameter,
    SourcedValue,
    convert_parameters,
    get_own_name,
)
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import to_one_line
from localllm.errors import UsageError

CURRENT: ContextVar[Any] = ContextVar("CURRENT")  # the Context of the running command
CONFIGURED = "localllm.configured"  # key of Context.meta: the values from config.toml, as Chosen
ESCAPED = {"prompt", "words", "system", "stop", "ban", "dry_sequence_breakers"}  # parameters to which -e applies
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def detect_prompt(typed: ParsedArgs, params: list[Parameter]) -> str | None:
    """Return a prompt that was typed in place of the model, or None; config.toml must then name the model."""
    text = typed.texts.get("model")
    if all(each.name != "words" for each in params) or not isinstance(text, str) or "model" in typed.names:
        return None
    is_prompt = " " in text.strip() and not (typed.is_set("words") or typed.is_set("prompt") or os.path.lexists(text))
    return text if is_prompt else None


class ParameterMixin:
    """Base class of the program and its commands: parameters are Options and Arguments of parameters.py."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.params: list[Parameter] = convert_parameters(self.params)
        self.help_option: Option | None = None

    def get_help_option(self, ctx: Any) -> Option | None:
        help_option = super().get_help_option(ctx)  # type: ignore[misc]
        if self.help_option is None and help_option is not None:
            self.help_option = Option(help_option)
        return self.help_option


class Command(ParameterMixin, TyperCommand):  # type: ignore[misc]
    """A command of the program."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters; while parsing, either an argument or its option, whichever was typed."""
        return [each for each in super().get_params(ctx) if TYPED not in ctx.meta or is_expected(each, ctx)]

    def get_help(self, ctx: Any) -> str:
        return colour_help(self.format_plain_help(ctx, help_width()))

    def format_plain_help(self, ctx: typer.Context, width: int) -> str:
        """Return the command's help without colours, wrapped to `width` columns."""
        params = [*self.params, *filter(None, [self.get_help_option(ctx)])]
        metavars = [each.metavar or "" for each in params if isinstance(each, Argument)]
        return format_help(" ".join([ctx.command_path, "[OPTIONS]", *metavars]), self.help or "", params, [], width)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what was typed; other parameters get their values from defaults. Raises UsageError."""
        params = self.get_params(ctx)
        typed = parse_words(args, params, self.name or "")
        if isinstance(template := typed.texts.get("template"), str) and not typed.is_set("help"):
            args = self.apply_template(template, typed, args, params)
            typed = parse_words(args, params, self.name or "")
        if not typed.is_set("help"):
            if prompt := detect_prompt(typed, params):
                typed = parse_words([self.read_configured_model(params, prompt), *args], params, self.name or "")
            self.set_defaults(ctx, params, typed.texts)
            if typed.ignored:
                say(f"localllm: {format_ignored_warning(typed.ignored)}")
        ctx.meta[TYPED] = typed
        arguments = super().parse_args(ctx, typed.words)
        for name in [each for each in ctx.params if each.endswith(NAMED)]:
            ctx.params[name.removesuffix(NAMED)] = ctx.params.pop(name)
        if ctx.params.get("escape"):
            unescape(ctx.params)
        return arguments

    def apply_template(self, name: str, typed: ParsedArgs, args: list[str], params: list[Parameter]) -> list[str]:
        """Put a template's options before the typed ones, which override them. Raises UsageError."""
        from localllm.services.prompt_templates import load_template

        has_model = typed.is_set("model") and not detect_prompt(typed, params)
        overridden = {"model"} if has_model else set[str]()
        overridden |= {conflict for each in typed.texts for conflict in list_conflicts(each)}
        return [*load_template(name).list_arguments({each.replace("_", "-") for each in overridden}), *args]

    def read_configured_model(self, params: list[Parameter], prompt: str) -> str:
        """Return the model that config.toml names. Raises UsageError if it names none."""
        model = read_config_defaults(self.name or "", params, None).get("model")
        if model is None:
            raise UsageError(
                f"{to_one_line(prompt)!r} is not a model; give MODEL before the prompt, or the prompt with -p"
            )
        return str(model.value)

    def set_defaults(self, ctx: typer.Context, params: list[Parameter], typed: Mapping[str, object]) -> None:
        """Set the defaults from config.toml, except those that conflict with the command line. Raises UsageError."""
        model = model_name if isinstance(model_name := typed.get("model"), str) else None
        ctx.meta[UNTYPED_ONLY] = {conflict for name in typed for conflict in list_conflicts(name)} - typed.keys()
        is_remote = "endpoint" in typed or bool(os.environ.get(f"{PREFIX}ENDPOINT"))
        defaults = read_config_defaults(self.name or "", params, model, is_remote)
        ctx.meta[CONFIGURED] = {name: each for name, each in defaults.items() if name not in ctx.meta[UNTYPED_ONLY]}
        ctx.default_map = {name: each.value for name, each in ctx.meta[CONFIGURED].items()}
        if self.name != "config":
            for line in iter_unknown_settings(self.name or "", params, model):
                say(f"localllm: warning: {line}")

    def invoke(self, ctx: Any) -> object:
        """Run the command; errors name options as they were typed."""
        CURRENT.set(ctx)
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise UsageError(
                replace_option_names(str(error), self.params, ctx.meta[TYPED], self.collect_settings(ctx))
            ) from error

    def collect_settings(self, ctx: typer.Context) -> dict[str, SourcedValue]:
        """Return the values from config.toml and the environment, with their sources."""
        sources = {each.name: ctx.get_parameter_source(each.name) for each in self.params}
        variables = {each.name: each.find_variable() for each in self.params}
        result: dict[str, SourcedValue] = ctx.meta[CONFIGURED] | {
            name: SourcedValue(ctx.params[name], variables[name] or "")
            for name, source in sources.items()
            if source is not None and source.name == "ENVIRONMENT"
        }
        return result


def get_values_for(model: str) -> dict[str, Any]:
    """Return the running command's parameter values for one of its models. Raises UsageError."""
    ctx = CURRENT.get()
    values: dict[str, Any] = dict(ctx.params)
    configured = read_config_defaults(ctx.command.name, ctx.command.params, model)
    for param in ctx.command.params:
        source = getattr(ctx.get_parameter_source(param.name), "name", "")
        if source in ("COMMANDLINE", "ENVIRONMENT") or param.name in ctx.meta[UNTYPED_ONLY]:
            continue
        if param.name in configured:
            values[param.name] = configured[param.name].value
        elif param.name in ctx.meta[CONFIGURED]:  # a setting of the model that the command line names
            values[param.name] = param.default
    return values


def is_expected(param: object, ctx: typer.Context) -> bool:
    """Return whether to parse a parameter.

    Of an argument and its option, only the typed one is parsed, or else the argument.
    """
    if isinstance(param, Argument):
        return param.also is None or get_own_name(param) not in ctx.meta[TYPED].names
    return (
        not isinstance(param, Option) or not param.name.endswith(NAMED) or get_own_name(param) in ctx.meta[TYPED].names
    )


def unescape(values: dict[str, object]) -> None:
    """Replace the escape sequences in option values."""

    for name in ESCAPED & values.keys():
        if isinstance(value := values[name], str):
            values[name] = unescape_text(value)
        elif isinstance(value, list):
            values[name] = [*map(unescape_text, value)]


def unescape_text(text: str) -> str:
    r"""Replace \n, \r, \t, \', \", \\ and \xNN, a byte of UTF-8, by their characters; other sequences are kept."""
    unescaped = re.sub(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))", _replace_escape, text)
    return unescaped.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _replace_escape(match: re.Match[str]) -> str:
    """Replace an escape sequence; bytes above 0x7F stay surrogates until they are decoded as UTF-8."""
    if match[1]:
        return bytes([int(match[1], 16)]).decode(errors="surrogateescape")
    return ESCAPES[match[2]]
