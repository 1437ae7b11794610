"""All commands in one. Importing this must stay cheap: `localllm --help` does."""

from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from localllm.cli.command import WithoutPydantic, command, option
from localllm.cli.terminal import write

COMMANDS = (
    "run", "chat", "map", "inspect", "tokenize", "quantize", "imatrix", "perplexity", "bench", "warmup", "cache",
    "replay",
)  # fmt: skip


class Commands(WithoutPydantic, TyperGroup):
    """Makes a command from the function of its name in the module of its name, when it is asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        return command(getattr(import_module(f"localllm.cli.{cmd_name}"), cmd_name))


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
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


localllm = typer.main.get_command(app)


def execute(arguments: list[str]) -> int:
    """Run the command line; its exit code. Errors come out as they are: Typer's own handling would hide Ctrl-C."""
    try:
        with localllm.make_context("localllm", arguments) as context:
            localllm.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
