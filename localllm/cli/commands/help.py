"""localllm help: show the help of the program or of a command."""

import typer

from localllm.cli.options.offers import offer_commands
from localllm.cli.parameters import argument


def help(
    command: str | None = argument("[COMMAND]", "Command to explain.  [default: list all commands]", offer_commands),
) -> None:
    """Show the help of a command.

    Examples:
      localllm help
      localllm help run
    """
    from localllm.cli.app import context_of

    typer.echo(context_of(command).get_help())
