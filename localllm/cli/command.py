"""A function with annotated parameters as one of Typer's commands.

Typer makes the frame: contexts, the commands below the program, the default map. What is typed is read here, because
Typer would ask Pydantic for every value, whose import takes 40 ms.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand

from localllm.cli.argv import ParsedArgs, as_typed, read_words
from localllm.cli.compat import left_out_line
from localllm.cli.defaults import Chosen, chosen_before, strange
from localllm.cli.help_text import columns, command_help, finished
from localllm.cli.parameters import Parameter, gathered, parameters
from localllm.cli.registry import HELP
from localllm.cli.terminal.output import say, write
from localllm.errors import UsageError

WORDS = "localllm.words"  # under this name a context has the words that were typed, as Words
ESCAPED = {
    "prompt",
    "words",
    "system",
    "stop",
    "dry_sequence_breakers",
}  # in which -e has sequences read


class Command(TyperCommand):
    """A command with parameters of ours."""

    function: Callable[..., None]
    parameters: list[Parameter]

    def get_help(self, ctx: Any) -> str:
        return finished(self.plain_help(ctx, columns()))

    def plain_help(self, ctx: Any, width: int) -> str:
        """All about it, in lines of this width."""
        usage = [ctx.command_path, "[OPTIONS]", *(each.metavar for each in self.parameters if each.is_argument)]
        return command_help(" ".join(usage), self.help or "", self.parameters, [], width)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What was typed to values; what was not has its value from elsewhere. Raises UsageError."""
        words = ctx.meta[WORDS] = read_words(args, self.parameters, self.name or "")
        if words.given("help"):
            write(f"{ctx.get_help()}\n")
            raise typer.Exit
        if words.left_out:
            say(f"localllm: {left_out_line(words.left_out)}")
        ctx.default_map = chosen_before(self.name or "", self.parameters, words.texts.get("model"), {*words.texts})
        if self.name != "config":
            for line in strange(self.name or "", self.parameters, words.texts.get("model")):
                say(f"localllm: warning: {line}")
        for each in self.parameters:
            if each.name != "help":
                ctx.params[each.name] = value_of(each, words, ctx.lookup_default(each.name))
        if ctx.params.get("escape"):
            unescape(ctx.params)
        return []

    def invoke(self, ctx: Any) -> Any:
        """Errors say options as they were typed."""
        try:
            with ctx:
                return self.function(**gathered(self.function, ctx.params))
        except UsageError as error:
            raise UsageError(as_typed(str(error), self.parameters, ctx.meta[WORDS], ctx.default_map)) from error


def value_of(param: Parameter, words: ParsedArgs, chosen: Chosen | None) -> Any:
    """A parameter's value: what was typed, or what was chosen before, or the default. Raises UsageError."""
    if words.given(param.name):
        try:
            return param.converted(words.texts[param.name])
        except ValueError as error:
            raise UsageError(f"{words.names.get(param.name, param.metavar)}: {error}") from None
    if chosen:
        return chosen.value
    if param.required:
        name = param.metavar if param.is_argument else f"{param.on[0]} {param.metavar}"
        raise UsageError(f"{name} is missing: {param.help}")
    return param.default


def unescape(values: dict[str, Any]) -> None:
    """Texts with their escape sequences read."""
    from localllm.cli.terminal.escapes import unescaped

    for name in ESCAPED & values.keys():
        if (value := values[name]) is not None:
            values[name] = unescaped(value) if isinstance(value, str) else [*map(unescaped, value)]


@cache
def command(function: Callable[..., None]) -> Command:
    """A function with annotated parameters as a command."""

    def frame() -> None:
        """What Typer sees of it."""

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(function.__name__, cls=Command, help=function.__doc__, add_help_option=False)(frame)
    made: Any = typer.main.get_command(app)
    made.function, made.parameters = function, [*parameters(function), HELP]
    return made
