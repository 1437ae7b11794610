"""All commands in one. Importing this must stay cheap: `localllm --help` does."""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from localllm.cli.command import Command, command
from localllm.cli.help_text import columns, command_help, finished
from localllm.cli.parameters import Parameter, option
from localllm.cli.registry import COMMANDS, COMPLETE, HELP, function, require_command, summary
from localllm.cli.terminal.output import write
from localllm.errors import UsageError


class Commands(TyperGroup):
    """Makes a command from the function of its name in the module of its name, when it is asked for."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return finished(self.plain_help(ctx, columns()))

    def plain_help(self, ctx: typer.Context, width: int) -> str:
        """What there is, in lines of this width. To make commands of all functions would take 30 ms."""
        behind = [(name, summary(name)) for name in COMMANDS]
        return command_help(f"{ctx.command_path} [OPTIONS] COMMAND [ARGS]...", self.help or "", OPTIONS, behind, width)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Command | None:  # type: ignore[override]
        return command(function(cmd_name)) if cmd_name in COMMANDS else None

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0].startswith("-") and args[0] not in {name for each in OPTIONS for name in each.names}:
            raise UsageError(f"{args[0]} stands behind a command: localllm run MODEL {args[0]} ..., say")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        require_command(args[0])
        return super().resolve_command(ctx, args)


VERSION = Parameter("version", Annotated[bool, option("-V", "--version", help="Show the version.")], False)
OPTIONS = [VERSION, HELP]

app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, invoke_without_command=True, add_help_option=False
)


@app.callback()
def begin(
    context: typer.Context,
    version: Annotated[bool, typer.Option(*VERSION.names)] = False,
    help: Annotated[bool, typer.Option(*HELP.names)] = False,
) -> None:
    """Large language models from GGUF files, on your own computer.

    \b
    Exit codes: 0 done, 1 other errors, 2 usage, 3 model unreadable or invalid,
    4 prompt does not fit the context, 5 not enough memory, 6 some records failed,
    7 answer cut short of its schema or grammar, 130 interrupted.

    Examples:
      localllm chat
      localllm run model.gguf -p "Why is the sky blue?"
      localllm help run
    """
    if version:
        import localllm

        write(f"{localllm.__version__}\n")
        raise typer.Exit
    if help:
        write(f"{context.get_help()}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


program: Any = typer.main.get_command(app)  # of the class Commands


def context_of(name: str | None = None) -> typer.Context:
    """The context that a command would have, or the program's. Raises UsageError if there is no such command."""
    whole = typer.Context(program, info_name="localllm")
    if name is None:
        return whole
    found, made, _ = program.resolve_command(whole, [name])
    return typer.Context(made, parent=whole, info_name=found)


def execute(arguments: list[str]) -> int:
    """Run the command line; its exit code. Errors come out as they are: Typer's own handling would hide Ctrl-C."""
    if os.environ.get(COMPLETE):
        from localllm.cli.commands.completion import answer

        answer(arguments)
        return 0
    try:
        with program.make_context("localllm", arguments) as context:
            program.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
