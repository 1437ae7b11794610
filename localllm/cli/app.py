"""All commands in one. Importing this must stay cheap: `localllm --help` does.

Click, not typer: parsing the arguments of `run` takes typer 0.29 0.14 s, of which Pydantic is 0.06, and Click 0.05.
"""

import click

from localllm.cli.bench import bench
from localllm.cli.chat import chat
from localllm.cli.imatrix import imatrix
from localllm.cli.inspect import inspect
from localllm.cli.perplexity import perplexity
from localllm.cli.quantize import quantize
from localllm.cli.run import run
from localllm.cli.terminal import write
from localllm.cli.tokenize import tokenize
from localllm.cli.warmup import warmup


def show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import localllm

        write(f"{localllm.__version__}\n")
        context.exit()


class Commands(click.Group):
    """Lists its commands in the order in which they are given."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=Commands,
    commands={
        command.name or "": command
        for command in (run, chat, inspect, tokenize, quantize, imatrix, perplexity, bench, warmup)
    },
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
    4 prompt does not fit the context, 5 not enough memory, 130 interrupted.
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
