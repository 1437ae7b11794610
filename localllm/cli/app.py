"""All commands in one. Importing this must stay cheap: `localllm --help` does."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.cli.command import command, option
from localllm.cli.terminal import write
from localllm.cli.typer_command import Light
from localllm.cli.words import did_you_mean
from localllm.errors import UsageError

COMMANDS = (
    "run", "chat", "map", "inspect", "tokenize", "quantize", "imatrix", "perplexity", "bench", "warmup", "cache",
    "replay", "list", "pull", "rm", "fit", "sessions", "config", "completion", "help",
)  # fmt: skip


class Commands(Light, TyperGroup):
    """Makes a command from the function of its name in the module of its name, when it is asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        known = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0].startswith("-") and args[0] not in known:
            raise UsageError(f"{args[0]} stands behind a command: localllm run MODEL {args[0]} ..., say")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS:
            if name.endswith(".gguf"):
                raise UsageError(f"there is no command {name}; to talk with that model: localllm chat {name}")
            meant = did_you_mean(name, COMMANDS) or "localllm --help lists them"
            raise UsageError(f"there is no command {name}; {meant}")
        return name, self.get_command(ctx, name), args[1:]

    def behind(self) -> list[tuple[str, str]]:
        """The first line of every docstring: to make commands of all functions would take 30 ms."""
        return [(name, (function(name).__doc__ or "").partition("\n")[0]) for name in COMMANDS]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        return command(function(cmd_name))


def function(name: str) -> Callable[..., None]:
    return getattr(import_module(f"localllm.cli.{name}"), name)


COMPLETE = "_LOCALLLM_COMPLETE"  # in the environment: a shell asks, see completion.py

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        import localllm

        write(f"{localllm.__version__}\n")
        raise typer.Exit


@app.callback()
def begin(
    context: typer.Context,
    version: Annotated[
        bool, option("-V", "--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Large language models from GGUF files, on your own computer.

    \b
    Exit codes: 0 done, 1 other errors, 2 usage, 3 model unreadable or invalid,
    4 prompt does not fit the context, 5 not enough memory, 6 some records failed,
    130 interrupted.

    Examples:
      localllm chat
      localllm run model.gguf -p "Why is the sky blue?"
      localllm help run
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


localllm: Any = typer.main.get_command(app)  # of the class Commands


def context_of(name: str | None = None) -> typer.Context:
    """The context that a command would have, or the program's. Raises UsageError if there is no such command."""
    whole = typer.Context(localllm, info_name="localllm", **localllm.context_settings)
    if name is None:
        return whole
    found, made, _ = localllm.resolve_command(whole, [name])
    return typer.Context(made, parent=whole, info_name=found)


def params_of(name: str) -> list[Any]:
    """A command's parameters, as Typer holds them. Raises UsageError."""
    context = context_of(name)
    return context.command.get_params(context)


def execute(arguments: list[str]) -> int:
    """Run the command line; its exit code. Errors come out as they are: Typer's own handling would hide Ctrl-C."""
    if os.environ.get(COMPLETE):
        from localllm.cli.completion import answer

        answer(arguments)
        return 0
    try:
        with localllm.make_context("localllm", arguments) as context:
            localllm.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
