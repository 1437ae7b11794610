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
    from localllm.cli.app import make_context

    typer.echo(make_context(command).get_help())
