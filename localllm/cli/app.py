"""All commands in one. Importing this must stay cheap: `localllm --help` does.

Click, not typer: parsing the arguments of `run` takes typer 0.29 0.14 s, of which Pydantic is 0.06, and Click 0.05.
"""

from importlib import import_module

import click

from localllm.cli.terminal import write

COMMANDS = (
    "run", "chat", "map", "inspect", "tokenize", "quantize", "imatrix", "perplexity", "bench", "warmup", "cache",
)  # fmt: skip


def show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import localllm

        write(f"{localllm.__version__}\n")
        context.exit()


class Commands(click.Group):
    """Imports a command, from the module of its name, when it is asked for: 6 ms of a short `run` are saved by it."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return getattr(import_module(f"localllm.cli.{name}"), name) if name in COMMANDS else None


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version, help="Show the version."
)
@click.pass_context
def localllm(context: click.Context) -> None:
    """Large language models from GGUF files, on your own computer.

    \b
    Exit codes: 0 done, 1 other errors, 2 usage, 3 model unreadable or invalid,
    4 prompt does not fit the context, 5 not enough memory, 6 some records failed,
    130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def execute(arguments: list[str]) -> int:
    """Run the command line; its exit code. Errors come out as they are: Click's own handling would hide Ctrl-C."""
    try:
        with localllm.make_context("localllm", arguments) as context:
            localllm.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return 0
