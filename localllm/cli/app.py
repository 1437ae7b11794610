"""The commands and their arguments, as typer knows them. Importing this must stay cheap: `localllm --help` does."""

from typing import Annotated

import typer

from localllm.cli.chat import chat
from localllm.cli.inspect import inspect
from localllm.cli.run import run as run_prompt
from localllm.cli.tokenize import tokenize
from localllm.cli.warmup import warmup

app = typer.Typer(
    name="localllm",
    add_completion=False,
    rich_markup_mode=None,  # Rich takes longer to import than all of the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (run_prompt, chat, inspect, tokenize, warmup):
    app.command(function.__name__)(function)


def show_version(wanted: bool) -> None:
    if wanted:
        import localllm

        typer.echo(localllm.__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def localllm_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Large language models from GGUF files, on your own computer.

    Exit codes: 0 done, 2 usage, 3 unreadable or invalid model, 4 the prompt does not fit the context, 5 not enough
    memory, 130 interrupted, 1 anything else.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def run(arguments: list[str]) -> int:
    """Run the command line; its exit code. All errors come out as they are: typer's own handling hides Ctrl-C."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("localllm", arguments) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
